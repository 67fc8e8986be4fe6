"""What is replayed? Requests: when each comes, how long its prompt and answer are, and which blocks the prompt shares with others.

keys    [ k0 k1 k2 ][ k3 … ]         k0 k1 k2: the prompt's full blocks; from k3 on, blocks that its answer fills, where known
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import msgspec


class Arrival(msgspec.Struct, frozen=True):
    """One request."""

    at_s: float
    """From the beginning of the workload."""
    prompt_tokens: int
    output_tokens: int
    keys: tuple[int, ...] = ()
    """Each names a block and all before it."""
    session: str | None = None


class Workload(msgspec.Struct, frozen=True):
    """Requests in the order in which they come."""

    name: str
    block_size: int
    """Tokens in each of the blocks that `keys` name."""
    arrivals: tuple[Arrival, ...]
    bin_s: float = 0.0
    """How coarse its times are: a request may have come anywhere in so many seconds from its own."""

    def first(self, requests: int | None) -> Workload:
        """The first so many of them."""
        return self if requests is None else msgspec.structs.replace(self, arrivals=self.arrivals[:requests])


def timed(workload: Workload, speed: float, *, jitter: random.Random | None = None) -> Iterator[tuple[float, Arrival]]:
    """When each request comes at `speed` × the workload's clock, in order; spread over its bin where there is a `jitter`."""
    times = [arrival.at_s for arrival in workload.arrivals]
    order: Sequence[int] = range(len(times))
    if jitter is not None and workload.bin_s > 0:
        times = [at + jitter.random() * workload.bin_s for at in times]
        order = sorted(order, key=times.__getitem__)
    for position in order:
        yield times[position] / speed, workload.arrivals[position]
