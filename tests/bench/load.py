"""How is load made, and what does the one who makes it see? `wrk`, in one thread, with `chat.lua` as what it sends."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import msgspec

from tests.bench.processes import BenchError

SCRIPT = Path(__file__).with_name("chat.lua")
PROMPT_WORDS = 330
"""About 1,600 tokens of the simulator's tokenizer."""


class Load(msgspec.Struct, frozen=True):
    """What to send."""

    connections: int
    words: int = PROMPT_WORDS
    shared_words: int = 0
    """The first so many words of a prompt are one of eight beginnings."""
    tokens: int = 16
    pause_ms: int = 0
    """Mean pause of each connection between two requests; 0 asks again at once."""
    ends: bool = True
    """Whether any answer is expected to end before the load does."""


class Seen(msgspec.Struct, frozen=True):
    """What came back."""

    requests: int
    seconds: float
    bytes: int
    p50_us: float
    """Time from a request's first byte to its answer's last."""
    p90_us: float
    p99_us: float
    refused: int
    """Answers other than 2xx."""
    broken: int
    """Connections refused or reset, and timeouts."""

    @property
    def per_s(self) -> float:
        """Requests per second."""
        return self.requests / self.seconds


async def put(load: Load, url: str, model: str, seconds: float, seed: int) -> Seen:
    """Put a router under load for a while. Raises BenchError when anything but answers came back."""
    command = ["wrk", "-t1", f"-c{load.connections}", f"-d{seconds:.0f}s", "--timeout", "30s", "-s", str(SCRIPT)]
    command += [f"{url}/v1/chat/completions", "--", f"words={load.words}", f"shared={load.shared_words}", f"tokens={load.tokens}"]
    command += [f"delay={load.pause_ms}", f"model={model}", f"seed={seed}"]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT)
    try:
        output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    found = re.search(rb"^RESULT (.*)$", output, re.MULTILINE)
    if found is None:
        raise BenchError(f"wrk ended with {process.returncode}:\n{output.decode(errors='replace')}")
    seen = msgspec.json.decode(found[1], type=Seen)
    if seen.refused or seen.broken or (load.ends and not seen.requests):
        raise BenchError(f"{url}: of {seen.requests} requests {seen.refused} were refused and {seen.broken} broke off")
    return seen
