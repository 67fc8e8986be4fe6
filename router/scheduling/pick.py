"""Given every candidate's cost, which one is taken? The cheapest; of equals, the longest unassigned; or a draw with odds by cost."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

TIE = 1e-9
"""Costs closer than this part of the lowest are equal: the difference is rounding, and always resolving it the same way would send
every router of a fleet to the same engine."""


def lowest(costs: Sequence[float], last_assigned: Sequence[int], rng: random.Random) -> int:
    """The position of the lowest cost; among equals, of the smallest `last_assigned`; among those, one drawn evenly.

    Prompts that share nothing and come one at a time find every engine idle and equal. Drawn evenly, 12 of them would overfill one of
    two caches with room for 7 in two runs of five; in turns they divide. Routers of a fleet do not move in step: each takes turns in
    its own order. Runtime complexity: O(len(costs)).

    >>> lowest([3.0, 1.0, 1.0], [0, 7, 4], random.Random(0))
    2
    """
    least = min(costs)
    limit = least if math.isinf(least) else least + TIE * max(1.0, abs(least))
    equals = [position for position, cost in enumerate(costs) if cost <= limit]
    if len(equals) == 1:
        return equals[0]
    longest = min(last_assigned[position] for position in equals)
    waiting = [position for position in equals if last_assigned[position] == longest]
    return waiting[0] if len(waiting) == 1 else rng.choice(waiting)


def sample(costs: Sequence[float], temperature: float, rng: random.Random) -> int:
    """A position drawn with odds exp(-cost / temperature): softmax in the units of the costs.

    So a temperature of 5 blocks makes an engine that costs 5 blocks more e ≈ 2.7 times less likely, and one that costs 500 more
    impossible. (Dividing by the spread of the costs first, as others do, gives 72 to 28 for a gap of 1 and of 500 alike.)
    Runtime complexity: O(len(costs)).

    >>> draws = [sample([0.0, 500.0], 5.0, random.Random(seed)) for seed in range(100)]
    >>> sum(draws)
    0
    """
    least = min(costs)
    if math.isinf(least):
        return lowest(costs, [0] * len(costs), rng)
    odds = [math.exp((least - cost) / temperature) for cost in costs]
    return rng.choices(range(len(costs)), odds)[0]
