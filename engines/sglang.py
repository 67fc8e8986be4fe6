"""What do SGLang's answers mean? Readers from raw answers to values; nothing here asks anything.

GET /server_info   all resolved arguments, version, and `kv_events`: where each rank's events and replay are
GET /v1/models     the served name
GET /v1/loads      load by rank, with or without `--enable-metrics`
GET /ready         200 or 503 without generating anything; not on the Rust frontend
"""

from __future__ import annotations

import msgspec

from engines.answers import read_json
from engines.types import EngineInfo, KvSource, Role
from engines.urls import WILDCARDS, split_tcp, tcp

SERVER_INFO = "/server_info"
OLD_SERVER_INFO = "/get_server_info"
MODELS = "/v1/models"
LOADS = "/v1/loads?include=core"
METRICS = "/metrics"
READY = "/ready"
"""`/health` is not asked: it generates a token and takes a second or more each time."""
MODEL_INFO = "/model_info"
"""Asked instead of `/ready` on the Rust frontend, which has none."""


class ServerInfo(msgspec.Struct, frozen=True):
    """What `/server_info` says, as far as it is read."""

    tokenizer_path: str | None = None
    model_path: str | None = None
    version: str = "unknown"
    status: str | None = None
    page_size: int | None = None
    dcp_size: int | None = None
    dp_size: int | None = None
    attn_dp_size: int | None = None
    max_total_num_tokens: int | None = None
    enable_hierarchical_cache: bool | None = None
    hicache_ratio: float | None = None
    hicache_size: float | None = None
    chunked_prefill_size: int | None = None
    max_prefill_tokens: int | None = None
    chat_template: str | None = None
    completion_template: str | None = None
    kv_events: KvEvents | None = None
    kv_events_config: str | None = None
    disaggregation_mode: str | None = None
    disaggregation_bootstrap_port: int | None = None
    kv_cache_dtype: str | None = None
    dtype: str | None = None


class KvEvents(msgspec.Struct, frozen=True):
    """The discovery block of `/server_info`."""

    endpoint_host: str
    endpoint_port_base: int
    topic: str = ""
    block_size: int | None = None
    dp_size: int = 1
    replay_endpoint_port_base: int | None = None
    load_endpoint_port_base: int | None = None
    load_topic: str = "load"


def recognise(answer: bytes) -> ServerInfo | None:
    """SGLang's `/server_info`, or None when the answer is not one."""
    info = read_json(answer, ServerInfo)
    return info if info is not None and info.model_path is not None and info.tokenizer_path is not None else None


def starting(info: ServerInfo) -> bool:
    """Whether the server says that it is not ready; versions that say nothing are taken at their word that they answer."""
    return info.status is not None and info.status != "ready"


def ranks(info: ServerInfo) -> tuple[int, ...]:
    """The ranks behind this URL.

    `kv_events.dp_size` is the one to trust: with DP attention the top-level `dp_size` is rewritten to 1.
    """
    sizes = (info.kv_events.dp_size if info.kv_events is not None else 1, info.dp_size or 1, info.attn_dp_size or 1)
    return tuple(range(max(sizes)))


def role(info: ServerInfo) -> Role:
    """What it was started for."""
    roles = {"prefill": Role.PREFILL, "decode": Role.DECODE}
    return roles.get(info.disaggregation_mode or "", Role.AGGREGATED)


def read_role(body: bytes) -> Role | None:
    """What `/model_info` says that it is for now: where it may, `/pd_role_switch` changes that while it runs. None where it does not say."""
    try:
        told = msgspec.json.decode(body, type=ServerInfo)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return None if told.disaggregation_mode is None else role(told)


def bootstrap(info: ServerInfo, host: str) -> str | None:
    """Where a prefill engine's bootstrap server is: on its own host, unless that is told otherwise."""
    if role(info) is not Role.PREFILL or info.disaggregation_bootstrap_port is None:
        return None
    return f"http://{host}:{info.disaggregation_bootstrap_port}"


def kv_dtype(info: ServerInfo) -> str:
    """How KV is stored: engines that differ in it must not hand it to each other."""
    return info.dtype or "" if info.kv_cache_dtype in {None, "auto"} else info.kv_cache_dtype or ""


def block_size(info: ServerInfo) -> int | None:
    """Tokens per published block."""
    if info.kv_events is not None and info.kv_events.block_size is not None:
        return info.kv_events.block_size
    return None if info.page_size is None else info.page_size * (info.dcp_size or 1)


