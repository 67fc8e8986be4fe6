from __future__ import annotations

from discovery.signal import AGREEMENTS, LIVE, UNPUBLISHED, Signal, SignalState, SignalTracker


def tracker(*, publishes: bool = True) -> SignalTracker:
    made = SignalTracker(publishes=publishes, now=0.0, blind_after_s=5.0, beacon_period_s=2.0)
    made.beacon(LIVE, 0.0)
    return made


def beaconed(made: SignalTracker, until: float) -> SignalTracker:
    made.beacon(LIVE, until)
    return made


def test_an_engine_without_kv_events_is_blind_at_once_and_told_what_to_start_it_with() -> None:
    assert tracker(publishes=False).state(0.0) == UNPUBLISHED
    assert UNPUBLISHED.state is SignalState.BLIND
    assert "--kv-events-config" in UNPUBLISHED.reason


def test_an_idle_engine_stays_live_however_long_it_is_silent() -> None:
    assert beaconed(tracker(), 1000.0).state(1001.0) == LIVE


def test_R3_an_engine_that_serves_and_never_publishes_is_blind_within_ten_seconds() -> None:
    made = tracker()
    made.served(1.0, new_blocks=3)
    made.beacon(LIVE, 4.0)
    assert made.state(5.9) == LIVE
    assert made.state(6.0).state is SignalState.BLIND
    assert made.state(6.0).reason


def test_R3_later_prompts_do_not_put_the_verdict_off() -> None:
    made = tracker()
    for second in range(1, 11):
        made.served(float(second), new_blocks=1)
        made.beacon(LIVE, float(second))
    assert made.state(10.0).state is SignalState.BLIND


def test_R4_an_engine_whose_events_stop_mid_run_is_stale_and_says_since_when() -> None:
    made = tracker()
    made.served(1.0, new_blocks=3, sent_at=0.9)
    made.heard(1.1)
    made.served(20.0, new_blocks=3, sent_at=19.0)
    made.beacon(LIVE, 25.0)
    assert made.state(25.0) == Signal(SignalState.STALE, "its events stopped 24 s ago")


def test_prompts_that_are_wholly_cached_prove_nothing() -> None:
    made = tracker()
    made.served(1.0, new_blocks=0)
    assert beaconed(made, 100.0).state(100.0) == LIVE


def test_events_that_come_before_the_first_token_are_that_prompt_s() -> None:
    made = tracker()
    made.heard(2.0)
    made.served(3.0, new_blocks=4, sent_at=1.0)
    assert beaconed(made, 60.0).state(60.0) == LIVE


def test_events_that_came_before_the_prompt_was_sent_are_not() -> None:
    made = tracker()
    made.heard(0.5)
    made.served(3.0, new_blocks=4, sent_at=1.0)
    assert beaconed(made, 8.0).state(8.0).state is SignalState.STALE


def test_without_the_time_it_was_sent_an_event_shortly_before_the_first_token_counts_as_its_own() -> None:
    made = tracker()
    made.heard(1.0)
    made.served(3.0, new_blocks=4)
    assert beaconed(made, 60.0).state(60.0) == LIVE


def test_a_silent_engine_that_is_heard_again_is_live_again() -> None:
    made = tracker()
    made.served(1.0, new_blocks=3)
    made.beacon(LIVE, 9.0)
    assert made.state(9.0).state is SignalState.BLIND
    made.heard(9.5)
    assert made.state(9.5) == LIVE


def test_events_that_change_nothing_we_hold_are_heard_through_the_beacon() -> None:
    made = tracker()
    made.served(1.0, new_blocks=3)
    made.beacon(LIVE, 3.0, quiet=4, published=True)
    made.beacon(LIVE, 9.0, quiet=4, published=True)
    assert made.state(9.0) == LIVE


def test_one_who_joins_late_knows_from_the_first_beacon_that_the_engine_did_publish() -> None:
    made = SignalTracker(publishes=True, now=0.0)
    made.beacon(LIVE, published=True, now=0.5)
    made.served(1.0, new_blocks=3)
    made.beacon(LIVE, published=True, now=7.0)
    assert made.state(7.0) == Signal(SignalState.STALE, "its events stopped 6 s ago")


def test_a_new_epoch_starts_the_judgement_afresh() -> None:
    made = tracker()
    made.heard(1.0)
    made.served(10.0, new_blocks=1, sent_at=9.0)
    made.restarted()
    made.beacon(LIVE, 20.0)
    assert made.state(20.0) == LIVE
    made.served(20.0, new_blocks=1)
    made.beacon(LIVE, 25.0)
    assert made.state(25.0).state is SignalState.BLIND, "it has not been heard in this life"


