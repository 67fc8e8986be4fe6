"""What does an engine make of one prompt that is sent twice? Sends it, and listens to its KV events meanwhile.

The prompt is token ids drawn at random: no template and no tokenizer has a part in it, nobody has sent it before, and the events that it
causes are told from those of other requests by its ids.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Final

import aiohttp
import msgspec
import zmq.asyncio

from engines import metrics, sglang, vllm
from engines.client import EngineClient
from engines.errors import EngineError
from engines.events import KvBatch, Removed, Skipped, Stored
from engines.replay import replay
from engines.subscriber import KvSubscriber
from engines.types import EngineInfo, EngineKind, KvSource
from router.sse import Scanner

LENGTH: Final = 2048
"""Tokens, where cache and model have room: long enough that a hit can be seen in the time to the first token."""
LISTENED_WITHIN_S: Final = 5.0
EVENTS_WITHIN_S: Final = 3.0
REPLAY_WITHIN_S: Final = 2.0
_FUTURE: Final = 1 << 62
POLL_S: Final = 0.02
_PLAIN_IDS: Final = range(100, 1000)
"""Ids that are in every vocabulary and mean nothing."""
_random = random.SystemRandom()


class Refused(Exception):
    """The engine did not answer a prompt; the message says how it refused."""


class Reply(msgspec.Struct, frozen=True):
    """What an engine made of a prompt."""

    ttft_s: float
    prompt_tokens: int
    cached_tokens: int | None
    """As its usage says; None when it does not."""


class Heard(msgspec.Struct):
    """What its events said (`engines.subscriber.KvSink`)."""

    stored: list[Stored] = []
    removed: set[int | bytes] = set()
    batches: int = 0
    skipped: Counter[str] = msgspec.field(default_factory=Counter)
    lags_s: list[float] = []
    """From each batch's being made to its being read, by the clocks of both."""
    listening: bool = False
    down: str = ""
    """Why nobody is there to listen to."""

    def restarted(self, reason: str) -> None:
        """Nothing is kept that a new life could contradict."""

    def batch(self, batch: KvBatch) -> None:
        """Note what happened."""
        self.batches += 1
        self.lags_s.append(time.time() - batch.ts)  # noqa: TID251  what an engine stamps its batches with
        for happened in batch.events:
            match happened:
                case Stored():
                    self.stored.append(happened)
                case Removed(hashes=hashes):
                    self.removed.update(hashes)
                case Skipped(reason=reason):
                    self.skipped[reason.value] += 1
                case _:
                    pass

    def lost(self, first: int, last: int) -> None:
        """None of those lost is of the prompt: it is sent later."""

    def undecodable(self, kind: str, seq: int | None = None) -> None:
        """Counted with what was not used."""
        del seq
        self.skipped[kind] += 1

    def caught_up(self) -> None:
        """It has been found."""
        self.listening = True

    def unreachable(self, reason: str) -> None:
        """Tried again meanwhile."""
        self.listening, self.down = False, reason

    def blocks_of(self, ids: list[int]) -> dict[int, list[int | bytes]]:
        """Position → hashes of the stored blocks there that are of this prompt."""
        found: dict[int, list[int | bytes]] = {}
        for stored in self.stored:
            for number, name in enumerate(stored.hashes):
                tokens = stored.tokens[number * stored.block_size : (number + 1) * stored.block_size]
                at = _position(ids, tokens, stored.block_size)
                if at is not None:
                    found.setdefault(at, []).append(name)
        return found


