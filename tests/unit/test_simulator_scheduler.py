"""The scheduler: first come first served, hits that never cover the last token, room made by preemption, time as asked."""

from __future__ import annotations

import random

import pytest

from engines.simulator.cache import BlockCache, Removed, Stored
from engines.simulator.handover import Fetch, Handover, Keep, contents
from engines.simulator.hashes import BlockNamer
from engines.simulator.scheduler import Limits, Scheduler
from engines.simulator.sequences import Prompt, Sequence, Spoken
from engines.simulator.timing import Timing
from engines.simulator.words import Words
from engines.types import EngineKind

SIZE = 4
WORDS = Words({10: " a", 11: " b", 12: " c"})


class Played:
    """A scheduler driven without a clock, keeping what it said at each step."""

    def __init__(
        self,
        blocks: int = 64,
        *,
        tokens: int = 1024,
        sequences: int = 16,
        kind: EngineKind = EngineKind.VLLM,
        prefix_caching: bool = True,
    ) -> None:
        sglang = kind is EngineKind.SGLANG
        self.cache = BlockCache(blocks, SIZE, duplicates=not sglang)
        timing = Timing(prefill_tokens_per_s=1000.0, decode_step_s=0.01, decode_sequence_s=0.001, speedup=1.0)
        limits = Limits(sequences, tokens)
        self.scheduler = Scheduler(self.cache, timing, limits, stores_generated_at_end=sglang, prefix_caching=prefix_caching)
        self.namer = BlockNamer(kind, SIZE)
        self.time_s = 0.0
        self.steps: list[list[object]] = []

    def submit(self, tokens: list[int], limit: int = 1, salt: str | None = None, handover: Handover | None = None) -> Spoken:
        sequence = Spoken(Prompt(tokens, limit, salt=salt, handover=handover), self.namer.chain(salt), WORDS)
        self.scheduler.submit(sequence)
        return sequence

    def step(self) -> list[tuple[Sequence, int]] | None:
        planned = self.scheduler.plan()
        if planned is None:
            return None
        self.time_s += planned.duration_s
        gained = self.scheduler.complete(planned)
        self.steps.append(list(self.cache.take_changes()))
        self.scheduler._check()
        return gained

    def finish(self) -> None:
        while self.step() is not None:
            pass


def test_full_prompt_blocks_are_stored_when_prefill_ends_and_generated_ones_as_they_fill() -> None:
    played = Played()
    played.submit(list(range(6)), limit=8)
    played.finish()
    runs = [change for changes in played.steps for change in changes if isinstance(change, Stored)]
    assert [len(run.names) for run in runs] == [1, 1, 1]
    assert played.steps[0] == [runs[0]]
    assert runs[0].tokens == (0, 1, 2, 3)
    assert [run.parent for run in runs] == [None, runs[0].names[0], runs[1].names[0]]
    assert runs[1].tokens[:2] == (4, 5)


def test_sglang_stores_generated_blocks_when_the_request_ends() -> None:
    played = Played(kind=EngineKind.SGLANG)
    played.submit(list(range(6)), limit=8)
    played.finish()
    sizes = [[len(change.names) for change in changes if isinstance(change, Stored)] for changes in played.steps]
    assert sizes[0] == [1]
    assert sizes[1:-1] == [[]] * 6
    assert sizes[-1] == [2]


@pytest.mark.parametrize(("length", "found"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (11, 8)])
def test_a_hit_never_covers_the_last_token(length: int, found: int) -> None:
    played = Played()
    played.submit(list(range(length)))
    played.finish()
    again = played.submit(list(range(length)))
    played.finish()
    assert again.cached == found
    assert (played.scheduler.counters.queries, played.scheduler.counters.hits) == (2 * length, found)


def test_the_last_block_of_a_prompt_of_whole_blocks_is_stored_twice_by_vllm_only() -> None:
    for kind, times in ((EngineKind.VLLM, 2), (EngineKind.SGLANG, 1)):
        played = Played(kind=kind)
        for _ in range(2):
            played.submit(list(range(8)))
            played.finish()
        runs = [change for changes in played.steps for change in changes if isinstance(change, Stored)]
        assert [run.tokens[-4:] for run in runs].count((4, 5, 6, 7)) == times


def test_removals_come_before_stores_and_tail_first() -> None:
    played = Played(blocks=4)
    first = played.submit(list(range(12)))
    played.finish()
    played.submit(list(range(100, 112)))
    played.finish()
    changes = played.steps[-1]
    assert changes[:2] == [Removed(name) for name in reversed(first.chain.names[1:3])]
    assert isinstance(changes[2], Stored)


def test_salts_are_told_apart() -> None:
    played = Played()
    sequences = [played.submit(list(range(9)), salt=salt) for salt in ("s1", "s2")]
    played.finish()
    again = played.submit(list(range(9)), salt="s1")
    played.finish()
    assert [sequence.cached for sequence in (*sequences, again)] == [0, 0, 8]


