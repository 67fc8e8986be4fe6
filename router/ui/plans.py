"""What do planners want? The latest word of each, as long as it stands, for the page to show."""

from __future__ import annotations

from typing import Any, Final

from discovery.observations import PlanMessage, PlanPool

STANDS_S: Final = 600.0
"""A planner that has not been heard for so long is shown no more."""
MAX_PLANNERS: Final = 16
"""Names come from the bus."""


class Plans:
    """By planner and model.

    >>> plans = Plans()
    >>> plans.heard(PlanMessage("p", 1, 0.0, "m", ()), now=5.0)
    >>> [(plan["planner"], plan["at"]) for plan in plans.told(now=6.0)], plans.told(now=1000.0)
    ([('p, m', 5.0)], [])
    """

    def __init__(self) -> None:
        self._latest: dict[tuple[str, str], tuple[float, PlanMessage]] = {}

    def heard(self, plan: PlanMessage, now: float) -> None:
        """A planner has spoken. Runtime complexity: O(1)."""
        key = plan.planner, plan.model
        self._latest.pop(key, None)  # who spoke last comes last
        self._latest[key] = now, plan
        if len(self._latest) > MAX_PLANNERS:
            del self._latest[next(iter(self._latest))]

    def told(self, now: float) -> list[dict[str, Any]]:
        """What each wants, and when it said so; `at` is by `now`'s clock."""
        return [
            {
                "planner": f"{plan.planner}, {plan.model}",
                "at": at,
                "plan": plan.number,
                "pools": [_pool(pool) for pool in plan.pools],
            }
            for at, plan in self._latest.values()
            if now - at < STANDS_S
        ]


def _pool(pool: PlanPool) -> dict[str, Any]:
    shown = {"pool": pool.pool, "role": pool.role.value, "replicas": pool.replicas, "replicas_before": pool.was}
    return shown | ({"to_drain": list(pool.victims)} if pool.victims else {}) | ({"why": list(pool.reasons)} if pool.reasons else {})
