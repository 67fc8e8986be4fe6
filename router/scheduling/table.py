"""Which policies are there? All of them, in one list; any other name must be `module:Class`."""

from __future__ import annotations

from collections.abc import Callable

from router.scheduling.loading import PolicyNotLoaded, load_class
from router.scheduling.policies.kv import Kv, KvWeights
from router.scheduling.policies.least_loaded import LeastLoaded
from router.scheduling.policies.power_of_two import PowerOfTwo
from router.scheduling.policies.random import Random
from router.scheduling.policies.round_robin import RoundRobin
from router.scheduling.policies.session import Session
from router.scheduling.types import Policy

POLICIES: dict[str, Callable[[KvWeights], Policy]] = {
    "kv": Kv,
    "round-robin": lambda _: RoundRobin(),
    "random": lambda _: Random(),
    "least-loaded": lambda _: LeastLoaded(),
    "power-of-two": lambda _: PowerOfTwo(),
    "session": lambda _: Session(),
}


def load_policy(name: str, weights: KvWeights) -> tuple[str, Policy]:
    """The policy called `name`, ready to use, with the name that decisions carry; `weights` are for `kv`.

    Raises PolicyNotLoaded, which says what is wrong.
    """
    if ":" in name:
        return name, load_class(name)
    make = POLICIES.get(name)
    if make is None:
        raise PolicyNotLoaded(f"policy {name!r} is unknown: expected one of {', '.join(POLICIES)}, or a class of yours as module:Class")
    return name, make(weights)