class Trial(msgspec.Struct, frozen=True):
    """Everything that is known of one endpoint afterwards."""

    info: EngineInfo
    rank: int
    ids: list[int]
    first: Reply
    second: Reply
    hits: int | None
    """Prompt tokens of the second one from cache, by the engine's own counters; None when it has none."""
    heard: Heard | None
    """None where nobody listened."""
    replay_unanswered: bool = False
    other_topic: bool = False
    """Events come, and under a topic that is not the one asked for."""

    @property
    def source(self) -> KvSource | None:
        """Where its events are read."""
        return next((source for source in self.info.kv_sources if source.rank == self.rank), None)

    @property
    def cached(self) -> int:
        """Prompt tokens of the second one that came from cache, as far as anybody says."""
        return max(self.second.cached_tokens or 0, self.hits or 0)


async def trial(session: aiohttp.ClientSession, client: EngineClient, info: EngineInfo, rank: int, *, timeout_s: float) -> Trial:
    """Send the prompt twice. Raises Refused, or an EngineError."""
    ids = [_random.choice(_PLAIN_IDS) for _ in range(length_for(info))]
    ask = Asker(session, info, rank, timeout_s)
    source = next((source for source in info.kv_sources if source.rank == rank), None)
    async with contextlib.AsyncExitStack() as stack:
        context = stack.enter_context(zmq.asyncio.Context())
        heard, unanswered = None, False
        if source is not None and not source.bind:
            heard = await stack.enter_async_context(listening(context, source))
            unanswered = not await _replays(context, source)
        first = await ask(ids)
        if heard is not None:
            await until(lambda: bool(heard.blocks_of(ids)), EVENTS_WITHIN_S)
        before = await _hits(client, info)
        second = await ask(ids)
        hits = await _told_apart(client, info, ids, before)
        other_topic = False
        if heard is not None and source is not None and source.topic and heard.listening and not heard.blocks_of(ids):
            other_topic = await _under_another_topic(context, source, ask)
        if heard is not None:
            await until(lambda: bool(heard.blocks_of(ids)), POLL_S)
    return Trial(info, rank, ids, first, second, hits, heard, replay_unanswered=unanswered, other_topic=other_topic)


