"""Which policies are there? All of them, in one list; any other name must be `module:Class`."""

from __future__ import annotations

from collections.abc import Callable

from router.scheduling.loading import PolicyNotLoaded, load_class
from router.scheduling.policies.blocks import Blocks, BlocksWeights
from router.scheduling.policies.kv import Kv
from router.scheduling.policies.least_loaded import LeastLoaded
from router.scheduling.policies.power_of_two import PowerOfTwo
from router.scheduling.policies.random import Random
from router.scheduling.policies.round_robin import RoundRobin
from router.scheduling.policies.session import Session
from router.scheduling.policies.threshold import Threshold
from router.scheduling.types import Policy

POLICIES: dict[str, Callable[[BlocksWeights], Policy]] = {
    "kv": lambda _: Kv(),
    "blocks": Blocks,
    "threshold": lambda _: Threshold(),
    "round-robin": lambda _: RoundRobin(),
    "random": lambda _: Random(),
    "least-loaded": lambda _: LeastLoaded(),
    "power-of-two": lambda _: PowerOfTwo(),
    "session": lambda _: Session(),
}


def load_policy(name: str, weights: BlocksWeights | None = None) -> tuple[str, Policy]:
    """The policy called `name`, ready to use, with the name that decisions carry; `weights` are for `blocks`.

    Raises PolicyNotLoaded, which says what is wrong.
    """
    if ":" in name:
        return name, load_class(name)
    make = POLICIES.get(name)
    if make is None:
        raise PolicyNotLoaded(f"policy {name!r} is unknown: expected one of {', '.join(POLICIES)}, or a class of yours as module:Class")
    return name, make(weights or BlocksWeights())
