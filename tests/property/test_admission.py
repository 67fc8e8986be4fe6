"""The admission queue against a list that is sorted anew for every question."""

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from router.admission import AdmissionQueue, QueueLimits, Ticket

MAX_WAITING = 12
MAX_WAIT_S = 10.0
tenants = st.sampled_from("abcd")
priorities = st.sampled_from([-1, 0, 3])


@dataclass(eq=False)
class Waiting:
    tenant: str
    priority: int
    deadline: float
    number: int
    work: int
    ticket: Ticket[int]


class Machine(RuleBasedStateMachine):
    """What must hold of turns, without saying how they are kept: see `let_next_in`."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: AdmissionQueue[int] = AdmissionQueue(QueueLimits(MAX_WAITING, MAX_WAIT_S))
        self.waiting: list[Waiting] = []
        self.now = 0.0
        self.number = 0
        self.had: dict[tuple[int, str], float] = {}
        """Work let in per priority and tenant, lifted to the others' least whenever a tenant begins to wait."""

    def of(self, priority: int, tenant: str | None = None) -> list[Waiting]:
        return [w for w in self.waiting if w.priority == priority and tenant in (None, w.tenant)]

    def forget_if_alone(self, priority: int) -> None:
        if not self.of(priority):
            self.had = {key: had for key, had in self.had.items() if key[0] != priority}

    @precondition(lambda self: len(self.waiting) < MAX_WAITING)
    @rule(tenant=tenants, priority=priorities, patience=st.none() | st.integers(0, 20), work=st.integers(1, 4))
    def enter(self, tenant: str, priority: int, patience: int | None, work: int) -> None:
        self.number += 1
        deadline = self.now + (MAX_WAIT_S if patience is None else min(patience, MAX_WAIT_S))
        given = {} if patience is None else {"deadline": self.now + patience}
        if not self.of(priority, tenant):
            least = min((self.had[priority, w.tenant] for w in self.of(priority)), default=0.0)
            self.had[priority, tenant] = max(least, self.had.get((priority, tenant), 0.0))
        ticket = self.queue.enter(self.number, tenant=tenant, now=self.now, priority=priority, work=float(work), **given)
        self.waiting.append(Waiting(tenant, priority, deadline, self.number, work, ticket))

    @rule()
    def let_next_in(self) -> None:
        ticket = self.queue.next()
        if not self.waiting:
            assert ticket is None
            return
        priority = min(w.priority for w in self.waiting)
        firsts = {
            tenant: min((w for w in self.of(priority, tenant)), key=lambda w: w.number) for tenant in {w.tenant for w in self.of(priority)}
        }
        expected = min(firsts.values(), key=lambda w: (self.had[priority, w.tenant], w.number))
        assert ticket is expected.ticket
        self.had[priority, expected.tenant] += expected.work
        self.waiting.remove(expected)
        self.forget_if_alone(priority)

    @precondition(lambda self: self.waiting)
    @rule(choice=st.integers(0))
    def leave(self, choice: int) -> None:
        gone = self.waiting.pop(choice % len(self.waiting))
        self.queue.leave(gone.ticket)
        self.queue.leave(gone.ticket)
        self.forget_if_alone(gone.priority)

    @rule(seconds=st.integers(0, 6))
    def expire(self, seconds: int) -> None:
        self.now += seconds
        late = self.queue.expired(self.now)
        expected = sorted((w for w in self.waiting if w.deadline <= self.now), key=lambda w: (w.deadline, w.number))
        assert late == [w.ticket for w in expected]
        self.waiting = [w for w in self.waiting if w.deadline > self.now]
        for priority in {w.priority for w in expected}:
            self.forget_if_alone(priority)

    @rule(tenant=tenants, priority=priorities)
    def displace(self, tenant: str, priority: int) -> None:
        before = {w.ticket for w in self.waiting}
        yielded = self.queue.displace(tenant, priority)
        worst = max((w.priority for w in self.waiting), default=None)
        own = len(self.of(priority, tenant))
        most = max((len(self.of(worst, w.tenant)) for w in self.of(worst)), default=0) if worst is not None else 0
        if worst is None or worst < priority or (worst == priority and most <= own + 1):
            assert yielded is None
            return
        assert yielded in before
        gone = next(w for w in self.waiting if w.ticket is yielded)
        assert gone.priority == worst
        rivals = self.of(worst, gone.tenant)
        assert len(rivals) == most
        assert gone.number == max(w.number for w in rivals)
        self.waiting.remove(gone)
        self.forget_if_alone(worst)

    @invariant()
    def holds(self) -> None:
        self.queue._check()
        assert len(self.queue) == len(self.waiting)
        assert self.queue.full == (len(self.waiting) >= MAX_WAITING)


TestAdmission = Machine.TestCase
TestAdmission.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
