"""Given every candidate's cost, which one is taken? The cheapest; equals at random; or a draw with odds by cost."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

TIE = 1e-9
"""Costs closer than this part of the lowest are equal: the difference is rounding, and always resolving it the same way would send
every router of a fleet to the same engine."""


def lowest(costs: Sequence[float], rng: random.Random) -> int:
    """The position of the lowest cost, drawn evenly among equals. Runtime complexity: O(len(costs)).

    >>> lowest([3.0, 1.0, 2.0], random.Random(0))
    1
    """
    least = min(costs)
    limit = least if math.isinf(least) else least + TIE * max(1.0, abs(least))
    equals = [position for position, cost in enumerate(costs) if cost <= limit]
    return equals[0] if len(equals) == 1 else rng.choice(equals)


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
        return lowest(costs, rng)
    odds = [math.exp((least - cost) / temperature) for cost in costs]
    return rng.choices(range(len(costs)), odds)[0]
