"""What does each endpoint have to do right now? Counted by this router itself; what engines report stands beside it.

Requests are counted when they are sent and given back where they end, by a `with`, and by nothing else: no clock ever takes a
count away, so a stream of two hours counts for two hours, and a gauge that an engine stopped updating cannot outvote the counts.

    reserve ──────────────── first_token ───────────────────── release
      active_requests + 1                                        − 1
      active_blocks   + those no other request holds             − those no other request holds
      active_prefill_tokens + uncached   − uncached
"""

# ruff: noqa: S101 - `_check` asserts the invariants, for tests to call after every step

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import NamedTuple, Self

from discovery.peers import NOTHING, Carried, Others
from engines.blocks import pack_keys
from engines.types import Endpoint
from router.index import PrefixIndex
from router.scheduling.types import Load
from router.work import Prompt, Work

REPORT_FRESH_S = 15.0
REPORT_MOVES_S = 5.0
"""A queue that an engine reports beyond what is known here is believed as long as the report has changed within so many seconds:
real queues do, and a gauge that is stuck must not keep traffic away."""


class _Report(NamedTuple):
    running: int | None
    waiting: int | None
    kv_usage: float | None
    at: float
    changed_at: float
    """When it last differed from the one before."""
    strangers: int
    """Requests waiting there that no router has told of."""


class _Account:
    """What is in flight on one endpoint."""

    __slots__ = (
        "assigned",
        "endpoint",
        "forgotten",
        "last_assigned",
        "most_requests",
        "prefill_tokens",
        "report",
        "requests",
        "shared",
        "slot",
        "untimed",
        "work",
    )

    def __init__(self, endpoint: Endpoint, slot: int) -> None:
        self.endpoint = endpoint
        self.slot = slot
        self.requests = 0
        self.most_requests = 0
        """At any time since the engine last reported: its report may count requests that have ended by the time it is read."""
        self.prefill_tokens = 0
        self.untimed = 0
        """Requests whose first token has not come, of those that came without the time."""
        self.shared: Counter[int] = Counter()
        """Key → how many requests in flight hold it besides the first. A prefix of each request's keys is in here."""
        self.last_assigned = 0
        self.assigned = 0
        """Requests counted here so far."""
        self.report: _Report | None = None
        self.forgotten = False
        self.work = Work()

    @property
    def computing(self) -> int:
        """Requests whose first token has not come."""
        return self.untimed + self.work.computing


class Reservation:
    """One request's place in the book, until it is released."""

    __slots__ = ("_account", "_book", "_keys", "_prefill_tokens", "_prompt", "_released", "_untimed", "prefill")

    def __init__(self, book: LoadBook, account: _Account, keys: list[int], prefill_tokens: int, prompt: Prompt | None) -> None:
        self.prefill: Reservation | None = None
        """Its place at the engine that computes its prompt, where that is another one; released with this one, if not before."""
        self._book = book
        self._account = account
        self._keys = keys
        self._prefill_tokens = prefill_tokens
        self._prompt = prompt
        self._untimed = prompt is None
        self._released = False

    def first_token(self, now: float | None = None) -> None:
        """The prompt is computed: it no longer counts as prefill. Harmless when repeated or after `release`.

        With the time, in monotonic seconds, its endpoint's pace is learned from it.
        """
        self._account.prefill_tokens -= self._prefill_tokens
        self._prefill_tokens = 0
        self._account.untimed -= self._untimed
        self._untimed = False
        if self._prompt is not None and now is not None:
            self._account.work.computed(self._prompt, now)

    def ended(self, now: float, tokens: int | None) -> None:
        """The whole answer has come, of so many `tokens` where that is known: it tells how long answers take here."""
        if self._prompt is not None:
            self._account.work.ended(self._prompt, now, tokens)

    def release(self) -> None:
        """The request has ended, however it did. Harmless when repeated, or when its endpoint has been forgotten."""
        if self._released:
            return
        self._released = True
        self.first_token()
        if self._prompt is not None:
            self._account.work.left(self._prompt)
        if self.prefill is not None:
            self.prefill.release()
        self._account.requests -= 1
        self._book._let_go(self._account, self._keys)  # noqa: SLF001 - a reservation is the book's own other half
        self._keys = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()


