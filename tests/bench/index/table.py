"""What do storing, matching and removing cost in one table? A process per table, under the interpreter that has it.

Told on standard input, one JSON object a line, and answers in the same way; `Tables` is its other side. What is applied is bytes, as they
come in: for ours a batch of the bus, for Dynamo's an event as its binding takes it. Making them is not counted.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import random
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from tests.bench.index.workload import Chain, Workload, fresh_keys

SWEEP = 2_000
"""As a router does it."""


class Table(Protocol):
    """A prefix index, fed with bytes."""

    def stored(self, engine: int, chain: Chain) -> bytes:
        """The event that it takes for this."""
        ...

    def removed(self, engine: int, keys: list[int]) -> bytes:
        """Likewise."""
        ...

    def apply(self, engine: int, event: bytes) -> None:
        """Take one in."""
        ...

    def match(self, keys: list[int]) -> dict[Any, int]:
        """Engine → how many leading keys it holds, as a dict."""
        ...

    def leave(self, engine: int) -> None:
        """It is gone."""
        ...

    def tidy(self) -> float:
        """Give back what those who left held; the longest that this stopped the process, in seconds."""
        ...


class Ours:
    """`router.index`, fed as a mirror feeds it."""

    def __init__(self, engines: int) -> None:
        import msgspec  # noqa: PLC0415  peers' interpreters do not have it

        from discovery.messages import Batch, Remove, Store, StreamMessage  # noqa: PLC0415  as above
        from engines.blocks import pack_keys  # noqa: PLC0415  as above
        from engines.types import Tier  # noqa: PLC0415  as above
        from router.index import PrefixIndex  # noqa: PLC0415  as above

        self.index = PrefixIndex()
        self._slots = [self.index.add_slot() for _ in range(engines)]
        self._encode = msgspec.msgpack.Encoder().encode
        decoder: msgspec.msgpack.Decoder[StreamMessage] = msgspec.msgpack.Decoder(StreamMessage)

        def batch(op: Store | Remove) -> bytes:
            return self._encode(Batch("life.0", 0, [op]))

        def apply(engine: int, event: bytes) -> None:
            message = decoder.decode(event)
            slot = self._slots[engine]
            for op in message.ops if isinstance(message, Batch) else ():
                if isinstance(op, Store):
                    for chain in op.chains():
                        self.index.store(slot, chain)
                elif isinstance(op, Remove):
                    self.index.remove(slot, op.keys)

        self.apply = apply
        self._stored: Callable[[list[int]], bytes] = lambda keys: batch(Store(Tier.DEVICE, pack_keys(keys)))
        self._removed: Callable[[list[int]], bytes] = lambda keys: batch(Remove(Tier.DEVICE, pack_keys(keys)))
        self.match = self.index.match

    def stored(self, engine: int, chain: Chain) -> bytes:
        del engine
        return self._stored(chain.keys)

    def removed(self, engine: int, keys: list[int]) -> bytes:
        del engine
        return self._removed(keys)

    def leave(self, engine: int) -> None:
        self.index.drop_slot(self._slots[engine])

    def tidy(self) -> float:
        longest = 0.0
        while not self.index.swept:
            started = time.thread_time()
            self.index.sweep(SWEEP)
            longest = max(longest, time.thread_time() - started)
        return longest


class Dynamos:
    """`dynamo.llm.RadixTree`, fed through its Python binding."""

    def __init__(self, engines: int) -> None:
        from dynamo.llm import RadixTree  # type: ignore[import-not-found]  # noqa: PLC0415  under its own interpreter

        del engines
        self._tree = RadixTree()
        self._events = 0

    def stored(self, engine: int, chain: Chain) -> bytes:
        del engine
        blocks = [{"block_hash": key, "tokens_hash": key, "mm_extra_info": None} for key in chain.keys]
        return self._event({"stored": {"parent_hash": chain.parent, "blocks": blocks}})

    def removed(self, engine: int, keys: list[int]) -> bytes:
        del engine
        return self._event({"removed": {"block_hashes": keys}})

    def apply(self, engine: int, event: bytes) -> None:
        self._tree.apply_event(engine, event)

    def match(self, keys: list[int]) -> dict[Any, int]:
        scores: dict[Any, int] = self._tree.find_matches(keys).scores
        return scores

    def leave(self, engine: int) -> None:
        self._tree.remove_worker(engine)

    def tidy(self) -> float:
        return 0.0

    def _event(self, data: dict[str, Any]) -> bytes:
        self._events += 1
        return json.dumps({"event_id": self._events, "data": data, "dp_rank": 0}).encode()


class Bench:
    """One table and the workload it holds."""

    def __init__(self, table: Table, workload: Workload) -> None:
        self.table = table
        self.workload = workload

    def store(self, part: int, parts: int) -> dict[str, float]:
        """The engines store a part of what they hold."""
        return self._timed(
            (engine, self.table.stored(engine, chain), len(chain.keys)) for engine, chain in self.workload.stored(part, parts)
        )

    def remove(self, first: int, last: int) -> dict[str, float]:
        """Each evicts some of its chains, the last block first."""
        workload = self.workload
        chains = ((engine, workload.own(engine, number)[::-1]) for number in range(first, last) for engine in range(workload.engines))
        return self._timed((engine, self.table.removed(engine, keys), len(keys)) for engine, keys in chains)

    def match(self, kind: str, count: int) -> dict[str, float]:
        """Match `count` prompts."""
        prompts = [self.workload.prompt(kind) for _ in range(count)]
        spent, walls, found = _cpu_s(), [], 0
        for prompt in prompts:
            started = time.perf_counter()
            holders = self.table.match(prompt)
            walls.append(time.perf_counter() - started)
            found += len(holders)
        walls.sort()
        return {
            "cpu_us": (_cpu_s() - spent) / count * 1e6,
            "p50_us": statistics.median(walls) * 1e6,
            "p99_us": walls[count * 99 // 100] * 1e6,
            "holders": found / count,
        }

    def leave(self) -> dict[str, float]:
        """Everybody leaves."""
        spent = _cpu_s()
        for engine in range(self.workload.engines):
            self.table.leave(engine)
        longest = self.table.tidy()
        return {"cpu_s": _cpu_s() - spent, "longest_ms": longest * 1e3, **self.memory()}

    def memory(self) -> dict[str, float]:
        """Resident now, and what a full garbage collection takes."""
        started = time.thread_time()
        gc.collect()
        return {"rss_bytes": _rss_bytes(), "gc_ms": (time.thread_time() - started) * 1e3}

    def hold(self, holders: int, length: int, blocks: int) -> dict[str, float]:
        """Bytes a block of `blocks`, each held by the first `holders` engines, stored `length` at a time: at the end, and at the worst.

        At the worst, tables have just grown; small numbers of blocks, where what there is anyway counts, are left out.
        """
        before, rng, worst, stored = _rss_bytes(), random.Random(0), 0.0, 0
        while stored < blocks:
            events = [self.table.stored(0, Chain(None, fresh_keys(rng, length))) for _ in range(64)]
            for event in events:
                for engine in range(holders):
                    self.table.apply(engine, event)
            stored += 64 * length
            del events
            if stored > blocks / 4:
                worst = max(worst, (_rss_bytes() - before) / stored)
        return {"bytes": (_rss_bytes() - before) / stored, "worst_bytes": worst}

    def _timed(self, events: Iterator[tuple[int, bytes, int]]) -> dict[str, float]:
        """Take in `events`, of so many blocks each; a few at a time, since making them is not to be counted."""
        apply = self.table.apply
        blocks, cpu, wall, longest = 0, 0.0, 0.0, 0.0
        while part := list(itertools.islice(events, 64)):
            spent, started = _cpu_s(), time.perf_counter()
            for engine, event, _ in part:
                begun = time.thread_time()
                apply(engine, event)
                longest = max(longest, time.thread_time() - begun)
            cpu += _cpu_s() - spent
            wall += time.perf_counter() - started
            blocks += sum(count for _, _, count in part)
        return {"blocks": blocks, "cpu_us": cpu / blocks * 1e6, "wall_us": wall / blocks * 1e6, "longest_ms": longest * 1e3}


def _cpu_s() -> float:
    """Of all threads: a binding may work in its own."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _rss_bytes() -> int:
    with open("/proc/self/statm") as file:  # noqa: PTH123  no pathlib is loaded, whose memory would count
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _say(answer: object) -> None:
    """To whoever asked."""
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def main() -> None:
    """table.py ours|dynamo ENGINES BLOCKS, then commands."""
    name, engines, blocks = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    table: Table = Ours(engines) if name == "ours" else Dynamos(engines)
    bench = Bench(table, Workload(engines, blocks))
    gc.collect()
    gc.freeze()
    _say("ready")
    for line in sys.stdin:
        command = json.loads(line)
        _say(getattr(bench, command.pop("do"))(**command))


if __name__ == "__main__":
    main()
