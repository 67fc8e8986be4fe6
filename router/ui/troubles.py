"""What is wrong now, in words, and what can be done? The top of the page, from the rest of it. Pure.

The worst first. One line for one cause: engines that have the same trouble are named together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import msgspec

LEVELS: Final = ("error", "warning", "note")
SHARE_FAILED: Final = 0.01
MISSING: Final = 0.2
"""Of the prompt tokens that were expected to be cached, and were not: beyond this, expectations are wrong."""
ENOUGH_TOKENS: Final = 10_000
"""Fewer say nothing about a rate."""
HOT: Final = 3.0
"""Times the mean of its peers' waiting prompt tokens."""
ENOUGH_WAITING: Final = 8
NAMED: Final = 3
FULL: Final = 0.97


class Trouble(msgspec.Struct, frozen=True):
    """One thing that is wrong."""

    level: str
    """`error`: requests fail, or something that should serve does not. `warning`: they are served worse than they could be. `note`: it is so
    because somebody wants it so."""
    what: str
    mend: str


def troubles(state: Mapping[str, Any]) -> list[dict[str, str]]:
    """All of them, the worst first; empty when all is well."""
    found = [trouble for look in _LOOKS for trouble in look(state)]
    found.sort(key=lambda trouble: LEVELS.index(trouble.level))
    return [msgspec.to_builtins(trouble) for trouble in found]


def _processes(state: Mapping[str, Any]) -> Iterator[Trouble]:
    silent = state["processes"]["silent"]
    if silent:
        names = ", ".join(map(str, silent))
        yield Trouble(
            "warning", f"Process {names} did not answer: what is shown is of the others.", "Its log lines say what it is busy with."
        )


def _models(state: Mapping[str, Any]) -> Iterator[Trouble]:
    if not state["engines"]:
        yield Trouble(
            "error", "No engine is followed: every request is answered 503.", "Name engines with --engine, or POST /admin/engines."
        )
    for model, engines in state["models"].items():
        if not engines:
            yield Trouble("error", f"No engine takes requests for {model}.", "See its engines below: start one, or undrain one.")


def _states(state: Mapping[str, Any]) -> Iterator[Trouble]:
    by_reason: dict[str, list[str]] = {}
    for engine in state["engines"]:
        if engine["state"] == "waiting":
            by_reason.setdefault(engine.get("waiting_for") or "it has not answered yet", []).append(engine["id"])
    for reason, ids in by_reason.items():
        yield Trouble("error", f"Not there: {_named(ids)}: {reason}.", "Start it, or mend its address; it joins by itself.")
    for name, level, what, mend in (
        ("ejected", "error", "Cannot be reached, and gets no requests", "See whether its process runs; it is asked again by itself."),
        (
            "cooling",
            "warning",
            "Answered 429 or 503 a moment ago, and is left alone",
            "If it lasts: more engines, or a lower admission.max_active_requests.",
        ),
        ("asleep", "note", "Asleep, its weights not loaded", "Wake it (vLLM: POST /wake_up) when it is needed."),
        ("draining", "note", "Draining, nothing new goes there", "Undrain it through the admin API when it is to serve again."),
    ):
        if ids := [engine["id"] for engine in state["engines"] if engine["state"] == name]:
            yield Trouble(level, f"{what}: {_named(ids)}.", mend)


def _signals(state: Mapping[str, Any]) -> Iterator[Trouble]:
    found: dict[tuple[str, str], list[str]] = {}
    for engine in state["engines"]:
        for endpoint in engine["endpoints"]:
            signal = endpoint["signal"]
            if signal["state"] != "live":
                found.setdefault((signal["state"], signal["reason"]), []).append(_endpoint(engine, endpoint))
    for (name, reason), endpoints in found.items():
        if name == "partial":
            mend = "It heals as its prefixes are used again; a replay endpoint in its KV event settings avoids it."
        else:
            mend = "Until then it is scored from what was sent there, which costs hits. The command `commutator doctor` checks each precondition."
        yield Trouble("warning", f"KV events are {name} at {_named(endpoints)}: {reason or 'no reason is known'}.", mend)


def _requests(state: Mapping[str, Any]) -> Iterator[Trouble]:
    late = state["late"]
    if late["failed"] and late["failed"] > SHARE_FAILED * late["requests"]:
        yield Trouble(
            "error",
            f"{late['failed']} of {late['requests']} requests of the last minute failed.",
            "The log has a line for each, with `failure`; the decisions below show where they went.",
        )
    waiting = sum(state["waiting"].values())
    if late["shed"]:
        yield Trouble("error", f"{late['shed']} requests of the last minute were answered 429: every engine was full.", "More engines.")
    elif waiting:
        yield Trouble("warning", f"{waiting} requests wait for room: every engine is full.", "More engines, if it lasts.")


