"""What does one engine carry? Measured on a live one that nobody else uses: prompts of some lengths alone, then streams at once.

The profile is printed as JSON: `commutator plan --profile FILE` begins with it instead of with nothing.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
import time
from typing import Any, Final

import aiohttp
import msgspec

from engines.client import EngineClient
from engines.errors import EngineError
from engines.probe import probe
from engines.types import EngineInfo, EngineSpec
from planner.capacity import Profile
from planner.settings import PlanSettings

LENGTHS: Final = (128, 512, 2048, 8192)
STREAMS: Final = (1, 4, 16, 48)
OUTPUT_TOKENS: Final = 48
PROMPT_OF_STREAMS: Final = 64
REPEATS: Final = 3
TIMEOUT_S: Final = 120.0
TOKEN_IDS: Final = 200
"""Ids below this exist in every vocabulary."""


class NotMeasured(Exception):
    """The engine could not be measured; the message says why."""


async def measure(settings: PlanSettings) -> None:
    """Print the profile of the engine at `settings.profile`. Raises NotMeasured."""
    assert settings.profile is not None  # noqa: S101  its caller's condition
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S)) as session:
        made = await profile_of(session, settings.profile)
    sys.stdout.write(msgspec.json.encode(made).decode() + "\n")


async def profile_of(session: aiohttp.ClientSession, url: str) -> Profile:
    """Of the engine there. Raises NotMeasured."""
    spec = EngineSpec(url.rstrip("/"))
    try:
        info = await probe(EngineClient.of(session, spec, timeout_s=10.0), spec)
    except EngineError as error:
        raise NotMeasured(f"there is no engine to measure at {url}: {error}") from error
    longest = min((model.max_model_len or LENGTHS[-1] for model in info.models), default=LENGTHS[-1])
    lengths = [length for length in LENGTHS if length + OUTPUT_TOKENS < longest]
    await _stream(session, info, lengths[0])  # the first request of an engine is slower than any other
    prefill = []
    for length in lengths:
        times = [(await _stream(session, info, length, 2))[0] for _ in range(REPEATS)]
        prefill.append((float(length), statistics.median(times)))
    decode = []
    for streams in STREAMS:
        found = await asyncio.gather(*(_stream(session, info, PROMPT_OF_STREAMS, OUTPUT_TOKENS) for _ in range(streams)))
        decode.append((float(streams), statistics.median(itl for _, itl in found)))
    tokens = info.total_blocks * info.block_size if info.total_blocks and info.block_size else None
    return Profile(tuple(prefill), tuple(decode), tokens)


async def _stream(session: aiohttp.ClientSession, info: EngineInfo, length: int, tokens: int = 4) -> tuple[float, float]:
    """Seconds to the first token, and between tokens, of a prompt that no cache has. Raises NotMeasured."""
    prompt = [random.randrange(10, TOKEN_IDS) for _ in range(length)]
    body: dict[str, Any] = {"model": info.models[0].id, "prompt": prompt, "max_tokens": tokens, "stream": True, "ignore_eos": True}
    began, first, last, count = time.monotonic(), None, 0.0, 0
    try:
        async with session.post(
            f"{info.id}/v1/completions", data=msgspec.json.encode(body), headers={"content-type": "application/json"}
        ) as response:
            if response.status != 200:
                raise NotMeasured(f"the engine answers {response.status}: {(await response.text())[:300]}")
            async for line in response.content:
                if line.startswith(b"data: {"):
                    last = time.monotonic()
                    first = last if first is None else first
                    count += 1
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise NotMeasured(f"the engine broke off: {error or type(error).__name__}") from error
    if first is None:
        raise NotMeasured("the engine's stream had no token")
    return first - began, (last - first) / max(1, count - 1)
