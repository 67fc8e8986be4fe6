"""In which order those who wait are let in, who yields when the queue is full, and what the others are told."""

import doctest
import math

import pytest

from router import admission as module
from router.admission import AdmissionQueue, Pace, QueueFull, QueueLimits, Ticket, retry_after


def queue_of(max_waiting: int = 100, max_wait_s: float = 10.0) -> AdmissionQueue[str]:
    return AdmissionQueue(QueueLimits(max_waiting, max_wait_s))


def enter(queue: AdmissionQueue[str], *requests: str, priority: int = 0, work: float = 1.0) -> list[Ticket[str]]:
    """Requests named by their tenant's letter and a number."""
    tickets = [queue.enter(request, tenant=request[0], now=0.0, priority=priority, work=work) for request in requests]
    queue._check()
    return tickets


def order(queue: AdmissionQueue[str]) -> list[str]:
    served = []
    while (ticket := queue.next()) is not None:
        queue._check()
        served.append(ticket.request)
    return served


def test_the_examples_in_its_text_are_true() -> None:
    results = doctest.testmod(module)
    assert results.attempted >= 5
    assert results.failed == 0


def test_one_tenant_is_served_first_come_first_served() -> None:
    queue = queue_of()
    enter(queue, "a1", "a2", "a3")
    assert order(queue) == ["a1", "a2", "a3"]


def test_tenants_take_turns_however_many_requests_each_has_waiting() -> None:
    queue = queue_of()
    enter(queue, "a1", "a2", "a3", "a4", "a5", "b1", "b2")
    assert order(queue) == ["a1", "b1", "a2", "b2", "a3", "a4", "a5"]


def test_a_flood_delays_a_newcomer_by_one_turn() -> None:
    queue = queue_of()
    enter(queue, *(f"a{number}" for number in range(50)))
    assert [ticket.request for ticket in (queue.next(), queue.next(), queue.next()) if ticket] == ["a0", "a1", "a2"]
    enter(queue, "b1")
    assert "b1" in order(queue)[:2]


def test_silence_earns_no_credit() -> None:
    queue = queue_of()
    enter(queue, "b0")
    enter(queue, *(f"a{number}" for number in range(20)))
    for _ in range(11):
        queue.next()
    enter(queue, *(f"b{number}" for number in range(1, 11)))
    assert [request[0] for request in order(queue)[:8]] in (list("abababab"), list("babababa"))


def test_work_decides_how_often_a_tenant_has_its_turn() -> None:
    queue = queue_of()
    enter(queue, *(f"a{number}" for number in range(10)), work=3.0)
    enter(queue, *(f"b{number}" for number in range(30)), work=1.0)
    first = order(queue)[:20]
    assert sum(request[0] == "a" for request in first) == pytest.approx(5, abs=1)


def test_lower_priority_values_go_first() -> None:
    queue = queue_of()
    enter(queue, "a1", "b1")
    enter(queue, "c1", priority=-1)
    enter(queue, "d1", priority=5)
    assert order(queue) == ["c1", "a1", "b1", "d1"]


def test_what_an_urgent_flood_has_had_does_not_push_a_newcomer_of_another_priority_back() -> None:
    queue = queue_of(max_waiting=1000)
    enter(queue, *(f"a{number}" for number in range(100)))
    for number in range(200):
        enter(queue, f"u{number}", priority=-1)
        assert queue.next() is not None
    enter(queue, "b1")
    assert "b1" in order(queue)[:2]


def test_requests_that_are_given_up_are_not_held_against_their_tenant() -> None:
    queue = queue_of()
    abandoned = enter(queue, *(f"a{number}" for number in range(50)))
    enter(queue, *(f"b{number}" for number in range(10)))
    for ticket in abandoned:
        queue.leave(ticket)
        queue._check()
    enter(queue, *(f"a{number}" for number in range(100, 105)))
    assert [request[0] for request in order(queue)[:8]] in (list("abababab"), list("babababa"))


def test_a_tenant_is_charged_even_when_it_waits_one_request_at_a_time() -> None:
    queue = queue_of()
    enter(queue, *(f"b{number}" for number in range(20)))
    enter(queue, "a", work=4.0)
    served = []
    for _ in range(15):
        ticket = queue.next()
        assert ticket is not None
        served.append(ticket.request[0])
        if ticket.request == "a":
            enter(queue, "a", work=4.0)
    assert served.count("a") == 3


def test_leaving_twice_is_harmless() -> None:
    queue = queue_of()
    (ticket,) = enter(queue, "a1")
    queue.leave(ticket)
    queue.leave(ticket)
    queue._check()
    assert len(queue) == 0
    assert queue.next() is None