def test_a_long_prompt_is_computed_in_chunks_announced_one_by_one() -> None:
    played = Played(tokens=8)
    played.submit(list(range(20)))
    assert [played.step() for _ in range(2)] == [[], []]
    assert played.step() != []
    assert [[len(change.names) for change in changes if isinstance(change, Stored)] for changes in played.steps] == [[2], [2], [1]]


def test_sequences_are_admitted_in_the_order_they_came_and_no_more_than_allowed() -> None:
    played = Played(sequences=2)
    first, second, third = (played.submit([number] * 3, limit=2) for number in (1, 2, 3))
    played.step()
    assert list(played.scheduler.running) == [first, second]
    assert list(played.scheduler.waiting) == [third]
    played.step()
    played.step()
    assert list(played.scheduler.running) == [third]


def test_when_no_block_is_left_the_youngest_starts_again_and_everything_ends() -> None:
    played = Played(blocks=5)
    sequences = [played.submit([number] * 7, limit=9) for number in (1, 2)]
    played.finish()
    assert played.scheduler.counters.preemptions > 0
    assert [sequence.generated for sequence in sequences] == [9, 9]
    assert played.cache.used == 0


def test_an_abort_frees_the_blocks_at_once_wherever_the_sequence_is() -> None:
    played = Played(sequences=1)
    running, waiting = played.submit(list(range(8)), limit=5), played.submit(list(range(8)), limit=5)
    planned = played.scheduler.plan()
    assert planned is not None
    assert played.scheduler.abort(running)
    assert played.scheduler.abort(waiting)
    assert not played.scheduler.abort(waiting)
    assert played.scheduler.complete(planned) == []
    assert (played.cache.used, played.scheduler.counters.aborted) == (0, 2)
    assert played.scheduler.plan() is None


def test_time_is_prefill_at_its_rate_and_decode_by_the_batch() -> None:
    played = Played()
    played.submit(list(range(100)), limit=2)
    played.submit(list(range(200, 300)), limit=2)
    played.step()
    assert played.time_s == pytest.approx(0.2)
    played.step()
    assert played.time_s == pytest.approx(0.2 + 0.01 + 2 * 0.001)


def test_a_cached_prefix_costs_no_time() -> None:
    played = Played()
    played.submit(list(range(100)))
    played.finish()
    before = played.time_s
    played.submit(list(range(100)))
    played.finish()
    assert played.time_s - before == pytest.approx(0.004)


@pytest.mark.parametrize(("speedup", "expected"), [(1.0, 0.5), (10.0, 0.05), (0.0, 0.0)])
def test_speedup_scales_the_clock_and_0_waits_for_nothing(speedup: float, expected: float) -> None:
    assert Timing(1000.0, 0.01, 0.0, speedup).step_s(500, 0) == pytest.approx(expected)


def test_equal_prompts_get_equal_answers_and_a_continued_one_goes_on_as_it_would_have() -> None:
    played = Played()
    whole = played.submit(list(range(9)), limit=12)
    played.finish()
    part = played.submit(list(range(9)), limit=5)
    played.finish()
    rest = played.submit(part.tokens.tolist(), limit=7)
    played.finish()
    assert rest.tokens == whole.tokens


@pytest.mark.parametrize("kind", list(EngineKind))
def test_no_block_is_lost_however_requests_come_and_go(kind: EngineKind) -> None:
    for seed in range(10):
        chance = random.Random(seed)
        played = Played(blocks=20, tokens=16, sequences=4, kind=kind)
        alive: list[Spoken] = []
        for _ in range(150):
            if chance.random() < 0.5:
                prompt = [chance.randrange(3)] * chance.randint(1, 8) + list(range(chance.randint(0, 20)))
                alive.append(played.submit(prompt, limit=chance.randint(1, 12)))
            if alive and chance.random() < 0.1:
                played.scheduler.abort(alive.pop(chance.randrange(len(alive))))
                played.scheduler._check()
            played.step()
        played.finish()
        assert played.cache.used == 0
        assert all(sequence.done for sequence in alive)


# ---------------------------------------------------------------------------------------------- KV from and for other engines

ELSEWHERE = Fetch("http://h:1", "key")


def right(tokens: list[int]) -> tuple[int, ...]:
    return contents(tokens, SIZE)


