"""What is an engine? The nouns that every room shares.

An *engine* is one process tree serving a model behind one URL. With data parallelism it holds several independent KV caches,
one per *rank*; an *endpoint* is an (engine, rank) pair, and is what a request is routed to:

    engine http://10.0.0.7:8000 ──┬── rank 0 ── endpoint (http://10.0.0.7:8000, 0)
                                  └── rank 1 ── endpoint (http://10.0.0.7:8000, 1)
"""

from __future__ import annotations

import enum

import msgspec


class EngineKind(enum.StrEnum):
    """Whose server answers behind the URL."""

    VLLM = "vllm"
    SGLANG = "sglang"


class Role(enum.StrEnum):
    """What part of a request an engine takes on."""

    AGGREGATED = "aggregated"
    PREFILL = "prefill"
    DECODE = "decode"


class Connector(enum.StrEnum):
    """By which of its handshakes an engine hands KV over: see `engines.handover`."""

    NIXL = "nixl"
    MOONCAKE = "mooncake"
    ROOMS = "rooms"
    """SGLang's, whatever moves the bytes."""


class Tier(enum.IntEnum):
    """Where a cached block lies; a lower tier costs more to read back."""

    DEVICE = 0
    HOST = 1
    DISK = 2


class Endpoint(msgspec.Struct, frozen=True, order=True):
    """One KV cache that a request can be sent to."""

    engine: str
    rank: int = 0

    def __str__(self) -> str:
        return f"{self.engine}#{self.rank}"


class KvSource(msgspec.Struct, frozen=True):
    """Where one rank's KV events (or load reports) are read: ZMQ endpoints that already name a reachable host."""

    rank: int
    events: str
    replay: str | None = None
    topic: str = ""
    bind: bool = False
    """The engine's PUB socket connects, so our SUB socket binds `events`."""


class Model(msgspec.Struct, frozen=True):
    """One entry of an engine's `/v1/models`."""

    id: str
    root: str | None = None
    """Path or hub name of the weights, where the engine tells it."""
    parent: str | None = None
    """The base model's id when this entry is a LoRA adapter."""
    max_model_len: int | None = None
    card: msgspec.Raw = msgspec.Raw(b"{}")
    """The engine's own JSON object for this entry, passed on to clients as it is."""


class EngineSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An engine as the user names it: its URL and what cannot or should not be asked of it."""

    url: str
    role: Role | None = None
    """What it is for, where it does not say so itself; an engine that says nothing either takes whole requests."""
    connector: Connector | None = None
    """How a prefill or decode engine hands KV over, where it does not say; vLLM's is taken for NIXL then."""
    bootstrap: str | None = None
    """Where a prefill engine's bootstrap server is, as decode engines reach it: `http://HOST:PORT` (Mooncake, SGLang)."""
    link: str | None = None
    """What it hands KV over by, as `100GbE` or `10GB/s`: transfers that are far slower are a fault that is told."""
    group: str = ""
    """Only engines of one group hand KV to each other: for those that look alike and have no link between them."""
    kv_events: str | None = None
    """ZMQ endpoint of rank 0's events; rank r is at port + r."""
    kv_replay: str | None = None
    kv_topic: str = ""
    block_size: int | None = None
    """Tokens per block. Learned from the engine when absent; a value that disagrees is reported as a mismatch."""
    tokenizer: str | None = None
    """Folder or hub name of tokenizer files, when the engine's own answer is not usable here."""
    api_key: str | None = None
    """Sent to the engine as a bearer token on every path."""


class EngineInfo(msgspec.Struct, frozen=True):
    """An engine as its own answers describe it."""

    id: str
    """The normalised URL: scheme://host:port, no trailing slash."""
    spec: EngineSpec
    kind: EngineKind
    version: str
    models: tuple[Model, ...]
    ranks: tuple[int, ...] = (0,)
    block_size: int | None = None
    """Tokens per block, or None when the engine does not say (then learned from its events)."""
    total_blocks: int | None = None
    """Blocks of KV cache per rank."""
    host_blocks: int | None = None
    """Blocks of the tier behind it per rank, where the engine says; copies of what is on the device are among them."""
    kv_sources: tuple[KvSource, ...] = ()
    """Empty when the engine publishes no KV events."""
    tokenizer: str | None = None
    """Where tokenizer files are to be looked for: a folder or a hub name."""
    max_num_batched_tokens: int | None = None
    chats_take_ids: bool = False
    """Whether a chat may bring its prompt's token ids, and nothing is lost with them."""
    texts_take_ids: bool = False
    """The same of a completion."""
    load_path: str | None = None
    """Where the engine reports its load (see `engines.metrics`); None when it offers nothing of the kind."""
    load_sources: tuple[KvSource, ...] = ()
    """Where each rank pushes its load (see `engines.load_feed`); empty when the engine only answers when it is asked."""
    no_kv_events: str = ""
    """Why `kv_sources` is empty, in words."""
    role: Role = Role.AGGREGATED
    connector: Connector | None = None
    """None when it can neither hand KV over nor take it."""
    bootstrap: str | None = None
    """`http://HOST:PORT` of a prefill engine's bootstrap server."""
    transfer_ids: tuple[tuple[int, str], ...] = ()
    """What that server calls each rank, where transfers go by it (Mooncake); another after every start."""
    kv_dtype: str = ""
    """How its KV cache is stored, as the engine calls it; empty when it does not say."""
    boot: float | None = None
    """The engine process's start, in seconds since the epoch, where it tells it: changes when it restarts in place."""

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        """One endpoint per rank."""
        return tuple(Endpoint(self.id, rank) for rank in self.ranks)

    @property
    def exchange(self) -> tuple[object, ...] | None:
        """What two engines must have in common to hand KV to each other; None when this one cannot at all.

        Between other block sizes or dtypes the engines do hand over, and answer 200 with wrong tokens.
        """
        if self.connector is None:
            return None
        base = tuple(sorted(model.id for model in self.models if model.parent is None))
        version = self.version if self.kind is EngineKind.VLLM else ""  # its handshake refuses another one
        return (self.spec.group, self.kind, version, self.connector, self.block_size, self.kv_dtype, base)

    @property
    def pins_rank(self) -> bool:
        """Whether a request must say which rank it is for."""
        return len(self.ranks) > 1