def test_a_full_queue_is_full() -> None:
    queue = queue_of(max_waiting=2)
    enter(queue, "a1", "a2")
    assert queue.full
    with pytest.raises(QueueFull):
        queue.enter("a3", tenant="a", now=0.0)
    assert order(queue) == ["a1", "a2"]


def test_nobody_may_wait_where_nobody_is_to_wait() -> None:
    queue = queue_of(max_waiting=0)
    assert queue.displace("a") is None
    with pytest.raises(QueueFull):
        queue.enter("a1", tenant="a", now=0.0)


@pytest.mark.parametrize(
    ("waiting", "newcomer", "priority", "yields"),
    [
        (["a1", "a2", "a3", "a4"], "a", 0, None),
        (["a1", "a2", "a3", "a4"], "b", 0, "a4"),
        (["a1", "a2", "b1", "b2"], "c", 0, "a2"),
        (["a1", "a2", "b1", "b2"], "b", 0, None),
        (["a1", "b1", "c1", "d1"], "e", 0, None),
        (["a1", "a2", "a3", "b1"], "b", 0, "a3"),
        (["a1", "b1", "c1", "d1"], "e", -1, "a1"),
        (["a1", "a2", "a3", "a4"], "b", 1, None),
    ],
)
def test_a_full_queue_takes_a_newcomer_in_place_of_one_who_has_more(
    waiting: list[str], newcomer: str, priority: int, yields: str | None
) -> None:
    queue = queue_of(max_waiting=4)
    enter(queue, *waiting)
    yielded = queue.displace(newcomer, priority)
    queue._check()
    assert (yielded.request if yielded is not None else None) == yields
    if yielded is not None:
        enter(queue, newcomer + "9", priority=priority)


def test_the_least_urgent_yield_first() -> None:
    queue = queue_of(max_waiting=3)
    enter(queue, "a1")
    enter(queue, "b1", "b2", priority=7)
    yielded = queue.displace("b", 0)
    assert yielded is not None
    assert yielded.request == "b2"


def test_tickets_expire_at_their_own_deadline_or_ours() -> None:
    queue = queue_of(max_wait_s=10.0)
    queue.enter("a1", tenant="a", now=0.0)
    queue.enter("a2", tenant="a", now=1.0, deadline=3.0)
    queue.enter("a3", tenant="a", now=2.0, deadline=1e9)
    assert [ticket.request for ticket in queue.expired(2.9)] == []
    assert [ticket.request for ticket in queue.expired(3.0)] == ["a2"]
    assert [ticket.request for ticket in queue.expired(10.0)] == ["a1"]
    queue._check()
    assert [ticket.request for ticket in queue.expired(12.0)] == ["a3"]
    queue._check()


def test_the_first_in_order_is_the_next_to_be_let_in() -> None:
    queue = queue_of()
    enter(queue, "a1", "a2", "b1", "c1")
    enter(queue, "z1", priority=-3)
    while queue:
        first = next(queue.in_order())
        assert queue.next() is first


def test_tenants_that_come_once_are_forgotten() -> None:
    queue = queue_of(max_waiting=10)
    enter(queue, "keep")
    for number in range(3 * module.MAX_SILENT):
        queue.let_in(queue.enter("x", tenant=f"tenant {number}", now=0.0, work=100.0))
    queue._check()


@pytest.mark.parametrize(
    ("in_progress", "durations", "waiting", "expected"),
    [
        (0, [], 5, None),
        (4, [], 5, None),
        (1, [2.0], 5, None),
        (5, [2.0], 8, 4.0),
        (3, [1.0], 1, 0.5),
    ],
)
def test_the_pace_says_how_long_a_queue_takes(in_progress: int, durations: list[float], waiting: int, expected: float | None) -> None:
    pace = Pace()
    for _ in range(in_progress):
        pace.began()
    for duration in durations:
        pace.ended(duration)
    assert pace.drain_s(waiting) == (pytest.approx(expected) if expected is not None else None)


def test_the_pace_follows_what_requests_have_taken_lately() -> None:
    pace = Pace()
    for _ in range(200):
        pace.began()
    for _ in range(50):
        pace.ended(1.0)
    for _ in range(50):
        pace.ended(5.0)
    assert pace.drain_s(100) == pytest.approx(5.0, rel=0.05)


@pytest.mark.parametrize(("wait_s", "told"), [(0.0, 1), (0.01, 1), (1.0, 1), (1.01, 2), (29.5, 30), (500.0, 120), (math.inf, 120)])
def test_a_retry_after_is_whole_seconds_of_sensible_size(wait_s: float, told: int) -> None:
    assert retry_after(wait_s) == told
