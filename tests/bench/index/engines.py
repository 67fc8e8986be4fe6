"""The engines of the bench: caches that are always full, and what they publish, all in one process whose time is not counted.

As vLLM 0.32 writes it: a chain is stored in one event behind its parent, and every evicted block is an event of its own.
"""

from __future__ import annotations

import json
import random
import sys
import time
from array import array
from collections import deque
from collections.abc import Iterator
from typing import Any

import zmq

from engines.blocks import block_keys, pack_tokens
from engines.simulator import events
from engines.simulator.cache import Change, Removed, Stored
from engines.types import EngineKind
from tests.bench.index.workload import HEAD, HEADS, OWN

BLOCK_SIZE = 16
JOIN_TIMEOUT_MS = 60_000


def _tokens(rng: random.Random, blocks: int) -> array[int]:
    return array("H", rng.randbytes(2 * BLOCK_SIZE * blocks))


class Chain:
    """Blocks of one prompt behind a head, the last of which may have been evicted."""

    __slots__ = ("head", "names", "tokens")

    def __init__(self, head: int, names: list[int], tokens: array[int]) -> None:
        self.head = head
        self.names = names
        self.tokens = tokens


class Engine:
    """One KV cache."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], number: int, heads: list[array[int]]) -> None:
        self._socket = context.socket(zmq.XPUB)  # tells who subscribes, and is a PUB otherwise
        self._socket.set_hwm(0)
        self._socket.setsockopt(zmq.RCVTIMEO, JOIN_TIMEOUT_MS)
        self.port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self._seq = 0
        self._rng = random.Random(number + 1)
        self._heads = heads
        self._names = [self._fresh_names(HEAD) for _ in heads]
        self.chains: deque[Chain] = deque()

    def joined(self) -> None:
        """Returns when somebody subscribes."""
        self._socket.recv()

    def publish(self, payload: bytes) -> None:
        """Send the next batch."""
        self._socket.send_multipart((b"", self._seq.to_bytes(8, "big"), payload), zmq.NOBLOCK)
        self._seq += 1

    def filling(self, blocks: int) -> Iterator[bytes]:
        """What it publishes until it holds `blocks`."""
        for names, tokens in zip(self._names, self._heads, strict=True):
            yield _encode([Stored(tuple(names), None, tuple(tokens))])
        for _ in range((blocks - HEADS * HEAD) // OWN):
            yield _encode([self._store(OWN)])

    def step(self, blocks: int) -> bytes:
        """It evicts so many of the blocks that it stored first, and stores as many."""
        changes: list[Change] = []
        while len(changes) < blocks:
            names = self.chains[0].names
            changes += [Removed(names.pop()) for _ in range(min(len(names), blocks - len(changes)))]
            if not names:
                self.chains.popleft()
        changes.append(self._store(blocks))
        return _encode(changes)

    def sample(self) -> tuple[list[int], int]:
        """The keys of a chain that it holds, and how many of them, from the root."""
        chain = self._rng.choice(self.chains)
        keys = block_keys(pack_tokens(self._heads[chain.head] + chain.tokens), BLOCK_SIZE, 0)
        return keys, HEAD + len(chain.names)

    def _store(self, blocks: int) -> Stored:
        head = self._rng.randrange(len(self._heads))
        chain = Chain(head, self._fresh_names(blocks), _tokens(self._rng, blocks))
        self.chains.append(chain)
        return Stored(tuple(chain.names), self._names[head][-1], tuple(chain.tokens))

    def _fresh_names(self, count: int) -> list[int]:
        return array("Q", self._rng.randbytes(8 * count)).tolist()


def _encode(changes: list[Change]) -> bytes:
    return events.encode(changes, EngineKind.VLLM, BLOCK_SIZE, ts=0.0)


class Engines:
    """All of them."""

    def __init__(self, count: int, blocks: int) -> None:
        rng = random.Random(0)
        heads = [_tokens(rng, HEAD) for _ in range(HEADS)]
        context = zmq.Context[zmq.Socket[bytes]]()
        self._engines = [Engine(context, number, heads) for number in range(count)]
        self._blocks = blocks
        self._prepared: deque[tuple[Engine, bytes]] = deque()

    def ports(self) -> list[int]:
        """Where each publishes."""
        return [engine.port for engine in self._engines]

    def joined(self) -> int:
        """How many have a subscriber: all, or it fails."""
        for engine in self._engines:
            engine.joined()
        return len(self._engines)

    def prepare_filling(self) -> int:
        """Make what fills the caches, in turns; how many messages."""
        parts = [engine.filling(self._blocks) for engine in self._engines]
        for payloads in zip(*parts, strict=True):
            self._prepared.extend(zip(self._engines, payloads, strict=True))
        return len(self._prepared)

    def prepare_steps(self, count: int, blocks: int) -> int:
        """Make `count` messages, each of which evicts and stores `blocks`, in turns."""
        for number in range(count):
            engine = self._engines[number % len(self._engines)]
            self._prepared.append((engine, engine.step(blocks)))
        return len(self._prepared)

    def publish(self, per_s: float) -> float:
        """Send what was made; how long that took."""
        started = time.monotonic()
        number = 0
        while self._prepared:
            wait_s = started + number / per_s - time.monotonic()
            if wait_s > 0:
                time.sleep(wait_s)  # noqa: TID251  no loop runs here
            engine, payload = self._prepared.popleft()
            engine.publish(payload)
            number += 1
        return time.monotonic() - started

    def samples(self, count: int) -> list[tuple[int, list[int], int]]:
        """Of `count` chains: whose, their keys, how many of those it holds."""
        rng = random.Random(0)
        return [(number, *self._engines[number].sample()) for number in rng.choices(range(len(self._engines)), k=count)]


def _say(answer: object) -> None:
    """To whoever asked."""
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def main() -> None:
    """engines.py ENGINES BLOCKS, then commands."""
    made = Engines(int(sys.argv[1]), int(sys.argv[2]))
    _say("ready")
    for line in sys.stdin:
        command: dict[str, Any] = json.loads(line)
        _say(getattr(made, command.pop("do"))(**command))


if __name__ == "__main__":
    main()