def total_blocks(info: ServerInfo) -> int | None:
    """Blocks of KV cache per rank."""
    size = block_size(info)
    return info.max_total_num_tokens // size if size and info.max_total_num_tokens is not None else None


def host_blocks(info: ServerInfo) -> int | None:
    """Blocks of the host tier per rank, where it is sized by the device's: in GB (`hicache_size`) it cannot be told in blocks."""
    total = total_blocks(info)
    if not info.enable_hierarchical_cache or info.hicache_size or info.hicache_ratio is None or total is None:
        return None
    return int(total * info.hicache_ratio)


def max_batched_tokens(info: ServerInfo) -> int | None:
    """Prompt tokens one step may take: a chunk, or where chunking is off (-1) a whole prefill batch."""
    chunk = info.chunked_prefill_size
    return chunk if chunk is not None and chunk > 0 else info.max_prefill_tokens


def chats_take_ids(info: ServerInfo) -> bool:
    """Whether a chat may bring its `input_ids`.

    Not with a built-in conversation template, or one in a JSON file: their stop strings would be lost.
    """
    return info.chat_template is None or info.chat_template.endswith(".jinja")


def texts_take_ids(info: ServerInfo) -> bool:
    """Whether a completion may bring ids: a completion template is for texts."""
    return info.completion_template is None


def read_kv_sources(info: ServerInfo, host: str) -> tuple[KvSource, ...]:
    """One source per rank; wildcard hosts become `host`.

    A concrete host makes SGLang's PUB socket connect unless its configuration says `"bind": true`; replay sockets always bind.
    """
    config = _config(info)
    events = info.kv_events or _from_config(config)
    if events is None:
        return ()
    written = events.endpoint_host.removeprefix("[").removesuffix("]")
    wild = written in WILDCARDS
    engine_binds = wild if config.bind is None else config.bind
    events_host = host if wild else written
    replay_base = events.replay_endpoint_port_base
    return tuple(
        KvSource(
            rank=rank,
            events=tcp(events_host, events.endpoint_port_base + rank),
            replay=None if replay_base is None else tcp(_replay_host(config, host), replay_base + rank),
            topic=events.topic,
            bind=not engine_binds,
        )
        for rank in ranks(info)
    )


def read_load_sources(info: ServerInfo, host: str) -> tuple[KvSource, ...]:
    """Where each rank pushes its load; empty unless the server was started with `--load-publish-endpoint`.

    These sockets always bind, on a wildcard, whatever is said of the events' host.
    """
    events = info.kv_events
    if events is None or events.load_endpoint_port_base is None:
        return ()
    base = events.load_endpoint_port_base
    return tuple(KvSource(rank, tcp(host, base + rank), topic=events.load_topic) for rank in ranks(info))


def pin_headers(info: EngineInfo, rank: int) -> dict[str, str]:
    """The header that sends a request to `rank`; none when there is one rank. For OpenAI's routes: see `pin_fields`."""
    return {"X-Data-Parallel-Rank": str(rank)} if info.pins_rank else {}


def pin_fields(info: EngineInfo, rank: int) -> dict[str, int]:
    """The body's field that does so on `/generate`, which does not read the header (0.5.23); OpenAI's routes would let the header win."""
    return {"routed_dp_rank": rank} if info.pins_rank else {}


class _Config(msgspec.Struct):
    publisher: str | None = None
    endpoint: str = "tcp://*:5557"
    bind: bool | None = None
    replay_endpoint: str | None = None
    topic: str = ""


def _config(info: ServerInfo) -> _Config:
    return read_json(info.kv_events_config or "{}", _Config) or _Config()


def _from_config(config: _Config) -> KvEvents | None:
    """The discovery block as versions without one would have written it."""
    events = split_tcp(config.endpoint)
    if config.publisher != "zmq" or events is None:
        return None
    replay = None if config.replay_endpoint is None else split_tcp(config.replay_endpoint)
    return KvEvents(events[0], events[1], topic=config.topic, replay_endpoint_port_base=None if replay is None else replay[1])


def _replay_host(config: _Config, host: str) -> str:
    replay = None if config.replay_endpoint is None else split_tcp(config.replay_endpoint)
    return host if replay is None or replay[0] in WILDCARDS else replay[0]