class LoadBook:
    """Requests in flight, per endpoint.

    >>> book = LoadBook()
    >>> engine = Endpoint("http://a:8000")
    >>> with book.reserve(engine, [11, 12], uncached_tokens=40) as reservation:
    ...     book.load(engine, now=0.0).active_prefill_tokens, book.in_flight([11, 99])[engine]
    (40, 1)
    >>> book.load(engine, now=0.0).active_requests
    0
    """

    def __init__(self, report_fresh_s: float = REPORT_FRESH_S) -> None:
        """Believe what an engine reports for `report_fresh_s`, and after that say nothing rather than something old."""
        self._report_fresh_s = report_fresh_s
        self._accounts: dict[Endpoint, _Account] = {}
        self._endpoints: dict[int, Endpoint] = {}
        self._index = PrefixIndex()
        self._assigned = 0
        self.others: Others | None = None
        """Other routers in front of the same engines: what they carry, as they last told, is added where load is asked for."""

    def reserve(
        self, endpoint: Endpoint, keys: Sequence[int], uncached_tokens: int, now: float | None = None, *, streamed: bool = True
    ) -> Reservation:
        """Count a request on `endpoint`: its full blocks `keys`, a chain from the root, and the prompt tokens it has to compute.

        A prefix that another request in flight there is computing already is not for this one to compute: leave it out of
        `uncached_tokens`, or a burst of equal prompts is counted as if each were computed. With the time, `now`, it is part of what
        is learned of how long things take there; an answer that is not `streamed` does not show its first token.
        Runtime complexity: O(len(keys)).

        >>> book = LoadBook()
        >>> engine = Endpoint("http://a:8000")
        >>> first = book.reserve(engine, [1, 2], uncached_tokens=32)
        >>> second = book.reserve(engine, [1, 2, 3], uncached_tokens=16)
        >>> book.load(engine, now=0.0).active_blocks
        3
        >>> second.release(); first.release()
        """
        account = self._account(endpoint)
        self._assigned += 1
        account.last_assigned = self._assigned
        account.assigned += 1
        account.requests += 1
        account.most_requests = max(account.most_requests, account.requests)
        account.prefill_tokens += uncached_tokens
        held = list(keys)
        if held:
            known = self._index.extent(account.slot, held, 0)
            account.shared.update(held[:known])
            self._index.store(account.slot, pack_keys(held[known:]))
            if self.others is not None:
                self.others.step(endpoint, held, 1)
        prompt = None if now is None else account.work.sent(uncached_tokens, now, streamed=streamed)
        account.untimed += prompt is None
        return Reservation(self, account, held, uncached_tokens, prompt)

    def in_flight(self, keys: Sequence[int]) -> dict[Endpoint, int]:
        """Endpoint → how many leading `keys` belong to requests in flight there, where it is at least one; other routers' included.

        A request holds its whole prefix, so the others of `keys` are what `active_blocks` would grow by.
        Runtime complexity: O(runs crossed + endpoints that match), plus one comparison per key.

        >>> LoadBook().in_flight([1, 2])
        {}
        """
        endpoints = self._endpoints
        found = {endpoints[slot]: depth for slot, depth in self._index.match(keys).items()}
        if self.others is not None:
            for endpoint, depth in self.others.in_flight(keys).items():
                found[endpoint] = max(depth, found.get(endpoint, 0))
        return found

    def load(self, endpoint: Endpoint, now: float) -> Load:
        """What `endpoint` has in flight, other routers' requests included, and its own report where that is fresh.

        Runtime complexity: O(1).

        >>> LoadBook().load(Endpoint("http://a:8000"), now=0.0).active_requests
        0
        """
        account = self._accounts.get(endpoint)
        others = NOTHING if self.others is None else self.others.load(endpoint)
        if account is None:
            return Load(others.requests, others.prefill_tokens, others.blocks, computing=others.computing)
        requests = account.requests + others.requests
        prefill_tokens = account.prefill_tokens + others.prefill_tokens
        blocks = self._index.size(account.slot) + others.blocks
        work, report = account.work, account.report
        work.settle(now)
        running = waiting = kv_usage = None
        unknown = 0.0
        if report is not None and now - report.at <= self._report_fresh_s:
            running, waiting, kv_usage = report.running, report.waiting, report.kv_usage
            if now - report.changed_at <= REPORT_MOVES_S:
                unknown = report.strangers * work.prompt_tokens
        return Load(
            requests,
            prefill_tokens,
            blocks,
            account.last_assigned,
            running,
            waiting,
            kv_usage,
            work.done(now) if prefill_tokens else 0.0,
            unknown,
            work.s_per_token,
            work.busy(now),
            work.generated(now) if work.decoding else 0.0,
            work.residence_s,
            account.computing + others.computing,
        )

    def own(self, endpoint: Endpoint) -> Carried:
        """What this router itself has in flight on `endpoint`. Runtime complexity: O(1).

        >>> LoadBook().own(Endpoint("http://a:8000"))
        Carried(requests=0, prefill_tokens=0, computing=0, blocks=0)
        """
        account = self._accounts.get(endpoint)
        return NOTHING if account is None else self._carried(account)

    def assigned(self, endpoint: Endpoint) -> int:
        """Requests that this router has counted on `endpoint` since it joined. Runtime complexity: O(1).

        >>> LoadBook().assigned(Endpoint("http://a:8000"))
        0
        """
        account = self._accounts.get(endpoint)
        return 0 if account is None else account.assigned

    def carried(self) -> Iterator[tuple[Endpoint, Carried]]:
        """The same of every endpoint that has anything in flight, for other routers to hear. Runtime complexity: O(endpoints)."""
        for endpoint, account in self._accounts.items():
            if account.requests:
                yield endpoint, self._carried(account)

    def _carried(self, account: _Account) -> Carried:
        prefill_tokens = account.prefill_tokens - account.work.passed
        return Carried(account.requests, prefill_tokens, account.computing, self._index.size(account.slot))

    def report(self, endpoint: Endpoint, running: int | None, waiting: int | None, kv_usage: float | None, now: float) -> None:
        """What the engine says of itself, at `now` in monotonic seconds. Runtime complexity: O(1).

        >>> book = LoadBook(report_fresh_s=15.0)
        >>> engine = Endpoint("http://a:8000")
        >>> book.report(engine, running=3, waiting=0, kv_usage=0.5, now=100.0)
        >>> book.load(engine, now=110.0).running, book.load(engine, now=120.0).running
        (3, None)
        """
        account = self._account(endpoint)
        before = account.report
        changed_at = (
            now if before is not None and before[:3] != (running, waiting, kv_usage) else before.changed_at if before else -math.inf
        )
        known = account.most_requests + (0 if self.others is None else self.others.load(endpoint).requests)
        strangers = min(waiting or 0, max(0, (waiting or 0) + (running or 0) - known))
        account.report = _Report(running, waiting, kv_usage, now, changed_at, strangers)
        account.most_requests = account.requests

    def forget(self, endpoint: Endpoint) -> None:
        """`endpoint` has left: nothing of it counts any more, and releasing what was reserved there does nothing.

        Runtime complexity: O(1), and `sweep` afterwards.

        >>> book = LoadBook()
        >>> engine = Endpoint("http://a:8000")
        >>> with book.reserve(engine, [1], uncached_tokens=16):
        ...     book.forget(engine)
        >>> book.load(engine, now=0.0).active_requests
        0
        """
        account = self._accounts.pop(endpoint, None)
        if account is None:
            return
        account.forgotten = True
        del self._endpoints[account.slot]
        self._index.drop_slot(account.slot)

    def sweep(self, limit: int) -> int:
        """Give back the memory of forgotten endpoints, `limit` entries at most: see `PrefixIndex.sweep`."""
        return self._index.sweep(limit)

    def __len__(self) -> int:
        """Requests in flight on all endpoints. Runtime complexity: O(endpoints)."""
        return sum(account.requests for account in self._accounts.values())

    def _account(self, endpoint: Endpoint) -> _Account:
        account = self._accounts.get(endpoint)
        if account is None:
            account = self._accounts[endpoint] = _Account(endpoint, self._index.add_slot())
            self._endpoints[account.slot] = endpoint
        return account

    def _let_go(self, account: _Account, keys: list[int]) -> None:
        """A request no longer holds `keys`: those that it shares lose a holder, the others leave the index."""
        if keys and self.others is not None:
            self.others.step(account.endpoint, keys, -1)
        if account.forgotten or not keys:
            return
        shared = account.shared
        depth = 0
        for key in keys:
            holders = shared.get(key)
            if holders is None:
                break
            if holders == 1:
                del shared[key]
            else:
                shared[key] = holders - 1
            depth += 1
        self._index.remove(account.slot, pack_keys(keys[depth:]))

    def _check(self) -> None:
        """Raise AssertionError unless all invariants hold. Runtime complexity: O(everything)."""
        self._index._check()  # noqa: SLF001 - invariants of a part are invariants of the whole
        assert len(self._endpoints) == len(self._accounts)
        for endpoint, account in self._accounts.items():
            assert self._endpoints[account.slot] == endpoint
            assert not account.forgotten
            assert account.requests >= 0
            assert account.prefill_tokens >= 0
            assert 0 <= account.computing <= account.requests
            assert 0 <= account.work.passed <= account.prefill_tokens
            assert account.requests > 1 or not account.shared, "a block shared by nobody"
            assert account.requests > 0 or (account.prefill_tokens == 0 and not self._index.size(account.slot)), "counts left behind"
            assert all(0 < holders < account.requests for holders in account.shared.values())
            assert all(self._index._holds(account.slot, key) for key in account.shared)  # noqa: SLF001 - as above
            assert 0 <= account.last_assigned <= self._assigned