def _hits(state: Mapping[str, Any]) -> Iterator[Trouble]:
    wrong = []
    for engine in state["engines"]:
        for endpoint in engine["endpoints"]:
            expected, found = endpoint["expected_hit_rate"], endpoint["hit_rate"]
            if expected is None or found is None or endpoint["recent_prompt_tokens"] < ENOUGH_TOKENS:
                continue
            if expected - found > MISSING:
                wrong.append(_endpoint(engine, endpoint))
    if wrong:
        yield Trouble(
            "warning",
            f"Found far less in the cache than was expected: {_named(wrong)}.",
            "Its tokenizer, block size or cache salt differs from what the router assumes, or it evicts before reuse: see the command `commutator doctor`.",
        )


def _fullness(state: Mapping[str, Any]) -> Iterator[Trouble]:
    full = [
        _endpoint(engine, endpoint)
        for engine in state["engines"]
        for endpoint in engine["endpoints"]
        if (endpoint["load"].get("kv_usage") or 0.0) >= FULL and (endpoint["load"].get("waiting") or 0) > 0
    ]
    if full:
        yield Trouble(
            "warning", f"KV cache full, with requests waiting inside the engine: {_named(full)}.", "More engines, or more memory for KV."
        )
    if state["index"]["refused"]:
        yield Trouble(
            "warning", "The prefix index is full: further blocks look uncached.", "Raise index_max_blocks (10 to 100 bytes each)."
        )


def _skew(state: Mapping[str, Any]) -> Iterator[Trouble]:
    """One endpoint with far more requests than others of its role and model: a prefix that everybody shares, or a policy that is too sticky."""
    pools: dict[tuple[str, str], list[tuple[int, str]]] = {}
    for engine in state["engines"]:
        if engine["state"] != "serving":
            continue
        models = ",".join(sorted(model["id"] for model in engine.get("models", ())))
        pools.setdefault((engine["role"], models), []).extend(
            (int(endpoint["load"]["active_requests"]), _endpoint(engine, endpoint)) for endpoint in engine["endpoints"]
        )
    for pool in pools.values():
        most, name = max(pool, default=(0, ""))
        others = (sum(requests for requests, _ in pool) - most) / max(1, len(pool) - 1)
        if len(pool) > 1 and most >= ENOUGH_WAITING and most > HOT * max(1.0, others):
            yield Trouble(
                "warning",
                f"{name} has {most} requests in flight, the others of its pool {others:.1f} on the mean.",
                "A hot prefix: set router_temperature, or add engines.",
            )


def _bus(state: Mapping[str, Any]) -> Iterator[Trouble]:
    if state["bus_away"]:
        yield Trouble(
            "warning",
            f"The NATS server at {state['bus_away']} cannot be reached.",
            "Requests are served; other routers' load and relayed events are not known.",
        )


def _transfers(state: Mapping[str, Any]) -> Iterator[Trouble]:
    disagg = state["disagg"]
    if disagg is None:
        return
    for link in disagg["links"]:
        if link["slow"]:
            yield Trouble(
                "warning",
                f"KV transfers {link['prefill']} → {link['decode']} are slow: {link['slow']}.",
                "Most often RDMA has fallen back to TCP: see the engines' logs.",
            )
    if disagg["recent"].get("no_prefill_engine"):
        yield Trouble(
            "warning", "Prompts were computed on decode engines since no prefill engine was usable.", "See the prefill engines below."
        )


_LOOKS: Final[tuple[Callable[[Mapping[str, Any]], Iterator[Trouble]], ...]] = (
    _models,
    _states,
    _requests,
    _signals,
    _bus,
    _processes,
    _transfers,
    _hits,
    _fullness,
    _skew,
)


def _endpoint(engine: Mapping[str, Any], endpoint: Mapping[str, Any]) -> str:
    """Its engine, and its rank where there are several."""
    return str(engine["id"]) if len(engine["endpoints"]) == 1 else f"{engine['id']} rank {endpoint['rank']}"


def _named(ids: list[str]) -> str:
    """A few of them."""
    return ", ".join(ids[:NAMED]) + (f" and {len(ids) - NAMED} more" if len(ids) > NAMED else "")
