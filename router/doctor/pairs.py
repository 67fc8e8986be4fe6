"""Can these engines hand a prompt's KV cache to each other, and do they? Compares what each says of itself, then hands one over.

That an answer came proves nothing: a vLLM engine that was started without a connector computes the prompt a second time, and answers 200. So
its own counters are asked where the prompt's tokens came from.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Final

import msgspec
from msgspec import Raw

from engines.errors import EngineError
from engines.handover import PREFILL_PATH, BadHandshake, decode_leg, handshake_for, prefill_leg
from engines.types import Connector, EngineInfo, EngineKind, Role
from router.doctor.engine import Engine
from router.doctor.findings import Finding, ok, unknown, wrong
from router.doctor.trial import counter, length_for

PARTS: Final = ("group", "kind", "version", "connector", "block size", "KV dtype", "models")
"""Of `EngineInfo.exchange`."""
FETCHED: Final = "vllm:prompt_tokens_by_source_total"
_PLAIN_IDS: Final = range(100, 1000)
_random = random.SystemRandom()


async def pairs(engines: Sequence[Engine]) -> list[Finding]:
    """A line for each engine without a partner, and for each pair that was tried: every decode engine, every prefill engine once."""
    prefill = [engine for engine in engines if engine.info.role is Role.PREFILL]
    decode = [engine for engine in engines if engine.info.role is Role.DECODE]
    found = []
    tried = set()
    for number, here in enumerate(decode):
        able = [there for there in prefill if fits(there.info, here.info)]
        if not able:
            found.append(_alone(here.info, prefill, "prefill"))
            continue
        there = able[number % len(able)]
        tried.add(there.info.id)
        found.append(await transfer(there, here))
    for there in prefill:
        able = [here for here in decode if fits(there.info, here.info)]
        if not able:
            found.append(_alone(there.info, decode, "decode"))
        elif there.info.id not in tried:
            found.append(await transfer(there, able[0]))
    return found


def fits(there: EngineInfo, here: EngineInfo) -> bool:
    """Whether the two can hand KV over at all."""
    return there.exchange is not None and there.exchange == here.exchange


def _alone(info: EngineInfo, others: Sequence[Engine], role: str) -> Finding:
    if not others:
        return wrong(
            "pair",
            info.id,
            f"it takes one part of a request, and there is no {role} engine for the other",
            f"add a {role} engine, or role=aggregated",
        )
    return wrong(
        "pair",
        info.id,
        f"no {role} engine fits: {difference(info, others[0].info)}",
        "start both alike: engines of other kinds cannot hand KV over",
    )


def difference(one: EngineInfo, other: EngineInfo) -> str:
    """In what the two do not fit, in words."""
    if one.exchange is None or other.exchange is None:
        return f"{(one if one.exchange is None else other).id} has no way to hand KV over"
    unlike = [
        f"{part} {mine or 'none'} and {theirs or 'none'}"
        for part, mine, theirs in zip(PARTS, one.exchange, other.exchange, strict=True)
        if mine != theirs
    ]
    return f"{other.id} has another {', another '.join(unlike)}"


async def transfer(there: Engine, here: Engine) -> Finding:
    """Hand one prompt over, and see where its tokens came from."""
    subject = f"{there.info.id} ▸ {here.info.id}"
    ids = Raw(msgspec.json.encode([_random.choice(_PLAIN_IDS) for _ in range(length_for(there.info))]))
    before = await counter(here.client, FETCHED, source="external_kv_transfer")
    try:
        await _hand_over(there, here, ids)
    except BadHandshake as error:
        return wrong(
            "transfer", subject, f"the prefill engine hands nothing over: {error}", "start both with --kv-transfer-config; see disagg.md"
        )
    except (EngineError, ExceptionGroup) as error:
        why = error if isinstance(error, EngineError) else error.exceptions[0]
        return wrong("transfer", subject, f"it failed: {why}", "the engines' logs say why; see disagg.md")
    if here.info.kind is EngineKind.SGLANG:
        return ok("transfer", subject, "a prompt was handed over")
    after = await counter(here.client, FETCHED, source="external_kv_transfer")
    if before is None or after is None:
        return unknown(
            "transfer", subject, f"an answer came; whether the prompt was handed over cannot be seen without {FETCHED} at /metrics"
        )
    if after <= before:
        told = "the decode engine computed the prompt a second time: it has no connector, and all looks well"
        return wrong("transfer", subject, told, "start it with --kv-transfer-config, or leave out role=decode")
    return ok("transfer", subject, f"{after - before:.0f} prompt tokens were handed over")


async def _hand_over(there: Engine, here: Engine, ids: Raw) -> None:
    rank = there.info.ranks[0]
    model = there.info.models[0].id
    path = PREFILL_PATH.decode()
    handshake = handshake_for(there.info, rank, _random.getrandbits(128))
    fields = {name: Raw(msgspec.json.encode(value)) for name, value in _BODY.items()}
    fields |= {"model": Raw(msgspec.json.encode(model)), "prompt": ids}
    prefill = Raw(prefill_leg(model, ids, {}, handshake.prefill()))
    if there.info.connector is Connector.ROOMS or handshake.at_once:
        async with asyncio.TaskGroup() as legs:
            legs.create_task(there.client.post_json(path, prefill))
            legs.create_task(here.client.post_json(path, Raw(decode_leg(here.info.kind, ids, fields, handshake.decode(b"")))))
        return
    answer = await there.client.post_json(path, prefill)
    told = handshake.decode(msgspec.json.encode(answer))
    await here.client.post_json(path, Raw(decode_leg(here.info.kind, ids, fields, told)))


_BODY: Final = {"max_tokens": 2, "temperature": 0, "ignore_eos": True}
