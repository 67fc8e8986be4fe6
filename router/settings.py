"""What can be set about `commutator serve`?

One frozen Struct: its field paths are the keys of the TOML file, the environment variables and the flags; its descriptions are the
help text and the reference. `check` finds what is wrong only in combination, above all options that would have no effect.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from discovery.access import (
    NatsCa,
    NatsCert,
    NatsCreds,
    NatsKey,
    NatsNkey,
    NatsPassword,
    NatsToken,
    NatsUrl,
    NatsUser,
    complaints,
)
from discovery.config import Complaint
from discovery.logs import LogFormat, LogLevel
from discovery.sources import settings as sources
from discovery.sources.settings import DiscoverSettings
from engines.types import EngineSpec
from router.disagg import Mode
from router.keys import BadKeys, read_keys
from router.processes.port import SHARES_PORTS

CACHE_BLIND = frozenset({"round-robin", "random", "least-loaded", "power-of-two", "session"})
"""Policies of ours that never look at the cache, so that nothing about prompts or blocks has an effect with them."""
CACHE_AWARE = frozenset({"kv", "blocks", "threshold"})

Seconds = Annotated[float, Meta(gt=0)]
Weight = Annotated[float, Meta(ge=0)]
Text = Annotated[str, Meta(min_length=1)]
Token = Annotated[str, Meta(pattern=r"^[!-~]{16,}$")]


class BlocksSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The weights of the `blocks` policy, Dynamo's formula. Costs are counted in blocks; the lowest wins."""

    overlap_score_credit: Annotated[Weight, Meta(description="What a block cached on the device takes off the cost of prefilling it.")] = (
        1.0
    )
    prefill_load_scale: Annotated[Weight, Meta(description="How much blocks to prefill weigh against blocks being decoded.")] = 1.0
    host_cache_hit_weight: Annotated[Weight, Meta(description="The same credit for a block held in host memory.")] = 0.75
    disk_cache_hit_weight: Annotated[Weight, Meta(description="The same credit for a block held on disk.")] = 0.25
    decode_active_request_weight: Annotated[Weight, Meta(description="Cost, in blocks, of each request in flight.")] = 0.0


class AdmissionSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What happens when every engine is full: requests wait in turn, and the rest are told when to come back."""

    max_active_requests: Annotated[
        int,
        Meta(
            ge=1,
            description="Requests in flight on one endpoint, of this router (each of its processes has its part); further ones wait here, in "
            "fair order, for whichever engine has room first. The default is more than a stock engine runs at once, so it never costs throughput; set it to the engines' "
            "own limit (vLLM's `--max-num-seqs`, SGLang's `--max-running-requests`) to have all waiting done here.",
        ),
    ] = 4096
    max_waiting: Annotated[
        int, Meta(ge=0, description="Requests that may wait for each model; further ones are answered 429 at once, or displace one.")
    ] = 1000
    max_wait_s: Annotated[Seconds, Meta(description="How long a request may wait; then it is answered 429.")] = 10.0
    tenant_header: Annotated[
        Text | None,
        Meta(
            description="Header that names on whose behalf a request comes. Tenants that wait take turns. Without it, clients are told "
            "apart by their API keys.",
        ),
    ] = None
    priority_header: Annotated[
        str, Meta(min_length=1, description="Header that says how urgent a request is, before the body's `priority`; lower goes first.")
    ] = "x-vllm-priority"
    deadline_header: Annotated[
        str, Meta(min_length=1, description="Header that says within how many seconds a request must be let in, or answered 429.")
    ] = "x-admission-deadline-s"


class ServeSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The reverse proxy and router: OpenAI API in front of the engines."""

    engine: Annotated[
        tuple[EngineSpec, ...],
        Meta(
            description="An engine: its URL, then what it cannot be asked: "
            "`http://h:8000,kv-events=tcp://h:5557,kv-replay=tcp://h:5558,block-size=16,tokenizer=/models/m,api-key=…`. Repeatable."
        ),
    ] = ()
    discover: DiscoverSettings = DiscoverSettings()
    host: Annotated[str, Meta(min_length=1, description="Address to listen on.")] = "0.0.0.0"  # noqa: S104  a router is there to be reached
    port: Annotated[int, Meta(ge=0, le=65535, description="Port to listen on; 0 takes a free one and prints it.")] = 8080
    processes: Annotated[
        int,
        Meta(
            ge=1,
            le=128,
            description="Router processes that share the port and tell each other what they carry: about one for each core that engines "
            "leave free. More than one needs Linux.",
        ),
    ] = 1
    api_key: Annotated[
        tuple[str, ...],
        Meta(
            description="A key that clients must give, `KEY` or `NAME:KEY`. Repeatable. Without any, nobody is asked. "
            "Rather than on a command line, which others can see, give keys in the environment or in `api_keys_file`.",
            extra={"secret": True},
        ),
    ] = ()
    api_keys_file: Annotated[
        Text | None, Meta(description="File of such keys, one to a line; read again when it changes, and on SIGHUP.")
    ] = None
    tls_cert: Annotated[
        Text | None,
        Meta(description="PEM file of the certificate and its chain to serve HTTPS with; read again when it changes, and on SIGHUP."),
    ] = None
    tls_key: Annotated[Text | None, Meta(description="PEM file of its key, where that is not in `tls_cert` too.")] = None
    admin_token: Annotated[
        Token | None,
        Meta(
            description="Opens the admin API, and is what its callers must give. Better in the environment or in `admin_token_file`.",
            extra={"secret": True},
        ),
    ] = None
    admin_token_file: Annotated[
        Text | None, Meta(description="File that holds the admin token; read again when it changes, and on SIGHUP.")
    ] = None
    admin_host: Annotated[str, Meta(min_length=1, description="Address that the admin API listens on.")] = "127.0.0.1"
    admin_port: Annotated[int, Meta(ge=0, le=65535, description="Port of the admin API; 0 takes a free one and prints it.")] = 8081
    nats: NatsUrl = None
    nats_user: NatsUser = None
    nats_password: NatsPassword = None
    nats_token: NatsToken = None
    nats_creds: NatsCreds = None
    nats_nkey: NatsNkey = None
    nats_ca: NatsCa = None
    nats_cert: NatsCert = None
    nats_key: NatsKey = None
    namespace: Annotated[
        str,
        Meta(
            pattern=r"^[A-Za-z0-9_-]+$",
            description="First part of every subject on the bus: routers that share it share what they know.",
        ),
    ] = "commutator"
    policy: Annotated[
        str,
        Meta(
            min_length=1,
            description="How an engine is chosen: `kv`, `blocks`, `threshold`, `round-robin`, `random`, `least-loaded`, `power-of-two`, "
            "`session`, or a class of your own, `module:Class`.",
        ),
    ] = "kv"
    tokenizer: Annotated[
        str | None, Meta(description="Folder or hub name of tokenizer files, for engines whose own answer is not usable here.")
    ] = None
    router_temperature: Annotated[
        Weight, Meta(description="Above 0, engines are drawn with odds by cost instead of always taking the cheapest.")
    ] = 0.0
    blocks: BlocksSettings = BlocksSettings()
    admission: AdmissionSettings = AdmissionSettings()
    disagg: Annotated[
        Mode,
        Meta(
            description="When a decode engine's prompt is computed by a prefill engine: `measured` (when that has been faster for all whom it "
            "concerns, transfer included), `always`, `never`, or `static` (when what it has not cached is long, as Dynamo decides it).",
        ),
    ] = Mode.MEASURED
    eff_isl_threshold: Annotated[
        int,
        Meta(
            ge=0,
            description="With `--disagg static`: prompt tokens not cached where it decodes, from which on it goes to a prefill engine.",
        ),
    ] = 2048
    eff_isl_ratio_threshold: Annotated[float, Meta(ge=0, le=1, description="The same as a share of the prompt; either is enough.")] = 0.7
    without_prefill: Annotated[
        Literal["fallback", "enforce"],
        Meta(
            description="When no prefill engine is usable, decode engines compute prompts themselves (`fallback`), or the answer is 503 (`enforce`)."
        ),
    ] = "fallback"
    kv_transfer_timeout_s: Annotated[
        Seconds, Meta(description="Time from a prompt's being computed to a stream's first token on the decode engine.")
    ] = 60.0
    kv_lease_s: Annotated[
        Seconds,
        Meta(
            description="Time that vLLM prefill engines keep KV that nobody fetches (NIXL's `kv_lease_duration`): the router lets no handshake grow "
            "older than two thirds of it."
        ),
    ] = 30.0
    predicted_ttl_s: Annotated[
        Seconds, Meta(description="How long a prompt sent to an engine without usable KV events is believed to be cached there.")
    ] = 120.0
    index_max_blocks: Annotated[
        int,
        Meta(
            ge=1,
            description="Distinct cached blocks known at most, for each of device, host and disk; 10 to 100 bytes each. Further ones look "
            "uncached, and are counted in `router_index_refused_total`.",
        ),
    ] = 20_000_000
    session_header: Annotated[
        str, Meta(min_length=1, description="Header that names a client's session; the body's `user` is used without it.")
    ] = "x-session-id"
    connect_timeout_s: Annotated[Seconds, Meta(description="Time to connect to an engine.")] = 5.0
    response_head_timeout_s: Annotated[Seconds, Meta(description="Time from the request to the engine's status line.")] = 600.0
    stream_idle_timeout_s: Annotated[Seconds, Meta(description="Longest silence within an engine's answer.")] = 300.0
    resume: Annotated[
        int,
        Meta(
            ge=0,
            description="How often a text stream may go on on another engine when its own has failed, where that is exact; 0: never. "
            "Its engines are then asked for token ids, which costs time for each piece.",
        ),
    ] = 0
    forward_tokens: Annotated[
        bool,
        Meta(
            description="Give engines the token ids of a prompt, where they were made here and agree with the engine's own, so that it need not "
            "render and tokenize it again."
        ),
    ] = False
    client_stall_timeout_s: Annotated[Seconds, Meta(description="Longest time a client may take nothing of its answer.")] = 300.0
    max_body_bytes: Annotated[int, Meta(ge=1, description="Largest request body; larger ones are answered 413.")] = 64 << 20
    grace_period_s: Annotated[Weight, Meta(description="How long requests in flight may go on after SIGTERM or Ctrl-C.")] = 30.0
    probe_period_s: Annotated[Seconds, Meta(description="Time between two looks at each engine.")] = 2.0
    probe_timeout_s: Annotated[Seconds, Meta(description="Time an engine has to answer a look.")] = 5.0
    blind_after_s: Annotated[
        Seconds, Meta(description="An engine that has served prompts this long without publishing a KV event is called blind.")
    ] = 5.0
    otlp_endpoint: Annotated[
        Text | None,
        Meta(
            description="OpenTelemetry collector that is told the spans of sampled traces, `http://HOST:4318` (OTLP over HTTP). "
            "Needs `pip install 'commutator[otel]'`."
        ),
    ] = None
    trace_ratio: Annotated[
        float, Meta(ge=0, le=1, description="Share of requests in no trace of their clients' that begin one here; without it, none do.")
    ] = 0.0
    log_level: Annotated[LogLevel, Meta(description="Least severity that is logged.")] = "info"
    log_format: Annotated[LogFormat, Meta(description="`auto` is text on a terminal and JSON lines elsewhere.")] = "auto"

    def check(self, given: frozenset[str]) -> Iterator[Complaint]:
        """What is wrong in combination; `given` holds the keys that somebody set."""
        if not self.engine and not self.has_admin and not self.discover.used:
            yield Complaint("engine", "no engine is named; name at least one: --engine http://HOST:PORT")
        for url, count in Counter(spec.url for spec in self.engine).items():
            if count > 1:
                yield Complaint("engine", f"{url} is named {count} times")
        yield from complaints(self, given)
        yield from sources.complaints(self.discover, given, nats=self.nats)
        if self.processes > 1 and not SHARES_PORTS:
            yield Complaint("processes", "more than one needs Linux, which alone spreads connections over processes that share a port")
        try:
            read_keys(self.api_key, "item")
        except BadKeys as error:
            yield Complaint("api_key", f"({error})")  # in brackets: what follows `api-key:` is taken for a key, and masked
        if self.admin_token is not None and self.admin_token_file is not None:
            yield Complaint("admin_token_file", "`admin_token` is given too; there is one admin token")
        if self.has_admin and self.admin_port == self.port != 0:
            yield Complaint("admin_port", f"{self.admin_port} is `port` too; the admin API has a port of its own")
        if self.otlp_endpoint is not None and not self.otlp_endpoint.startswith(("http://", "https://")):
            yield Complaint("otlp_endpoint", f"{self.otlp_endpoint!r} must begin with http:// or https://; a collector has 4318 for HTTP")
        if ":" not in self.policy and self.policy not in CACHE_BLIND | CACHE_AWARE:
            names = ", ".join(sorted(CACHE_BLIND | CACHE_AWARE))
            yield Complaint("policy", f"{self.policy!r} is unknown: expected one of {names}, or a class of yours as module:Class")
        yield from self._without_effect(given)

    @property
    def has_admin(self) -> bool:
        """Whether there is an admin API: only where somebody has given a token for it."""
        return self.admin_token is not None or self.admin_token_file is not None

    @property
    def asks_for_keys(self) -> bool:
        """Whether clients must give a key."""
        return bool(self.api_key) or self.api_keys_file is not None

    def _without_effect(self, given: frozenset[str]) -> Iterator[Complaint]:
        for key in sorted(given):
            if key.startswith("blocks.") and self.policy != "blocks":
                yield Complaint(key, f"has no effect with policy {self.policy!r}; only 'blocks' reads it")
            elif key in ("admin_host", "admin_port") and not self.has_admin:
                yield Complaint(key, "has no effect without admin_token or admin_token_file: there is no admin API then")
            elif key.startswith("eff_isl_") and self.disagg is not Mode.STATIC:
                yield Complaint(key, f"has no effect with --disagg {self.disagg}; only 'static' reads it")
            elif key == "trace_ratio" and self.otlp_endpoint is None:
                yield Complaint(key, "has no effect without otlp_endpoint")
            elif key == "without_prefill" and self.without_prefill == "enforce" and self.disagg is Mode.NEVER:
                yield Complaint(key, "'enforce' forbids decode engines to compute prompts, and --disagg never leaves all prompts to them")
            elif key == "tls_key" and self.tls_cert is None:
                yield Complaint(key, "has no effect without tls_cert")
            elif key in ("predicted_ttl_s", "tokenizer", "forward_tokens") and self.policy in CACHE_BLIND:
                yield Complaint(key, f"has no effect with policy {self.policy!r}, which does not look at the cache")
            elif key == "session_header" and self.policy in CACHE_BLIND - {"session"} | CACHE_AWARE:
                yield Complaint(key, f"has no effect with policy {self.policy!r}; 'session' and policies of your own read it")