def test_what_is_fetched_is_neither_computed_nor_found_and_announced_when_it_has_come() -> None:
    played, tokens = Played(), list(range(10))
    sequence = played.submit(tokens, limit=2, handover=ELSEWHERE)
    assert played.step() is None
    assert played.scheduler.take_to_fetch() == [sequence]
    assert (played.scheduler.missing(sequence), played.cache.used, played.scheduler.queued) == (3, 3, 1)
    assert played.scheduler.counters.queries == 0
    played.scheduler.fetched(sequence, right(tokens), cached=4)
    (run,) = played.cache.take_changes()
    assert isinstance(run, Stored)
    assert len(run.names) == 2
    played.finish()
    counters = played.scheduler.counters
    assert (counters.queries, counters.hits, counters.fetched, counters.generated) == (10, 0, 10, 2)
    assert (sequence.cached, sequence.spoiled, played.cache.used) == (4, 0, 0)
    assert played.time_s == pytest.approx(0.001 + 0.011)  # the prompt's last token, and a decode step


def test_only_what_is_not_there_is_fetched() -> None:
    played, tokens = Played(), list(range(10))
    played.submit(tokens)
    played.finish()
    sequence = played.submit(tokens, handover=ELSEWHERE)
    played.step()
    assert played.scheduler.missing(sequence) == 1
    played.scheduler.fetched(sequence, right(tokens)[2:])
    played.finish()
    assert (played.scheduler.counters.hits, played.scheduler.counters.fetched, sequence.spoiled) == (8, 2, 0)


def test_what_is_not_fetched_after_all_is_computed() -> None:
    played, tokens = Played(), list(range(10))
    played.submit(tokens)
    played.finish()
    sequence = played.submit(tokens, limit=3, handover=ELSEWHERE)
    played.step()
    played.scheduler.unfetched(sequence)
    played.finish()
    assert (sequence.generated, played.scheduler.counters.fetched, played.scheduler.counters.hits) == (3, 0, 8)


def test_wrong_kv_is_another_text_and_so_it_is_for_whoever_hits_it_later() -> None:
    tokens, texts = list(range(10)), []
    for given in (right(tokens), right([9, *tokens[1:]])):
        played = Played()
        fetching = played.submit(tokens, limit=8, handover=ELSEWHERE)
        played.step()
        played.scheduler.fetched(fetching, given)
        played.finish()
        hitting = played.submit(tokens, limit=8)
        played.finish()
        texts.append([list(sequence.tokens) for sequence in (fetching, hitting)])
    assert texts[0][0] != texts[1][0]
    assert texts[0][0] == texts[0][1]
    assert texts[1][0] == texts[1][1]


def test_a_spoiled_block_is_clean_when_somebody_else_has_taken_it() -> None:
    played, tokens = Played(blocks=3), list(range(10))
    sequence = played.submit(tokens, handover=ELSEWHERE)
    played.step()
    played.scheduler.fetched(sequence, (0, 0, 0))
    played.finish()
    played.submit(list(range(50, 60)))
    played.finish()
    again = played.submit(tokens)
    played.finish()
    assert (sequence.spoiled != 0, again.spoiled) == (True, 0)


def test_blocks_are_kept_until_they_are_forgotten_and_nobody_gets_them_before() -> None:
    played, tokens = Played(blocks=4), list(range(10))
    kept = played.submit(tokens, handover=Keep("key"))
    played.finish()
    assert (kept.done, played.cache.used, kept in played.scheduler.kept) == (True, 3, True)
    played.submit(list(range(50, 60)))
    assert played.step() is None
    played.scheduler.forget(kept)
    played.finish()
    assert (played.cache.used, played.scheduler.counters.finished) == (0, {"length": 2})
    played.scheduler.forget(kept)  # whoever comes late


@pytest.mark.parametrize(("after_stop", "kept"), [(True, 1), (False, 0)])
def test_an_answer_that_ended_by_itself_is_kept_where_that_does_not_matter(after_stop: bool, kept: int) -> None:
    played = Played()
    sequence = Spoken(Prompt([1, 2], 1, "stop", handover=Keep("key", after_stop=after_stop)), played.namer.chain(), WORDS)
    played.scheduler.submit(sequence)
    played.finish()
    assert (len(played.scheduler.kept), played.cache.used) == (kept, kept)


@pytest.mark.parametrize("fails", [True, False])
def test_a_sequence_that_ends_while_it_fetches_gives_its_blocks_back(fails: bool) -> None:
    played = Played()
    sequence = played.submit(list(range(10)), handover=ELSEWHERE)
    played.step()
    (played.scheduler.fail if fails else played.scheduler.abort)(sequence)
    assert (played.cache.used, played.scheduler.queued, played.scheduler.take_to_fetch()) == (0, 0, [])
    assert (played.scheduler.counters.finished.get("error", 0), played.scheduler.counters.aborted) == (int(fails), int(not fails))


def test_without_prefix_caching_nothing_is_found_or_announced() -> None:
    played = Played(prefix_caching=False)
    for _ in range(2):
        played.submit(list(range(10)), limit=5)
        played.finish()
    assert (played.scheduler.counters.hits, [change for changes in played.steps for change in changes]) == (0, [])
