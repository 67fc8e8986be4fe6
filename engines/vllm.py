"""What do vLLM's answers mean? Readers from raw answers to values; nothing here asks anything.

GET /version            {"version": "0.32.0"}
GET /v1/models          ids, weights (`root`), LoRA adapters (`parent`)
GET /metrics            block size, blocks, ranks, start of the process, load
GET /kv_event_sources   {"0": {"publisher": "zmq", "endpoint": "tcp://*:5557", …}}   (since 0.31)
GET /server_info        the whole configuration, in development mode only
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from engines.answers import read_json, whole
from engines.types import EngineInfo, EngineKind, KvSource, Model
from engines.urls import reachable

VERSION = "/version"
MODELS = "/v1/models"
METRICS = "/metrics"
KV_EVENT_SOURCES = "/kv_event_sources"
TRANSFER_IDS = "/query"
"""Of Mooncake's bootstrap server."""
ALIVE = "/health"
"""200 while the engine's core lives, 503 when it died; answered by the API process, without touching the scheduler."""
XARGS = "vllm_xargs"
TELL_AGAIN = {"kv_cache_report_mode": "full"}
"""In a body's `vllm_xargs`: before what the request adds, all blocks that it found cached are published as stored, from the root on.
They are no further copies, and the event does not show that it is a repetition."""
TELLS_AGAIN_SINCE = (0, 26)


def recognise(version_answer: bytes) -> str | None:
    """The version, when this answer to `/version` has the shape of vLLM's."""
    answered = read_json(version_answer, _Version)
    return None if answered is None else answered.version


def read_models(answer: bytes) -> tuple[Model, ...] | None:
    """The entries of `/v1/models` (SGLang's have the same shape); None when this is no model list."""
    listed = read_json(answer, _Models)
    if listed is None:
        return None
    models = [_model(card) for card in listed.data]
    return tuple(model for model in models if model is not None)


def owners(answer: bytes) -> frozenset[str]:
    """Who says that it owns the models; empty when this is no model list. Tells servers apart that share vLLM's paths."""
    listed = read_json(answer, _Models)
    cards = [read_json(bytes(card), _Card) for card in listed.data] if listed is not None else []
    return frozenset(card.owned_by for card in cards if card is not None and card.owned_by)


def read_kv_sources(answer: bytes, host: str) -> tuple[KvSource, ...]:
    """One source per rank that publishes by ZMQ; wildcard hosts become `host`.

    vLLM's PUB socket binds where its endpoint has `*` or `::` and connects otherwise (0.0.0.0 too), so a concrete host is one
    that *we* bind. The exception cannot be seen here: configured as `tcp://*:0`, it reports the address that it bound
    (`engines.probe` finds out who listens there). Replay sockets always bind.
    """
    found = []
    for rank, config in (read_json(answer, dict[str, _KvEvents]) or {}).items():
        number = whole(rank)
        if number is None or not config.enable_kv_cache_events or config.publisher != "zmq":
            continue
        found.append(
            KvSource(
                rank=number,
                events=reachable(config.endpoint, host) if binds(config.endpoint) else config.endpoint,
                replay=None if config.replay_endpoint is None else reachable(config.replay_endpoint, host),
                topic=config.topic,
                bind=not binds(config.endpoint),
            )
        )
    return tuple(sorted(found, key=lambda source: source.rank))


def binds(endpoint: str) -> bool:
    """Whether vLLM's PUB socket binds this endpoint, by vLLM's own rule."""
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))


def tells_again(info: EngineInfo) -> bool:
    """Whether a request can have it publish anew the blocks that it finds cached (`TELL_AGAIN`); a version of another form cannot."""
    major, _, rest = info.version.partition(".")
    minor = rest.partition(".")[0]
    numbers = (int(major), int(minor)) if major.isdecimal() and minor.isdecimal() else (0, 0)
    return info.kind is EngineKind.VLLM and numbers >= TELLS_AGAIN_SINCE


def pin_headers(info: EngineInfo, rank: int) -> dict[str, str]:
    """The header that sends a request to `rank`; none when the engine has one rank, or none that we know of.

    vLLM reads the number as an index into the ranks that this API server manages, not as a rank: an engine that owns ranks 4..7
    answers 400 to "4" and takes "0" for its rank 4 (0.32, `get_core_engine_for_request`).
    """
    return {"X-data-parallel-rank": str(info.ranks.index(rank))} if info.pins_rank else {}


def chats_take_ids(version: str) -> bool:
    """Whether a chat reads `kv_transfer_params.prompt_token_ids`: since 0.27. A version that is no number is not taken to.

    >>> [chats_take_ids(version) for version in ("0.26.1", "0.27.0", "0.32.0+cpu", "1.0", "dev")]
    [False, True, True, True, False]
    """
    numbers = [whole(part) for part in version.split(".")[:2]]
    return len(numbers) == 2 and None not in numbers and numbers >= [0, 27]


def weights_of(models: Sequence[Model]) -> str | None:
    """Where the base model's weights, and so its tokenizer, are."""
    return next((model.root for model in models if model.parent is None and model.root), None)


def _model(card: msgspec.Raw) -> Model | None:
    read = read_json(bytes(card), _Card)
    if read is None:
        return None
    return Model(id=read.id, root=read.root, parent=read.parent, max_model_len=read.max_model_len, card=card.copy())


class _Version(msgspec.Struct):
    version: str


class _Card(msgspec.Struct):
    id: str
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None
    owned_by: str | None = None


class _Models(msgspec.Struct):
    data: list[msgspec.Raw]


class _KvEvents(msgspec.Struct):
    endpoint: str = "tcp://*:5557"
    enable_kv_cache_events: bool = True
    publisher: str | None = "zmq"
    replay_endpoint: str | None = None
    topic: str = ""