def length_for(info: EngineInfo) -> int:
    """Tokens of a prompt of several blocks, with a few left over: no more than half the cache, and what the model takes.

    >>> from engines.types import EngineSpec, Model
    >>> length_for(EngineInfo("http://a:1", EngineSpec("http://a:1"), EngineKind.VLLM, "1", (Model("m", max_model_len=512),), block_size=16))
    455
    """
    size = info.block_size or 16
    longest = min((model.max_model_len for model in info.models if model.max_model_len is not None), default=1 << 20)
    room = LENGTH if info.total_blocks is None else info.total_blocks * size // 2
    blocks = max(1, min(LENGTH, room, longest - 64) // size)
    return blocks * size + size // 2 - 1 if size > 2 else blocks * size + 1


class Asker:
    """Sends prompts to one endpoint as a client would."""

    def __init__(self, session: aiohttp.ClientSession, info: EngineInfo, rank: int, timeout_s: float) -> None:
        self._session = session
        self._url = info.id + "/v1/completions"
        self._timeout_s = timeout_s
        self._model = next((model.id for model in info.models if model.parent is None), "")
        pin = vllm.pin_headers if info.kind is EngineKind.VLLM else sglang.pin_headers
        self._headers = {"content-type": "application/json", "accept-encoding": "identity"} | pin(info, rank)
        if info.spec.api_key is not None:
            self._headers["authorization"] = f"Bearer {info.spec.api_key}"

    async def __call__(self, ids: list[int]) -> Reply:
        """Stream two tokens. Raises Refused, or an EngineError's cousin of aiohttp mapped to it."""
        body = {
            "model": self._model,
            "prompt": ids,
            "max_tokens": 2,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        scanner, first_at = Scanner(streamed=True), None
        try:
            async with asyncio.timeout(self._timeout_s):
                began = time.perf_counter()
                async with self._session.post(self._url, data=msgspec.json.encode(body), headers=self._headers) as response:
                    if response.status != 200:
                        raise Refused(
                            f"it answered {response.status} to a prompt: {(await response.content.read(300)).decode(errors='replace')}"
                        )
                    async for piece in response.content.iter_any():
                        if scanner.feed(piece):
                            first_at = time.perf_counter()
        except TimeoutError:
            raise Refused(f"it did not answer a prompt of {len(ids)} tokens within {self._timeout_s:g} s") from None
        except aiohttp.ClientError as error:
            raise Refused(f"it did not answer a prompt: {str(error) or type(error).__name__}") from error
        if scanner.failed or first_at is None:
            raise Refused("it answered a prompt with an error in its stream, or without a token")
        usage = scanner.usage()
        return Reply(first_at - began, usage.prompt_tokens if usage else 0, usage.cached_tokens if usage else None)


@contextlib.asynccontextmanager
async def listening(context: zmq.asyncio.Context, source: KvSource) -> AsyncIterator[Heard]:
    """Its events are heard within the context, as it publishes them: a replay would hide that none come."""
    heard = Heard()
    subscriber = KvSubscriber(context, msgspec.structs.replace(source, replay=None), heard)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(subscriber.run())
        await until(lambda: heard.listening or bool(heard.down), LISTENED_WITHIN_S)
        try:
            yield heard
        finally:
            task.cancel()


async def _replays(context: zmq.asyncio.Context, source: KvSource) -> bool:
    """Whether its replay socket answers, where it has one: a question for what is still to come is answered by an end."""
    if source.replay is None:
        return True
    with contextlib.suppress(TimeoutError):
        async with contextlib.aclosing(replay(context, source.replay, _FUTURE, silence_s=REPLAY_WITHIN_S)) as messages:
            async for _ in messages:
                break
        return True
    return False


async def _under_another_topic(context: zmq.asyncio.Context, source: KvSource, ask: Asker) -> bool:
    """Whether a further prompt's events come to one who takes any topic."""
    ids = [_random.choice(_PLAIN_IDS) for _ in range(LENGTH // 8)]
    async with listening(context, msgspec.structs.replace(source, topic="")) as heard:
        await ask(ids)
        return await until(lambda: bool(heard.blocks_of(ids)), EVENTS_WITHIN_S)


async def _told_apart(client: EngineClient, info: EngineInfo, ids: list[int], before: float | None) -> int | None:
    """What came from cache, by means that no option switches off: SGLang's own API, vLLM's counters."""
    if info.kind is EngineKind.SGLANG:
        body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 1}}
        with contextlib.suppress(EngineError, msgspec.MsgspecError):
            return msgspec.convert(await client.post_json("/generate", body), _Generated).meta_info.cached_tokens
        return None
    after = await _hits(client, info)
    return None if after is None or before is None else int(after - before)


async def _hits(client: EngineClient, info: EngineInfo) -> float | None:
    """Prompt tokens that vLLM has had from cache since it started."""
    return await counter(client, "vllm:prefix_cache_hits_total") if info.kind is EngineKind.VLLM else None


async def counter(client: EngineClient, name: str, **labels: str) -> float | None:
    """Sum of a counter on an engine's metrics page; None where it has none."""
    try:
        page = await client.get_text(vllm.METRICS)
    except EngineError:
        return None
    values = [value for found, value in metrics.samples(page, name) if found.items() >= labels.items()]
    return sum(values) if values else None


async def until(condition: Callable[[], bool], within_s: float) -> bool:
    """Whether it came true in time."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            while not condition():  # noqa: ASYNC110  what is waited for has no waiters to wake
                await asyncio.sleep(POLL_S)
            return True
    return condition()


def _position(ids: list[int], tokens: list[int], size: int) -> int | None:
    if len(tokens) != size:
        return None
    return next((at for at in range(0, len(ids) - size + 1, size) if ids[at] == tokens[0] and ids[at : at + size] == tokens), None)


class _Meta(msgspec.Struct):
    cached_tokens: int


class _Generated(msgspec.Struct):
    meta_info: _Meta