def test_a_relay_that_misses_three_beacons_makes_its_endpoints_stale() -> None:
    made = tracker()
    assert made.state(6.0) == LIVE
    assert made.state(6.5).state is SignalState.STALE
    assert "relay" in made.state(6.5).reason
    assert beaconed(made, 7.0).state(7.0) == LIVE


def test_an_endpoint_no_relay_ever_spoke_of_is_stale_too() -> None:
    assert SignalTracker(publishes=True, now=100.0).state(100.0) == LIVE
    assert SignalTracker(publishes=True, now=100.0).state(107.0).state is SignalState.STALE


def test_what_the_relay_sees_is_passed_on_with_its_reason() -> None:
    made = tracker()
    for seen in (Signal(SignalState.MISMATCH, "block size"), Signal(SignalState.PARTIAL, "batches 0 to 3")):
        made.beacon(seen, 1.0)
        assert made.state(1.0) == seen


def test_a_partial_signal_is_believed_and_a_mismatch_is_not() -> None:
    believed = {state: Signal(state).believed for state in SignalState}
    assert believed == {
        SignalState.LIVE: True,
        SignalState.PARTIAL: True,
        SignalState.BLIND: False,
        SignalState.STALE: False,
        SignalState.MISMATCH: False,
    }


def test_silence_is_graver_than_a_partial_signal() -> None:
    made = tracker()
    made.beacon(Signal(SignalState.PARTIAL, "batches 0 to 3"), 1.0)
    made.served(1.0, new_blocks=3)
    made.beacon(Signal(SignalState.PARTIAL, "batches 0 to 3"), 7.0)
    assert made.state(7.0).state is SignalState.BLIND


def test_a_lost_bus_is_stale_until_it_is_back_and_its_silence_is_not_the_engine_s() -> None:
    made = tracker()
    made.served(1.0, new_blocks=3)
    made.bus_lost(2.0)
    made.bus_lost(7.0)
    assert made.state(12.0) == Signal(SignalState.STALE, "the bus has been gone for 10 s")
    made.bus_back(12.0)
    assert made.state(12.0) == LIVE


PARTIAL = Signal(SignalState.PARTIAL, "batches 0 to 3")


def hits(made: SignalTracker, count: int, blocks: int, known: int) -> None:
    for _ in range(count):
        made.hit(blocks, known, new=1, sent_at=0.0)


def test_a_partial_signal_is_live_again_when_all_hits_were_known_for_a_while() -> None:
    made = tracker()
    made.beacon(PARTIAL, 1.0)
    hits(made, AGREEMENTS - 1, blocks=4, known=4)
    assert made.state(1.0) == PARTIAL
    hits(made, 1, blocks=3, known=4)
    assert made.state(1.0) == LIVE
    made.beacon(PARTIAL, 2.0)
    assert made.state(2.0) == LIVE, "its relay knows no more than before"


def test_a_hit_of_more_than_was_known_makes_it_partial_again() -> None:
    made = tracker()
    made.beacon(PARTIAL, 1.0)
    hits(made, AGREEMENTS, blocks=4, known=4)
    hits(made, 1, blocks=5, known=4)
    assert made.state(1.0) == PARTIAL
    hits(made, AGREEMENTS - 1, blocks=4, known=4)
    assert made.state(1.0) == PARTIAL, "they have to be in a row"


def test_prompts_that_found_nothing_prove_nothing() -> None:
    made = tracker()
    made.beacon(PARTIAL, 1.0)
    hits(made, 100, blocks=0, known=0)
    hits(made, 100, blocks=0, known=7)
    assert made.state(1.0) == PARTIAL


def test_what_agreed_before_a_new_loss_does_not_count_after_it() -> None:
    made = tracker()
    made.beacon(PARTIAL, 1.0)
    hits(made, AGREEMENTS, blocks=4, known=4)
    made.restarted()
    made.beacon(PARTIAL, 2.0)
    assert made.state(2.0) == PARTIAL


def test_agreement_makes_nothing_else_live() -> None:
    made = tracker()
    made.beacon(Signal(SignalState.MISMATCH, "block size"), 1.0)
    hits(made, AGREEMENTS, blocks=4, known=4)
    assert made.state(1.0).state is SignalState.MISMATCH


def test_a_prompt_that_the_engine_had_whole_is_owed_no_event() -> None:
    made = tracker()
    made.beacon(PARTIAL, 1.0)
    made.served(2.0, new_blocks=4, sent_at=1.5)
    made.hit(4, known=0, new=0, sent_at=1.5)
    assert beaconed(made, 9.0).state(9.0).state is SignalState.LIVE
    made.served(10.0, new_blocks=4, sent_at=9.5)
    made.hit(4, known=0, new=0, sent_at=11.0)
    assert beaconed(made, 20.0).state(20.0).state is SignalState.BLIND, "that was a later one"
