"""How fast is the link between these two engines? By what handing prompts over takes.

A prefill engine computes prompts of two lengths, and the decode engine fetches each to generate one token. What the longer ones take more is
the link's; what both take is everybody's.

    bytes per second = (KV of a long prompt − KV of a short one) ÷ (seconds of the long ones − seconds of the short ones)
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from statistics import median
from typing import Final

import aiohttp
import msgspec
from msgspec import Raw

from engines.client import EngineClient
from engines.errors import EngineError
from engines.handover import PREFILL_PATH, BadHandshake, decode_leg, handshake_for, prefill_leg
from engines.kv_bytes import KvShape
from engines.links import Link
from engines.probe import probe
from engines.types import Connector, EngineInfo, EngineSpec, Role

SHORT: Final = 256
LONG: Final = 4096
"""Tokens, or as many as the model takes."""
ROUNDS: Final = 5
TIMEOUT_S: Final = 120.0
_PLAIN_IDS: Final = range(100, 1000)


class LinkNotMeasured(Exception):
    """The link could not be measured; the message says why, and what to do."""


async def measure_link(engines: Sequence[EngineSpec], kv: KvShape) -> Link:
    """The link between a prefill engine and a decode engine that can hand `kv` to each other. Raises LinkNotMeasured."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None), auto_decompress=False) as session:
        clients = [EngineClient.of(session, spec, timeout_s=TIMEOUT_S) for spec in engines]
        try:
            found = [await probe(client, spec) for client, spec in zip(clients, engines, strict=True)]
            pair = {info.role: (info, client) for info, client in zip(found, clients, strict=True)}
            if pair.keys() != {Role.PREFILL, Role.DECODE}:
                raise LinkNotMeasured(
                    f"a prefill engine and a decode engine are needed, and these are {_roles(found)}: say role=prefill, role=decode"
                )
            there, here = pair[Role.PREFILL], pair[Role.DECODE]
            if there[0].exchange != here[0].exchange:
                raise LinkNotMeasured(f"these engines cannot hand KV to each other: {there[0].exchange} and {here[0].exchange}")
            handing = _Handing(*there, *here)
            lengths = SHORT, min(LONG, _longest(there[0]) - 64)
            return await _measured(handing, kv, lengths)
        except (EngineError, BadHandshake) as error:
            raise LinkNotMeasured(str(error)) from error


async def _measured(handing: _Handing, kv: KvShape, lengths: tuple[int, int]) -> Link:
    seconds: tuple[list[float], list[float]] = [], []
    for _ in range(ROUNDS):
        for taken, length in zip(seconds, lengths, strict=True):
            taken.append(await handing.seconds(length))
    carried = kv.bytes(lengths[1]) - kv.bytes(lengths[0])
    more_s = median(seconds[1]) - median(seconds[0])
    spread_s = max(max(taken) - min(taken) for taken in seconds)
    if more_s <= 0 or more_s < spread_s / 4:
        raise LinkNotMeasured(
            f"{carried:,} bytes more took {more_s * 1e3:.1f} ms more, which is lost in a scatter of {spread_s * 1e3:.1f} ms: the link is too fast for "
            "prompts this short, or the engines are busy; give its rate instead, such as --link 100GbE"
        )
    return Link("measured", carried / more_s, 1.0)


class _Handing:
    """Hands prompts from one engine to the other."""

    def __init__(self, there: EngineInfo, prefill: EngineClient, here: EngineInfo, decode: EngineClient) -> None:
        self._there, self._prefill = there, prefill
        self._here, self._decode = here, decode
        self._model = there.models[0].id
        self._random = random.SystemRandom()

    async def seconds(self, tokens: int) -> float:
        """What a decode engine needs for a token, its prompt lying computed on the other engine."""
        ids = Raw(msgspec.json.encode([self._random.choice(_PLAIN_IDS) for _ in range(tokens)]))
        if self._there.connector is not Connector.ROOMS:
            return await self._in_turn(ids)
        await self._at_once(ids)  # prefill then finds the prompt in its cache; the decode engine keeps none
        began = time.perf_counter()
        await self._at_once(ids)
        return time.perf_counter() - began

    async def _in_turn(self, ids: Raw) -> float:
        handshake = handshake_for(self._there, self._there.ranks[0], self._random.getrandbits(128))
        answer = await self._prefill.post_json(PREFILL_PATH.decode(), Raw(prefill_leg(self._model, ids, {}, handshake.prefill())))
        told = handshake.decode(msgspec.json.encode(answer))
        began = time.perf_counter()
        await self._decode.post_json(PREFILL_PATH.decode(), self._one_token(ids, told))
        return time.perf_counter() - began

    async def _at_once(self, ids: Raw) -> None:
        handshake = handshake_for(self._there, self._there.ranks[0], self._random.getrandbits(128))
        async with asyncio.TaskGroup() as legs:
            body = Raw(prefill_leg(self._model, ids, {}, handshake.prefill()))
            legs.create_task(self._prefill.post_json(PREFILL_PATH.decode(), body))
            legs.create_task(self._decode.post_json(PREFILL_PATH.decode(), self._one_token(ids, handshake.decode(b""))))

    def _one_token(self, ids: Raw, told: object) -> Raw:
        body = msgspec.json.encode({"model": self._model, "prompt": ids, "max_tokens": 1, "temperature": 0, "ignore_eos": True})
        return Raw(decode_leg(self._here.kind, ids, msgspec.json.decode(body, type=dict[str, Raw]), msgspec.convert(told, dict)))


def _longest(info: EngineInfo) -> int:
    return max((model.max_model_len or LONG + 64 for model in info.models), default=LONG + 64)


def _roles(found: Sequence[EngineInfo]) -> str:
    return ", ".join(f"{info.id} ({info.role})" for info in found)
