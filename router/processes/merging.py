"""What do several processes say that were asked one thing? One answer, and where they differ, who differs.

readiness   ready when all are; a model has as many engines as in the process that knows fewest
admin       one reply: what they agree on; or an error that names the processes that did not do it, or did not answer
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from router.processes.messages import AdminReply, Readiness

NO_READINESS: Final = Readiness(accepting=False, models={}, joining=[])

ORDER: Final = ("waiting", "joining", "ejected", "asleep", "cooling", "draining", "serving")
"""An engine's states: where processes differ, the first of these is told."""
SUMMED: Final = ("active_requests", "active_prefill_tokens", "active_blocks")


def ready(parts: Iterable[Readiness]) -> Readiness:
    """What can be relied on whichever process a request comes to.

    >>> ready([Readiness(True, {"m": 2}, []), Readiness(True, {"m": 1}, ["http://b:1"])])
    Readiness(accepting=True, models={'m': 1}, joining=['http://b:1'])
    """
    parts = list(parts)
    if not parts:
        return NO_READINESS
    models = {model: min(part.models.get(model, 0) for part in parts) for model in sorted({m for part in parts for m in part.models})}
    return Readiness(all(part.accepting for part in parts), models, sorted({engine for part in parts for engine in part.joining}))


def reply(replies: Mapping[int, AdminReply | None]) -> AdminReply:
    """The group's reply, of what each process replied; None: it did not in time."""
    silent = [index for index, told in replies.items() if told is None]
    told = {index: one for index, one in replies.items() if one is not None}
    done = {index: one for index, one in told.items() if one.status < 300}
    refused = {index: one for index, one in told.items() if one.status >= 300 and (one.status != 404 or not done)}
    if silent:
        return AdminReply(504, error=f"{_processes(silent)} did not answer in time, and will do it when it does; {_processes(done)} did it")
    if not told:
        return AdminReply(503, error="no process is up; the log says why")
    if refused and done:
        first = next(iter(refused))
        return AdminReply(502, error=f"{_processes(refused)} did not do it ({refused[first].error}); {_processes(done)} did")
    if refused:
        return next(iter(refused.values()))
    return AdminReply(
        max(one.status for one in done.values()), _merged({index: msgspec.json.decode(one.body) for index, one in done.items()})
    )


def _merged(bodies: Mapping[int, dict[str, Any]]) -> bytes:
    first = next(iter(bodies.values()))
    if "engines" not in first:
        return msgspec.json.encode(engine(bodies))
    ids = dict.fromkeys(told["id"] for body in bodies.values() for told in body["engines"])
    found = {id_: {i: told for i, body in bodies.items() for told in body["engines"] if told["id"] == id_} for id_ in ids}
    return msgspec.json.encode({"engines": [engine(one) for one in found.values()]})


def engine(told: Mapping[int, dict[str, Any]]) -> dict[str, Any]:
    """One engine as several processes see it: the worst state, all that is in flight, and each process's own state where they differ.

    >>> merged = engine({0: {"id": "e", "state": "serving", "in_flight": 2}, 1: {"id": "e", "state": "joining", "in_flight": 0}})
    >>> merged["state"], merged["in_flight"], merged["states"]
    ('joining', 2, {'0': 'serving', '1': 'joining'})
    """
    states = {str(index): one["state"] for index, one in told.items()}
    worst = min(told, key=lambda index: ORDER.index(told[index]["state"]) if told[index]["state"] in ORDER else len(ORDER))
    merged = dict(told[worst])
    if "outcome" in merged:
        outcomes = [one["outcome"] for one in told.values()]
        merged["outcome"] = next((outcome for outcome in outcomes if outcome != "unchanged"), "unchanged")
    for field in ("draining", "leaving"):
        if field in merged:
            merged[field] = any(one.get(field, False) for one in told.values())
    if "in_flight" in merged:
        merged["in_flight"] = sum(one.get("in_flight", 0) for one in told.values())
    if "endpoints" in merged:
        merged["endpoints"] = [
            _endpoint(place, [one["endpoints"] for one in told.values() if "endpoints" in one], merged["endpoints"])
            for place in range(len(merged["endpoints"]))
        ]
    if len(set(states.values())) > 1:
        merged["states"] = states
    return merged


def _endpoint(place: int, all_: Sequence[list[dict[str, Any]]], shown: list[dict[str, Any]]) -> dict[str, Any]:
    """Load and predictions are each process's own, and added; the rest is the same in all."""
    parts = [endpoints[place] for endpoints in all_ if len(endpoints) > place]
    load = dict(shown[place]["load"]) | {name: sum(part["load"][name] for part in parts) for name in SUMMED}
    return shown[place] | {"load": load, "predicted_blocks": sum(part["predicted_blocks"] for part in parts)}


def _processes(indexes: Iterable[int]) -> str:
    numbers = [str(index) for index in indexes]
    return f"process {numbers[0]}" if len(numbers) == 1 else f"processes {', '.join(numbers)}" if numbers else "no process"
