"""What is behind this URL, and is it still there?

    /version ──▶ vLLM?    ──▶ /v1/models /metrics /kv_event_sources ──┐
       no: /server_info ──▶ SGLang? ──▶ /ready /v1/models /v1/loads ──┴─▶ EngineInfo
       no: NotAnEngine, saying what answered instead

Only asks; what the answers mean is in `engines.vllm` and `engines.sglang`. What the user wrote in the spec goes before what the
engine says, except for the block size, where the engine knows better.
"""

from __future__ import annotations

import asyncio

import msgspec

from engines import metrics, sglang, vllm
from engines.client import EngineClient, Reply, excerpt
from engines.errors import EngineAnswered, EngineBroken, EngineNotReady, EngineTimeout, EngineUnreachable, NotAnEngine
from engines.handover import BadHandshake, engine_ids
from engines.metrics import EngineLoad
from engines.types import Connector, EngineInfo, EngineKind, EngineSpec, KvSource, Model, Role
from engines.urls import at_rank, host_of, reachable
from engines.zmtp import socket_type

_NAMES = {EngineKind.VLLM: "vLLM", EngineKind.SGLANG: "SGLang"}
_ZMTP_TIMEOUT_S = 1.0
_GATEWAY_ERRORS = frozenset({502, 503, 504})


class Look(msgspec.Struct, frozen=True):
    """A running engine, looked at again."""

    info: EngineInfo
    load: dict[int, EngineLoad]
    """Empty when the engine did not say."""


async def probe(client: EngineClient, spec: EngineSpec) -> EngineInfo:
    """The engine behind the client's URL, as its own answers describe it.

    Raises `EngineUnreachable`, `EngineTimeout` or `EngineClosed` when nothing answers, `EngineNotReady` when an engine (or what
    stands before it) says that it does not serve yet, `NotAnEngine` when something else answers, and `EngineAnswered` when
    the engine refuses a question it must answer (its API key is missing).
    """
    try:
        version = await client.ask(vllm.VERSION)
        found = vllm.recognise(version.body) if version.ok else None
        if found is not None:
            models = await client.ask(vllm.MODELS)
            owners = vllm.owners(models.body) if models.ok else frozenset()
            if not models.ok or not owners or "vllm" in owners:
                return await _vllm(client, spec, found, models)
        info = await client.ask(sglang.SERVER_INFO)
        told = await client.ask(sglang.OLD_SERVER_INFO) if info.status == 404 else info
        server = sglang.recognise(told.body) if told.ok else None
        if server is not None:
            return await _sglang(client, spec, server)
    except EngineBroken as error:
        raise NotAnEngine(f"{error}; expected vLLM or SGLang") from error
    raise _unknown(version, info)


async def alive(client: EngineClient, info: EngineInfo) -> bool:
    """Whether the engine says that it serves; asked where the answer costs it nothing.

    Raises `EngineUnreachable`, `EngineTimeout`, `EngineClosed` or `EngineBroken` when it says nothing.
    """
    match info.kind:
        case EngineKind.VLLM:
            return await client.status(vllm.ALIVE) == 200
        case EngineKind.SGLANG:
            return await _sglang_ready(client) == 200


async def look(client: EngineClient, info: EngineInfo, *, known: dict[int, EngineLoad] | None = None) -> Look:
    """What may have changed while the engine ran: its models (adapters come and go), its load, its role, the start of its process.

    `known`: its load, where it has pushed that just now and need not be asked. A question that is not answered with a 2xx leaves the
    models as they were and the load unknown. Raises as `alive` does.
    """
    models, load, boot, role = info.models, known or {}, info.boot, info.role
    if info.load_path is not None and not known:
        reply = await client.ask(info.load_path)
        if reply.ok and info.load_path == sglang.LOADS:
            load = metrics.read_loads(reply.body)
        elif reply.ok:
            text = reply.body.decode(errors="replace")
            load, boot = metrics.read_load(info.kind, text), metrics.read_boot(text) or boot
            if info.role is Role.DECODE and info.kind is EngineKind.VLLM:
                work = metrics.read_work(text)
                load = {rank: msgspec.structs.replace(one, work=work.get(rank)) for rank, one in load.items()}
    reply = await client.ask(vllm.MODELS)
    listed = vllm.read_models(reply.body) if reply.ok else None
    if listed is not None and not same_models(listed, models):
        models = listed
    if role is not Role.AGGREGATED and info.kind is EngineKind.SGLANG:
        reply = await client.ask(sglang.MODEL_INFO)
        role = (sglang.read_role(reply.body) if reply.ok else None) or role
    return Look(info=msgspec.structs.replace(info, models=models, boot=boot, role=role), load=load)


def same_models(one: tuple[Model, ...], other: tuple[Model, ...]) -> bool:
    """Whether two answers name the same models; cards are not compared (vLLM draws ids and times anew in every answer)."""
    return _names(one) == _names(other)


def describe(info: EngineInfo) -> str:
    """The engine in one line, as `serve` prints it."""
    models = ", ".join(model.id if model.parent is None else f"{model.id} (on {model.parent})" for model in info.models) or "no models"
    size = "block size unknown" if info.block_size is None else f"block size {info.block_size}"
    if info.spec.block_size not in {None, info.block_size}:
        size += f" (configured as {info.spec.block_size})"
    blocks = "" if info.total_blocks is None else f", {info.total_blocks} blocks"
    ranks = f"rank{'s' if info.pins_rank else ''} {', '.join(map(str, info.ranks))}"
    events = "; ".join(map(_describe_source, info.kv_sources)) or f"publishes no KV events: {info.no_kv_events}"
    if info.load_sources:
        load = f"; load {', '.join(source.events for source in info.load_sources)}"
    else:
        load = "" if info.load_path is not None else "; reports no load"
    transfer = "" if info.role is Role.AGGREGATED else f"; {info.role}, hands KV over by {info.connector}"
    return (
        f"{info.id} is {_NAMES[info.kind]} {info.version}: {models}; {size}{blocks}; {ranks}; {events}; "
        f"tokenizer {info.tokenizer or 'unknown'}{load}{transfer}"
    )


async def _vllm(client: EngineClient, spec: EngineSpec, version: str, listed: Reply) -> EngineInfo:
    if not listed.ok:
        raise _refused(listed)
    models = vllm.read_models(listed.body)
    if models is None:
        raise NotAnEngine(f"answered {vllm.VERSION} as vLLM {version} does, but {vllm.MODELS} with {excerpt(listed.body)!r}")
    if await client.status(vllm.ALIVE) != 200:
        raise EngineNotReady(f"vLLM {version} does not answer 200 at {vllm.ALIVE}")
    page = await client.ask(vllm.METRICS)
    text = page.body.decode(errors="replace") if page.ok else ""
    caches = metrics.read_cache_config(text)
    told = await client.ask(vllm.KV_EVENT_SOURCES)
    sources = vllm.read_kv_sources(told.body, host_of(client.url)) if told.ok else ()
    sources = tuple(await asyncio.gather(*map(_settled, sources)))
    if told.ok:
        why = "it was started without --kv-events-config"
    else:
        why = f"vLLM {version} does not say where ({told.status} at {vllm.KV_EVENT_SOURCES}, which came with 0.31); give kv-events"
    role, connector = spec.role or Role.AGGREGATED, _vllm_connector(spec)
    if connector is Connector.ROOMS:
        raise EngineNotReady(f"vLLM {version} does not hand KV over by rooms: give connector=nixl or connector=mooncake")
    if unused := _without_effect(spec, role):
        raise EngineNotReady(f"{unused} has no effect without a role, which vLLM {version} does not tell: add role=prefill or role=decode")
    ranks = tuple(source.rank for source in sources) or tuple(caches) or (0,)
    cache = caches.get(ranks[0], metrics.CacheConfig())
    sources = _as_given(spec, client.url, sources, ranks)
    return EngineInfo(
        id=client.url,
        spec=spec,
        kind=EngineKind.VLLM,
        version=version,
        models=models,
        ranks=ranks,
        block_size=cache.block_size or spec.block_size,
        total_blocks=cache.total_blocks,
        kv_sources=sources,
        tokenizer=spec.tokenizer or vllm.weights_of(models),
        chats_take_ids=vllm.chats_take_ids(version),
        texts_take_ids=True,
        load_path=vllm.METRICS if page.ok else None,  # one page without load is no reason never to look again
        no_kv_events="" if sources else why,
        role=role,
        connector=connector,
        bootstrap=spec.bootstrap,
        transfer_ids=await _transfer_ids(client, spec, version, ranks)
        if connector is Connector.MOONCAKE and spec.role is Role.PREFILL
        else (),
        kv_dtype=cache.dtype,
        boot=metrics.read_boot(text),
    )


def _vllm_connector(spec: EngineSpec) -> Connector | None:
    """How it hands KV over. vLLM does not say, except in development mode, in an answer that takes seconds."""
    if spec.role in {None, Role.AGGREGATED}:
        return None
    return spec.connector or (Connector.NIXL if spec.bootstrap is None else Connector.MOONCAKE)


def _without_effect(spec: EngineSpec, role: Role) -> str:
    """What the user wrote about handing KV over that an engine with this role has no use for; empty when there is nothing."""
    given = {"connector": spec.connector, "bootstrap": spec.bootstrap, "link": spec.link, "group": spec.group or None}
    useless = {Role.AGGREGATED: tuple(given), Role.DECODE: ("bootstrap",)}.get(role, ())
    return ", ".join(name for name in useless if given[name] is not None)


async def _transfer_ids(client: EngineClient, spec: EngineSpec, version: str, ranks: tuple[int, ...]) -> tuple[tuple[int, str], ...]:
    if spec.bootstrap is None:
        raise EngineNotReady(
            f"vLLM {version} prefills for Mooncake and does not say where its bootstrap server is: give bootstrap=http://HOST:PORT"
        )
    try:
        told = await client.elsewhere(spec.bootstrap).ask(vllm.TRANSFER_IDS)
        if not told.ok:
            raise told.refusal()
        ids = engine_ids(told.body)
    except (EngineUnreachable, EngineTimeout, EngineAnswered, BadHandshake) as error:
        raise EngineNotReady(f"its bootstrap server {spec.bootstrap}: {error}") from error
    if unknown := [rank for rank in ranks if rank not in ids]:
        raise EngineNotReady(f"its bootstrap server {spec.bootstrap} does not know rank {unknown[0]} yet")
    return tuple(sorted(ids.items()))


async def _sglang(client: EngineClient, spec: EngineSpec, server: sglang.ServerInfo) -> EngineInfo:
    ready = await _sglang_ready(client)
    if ready != 200 or sglang.starting(server):
        raise EngineNotReady(f"SGLang {server.version} is not ready ({ready}, status {server.status!r})")
    listed = await client.ask(sglang.MODELS)
    if not listed.ok:
        raise _refused(listed)
    models = vllm.read_models(listed.body)
    if models is None:
        raise NotAnEngine(f"answered {sglang.SERVER_INFO} as SGLang does, but {sglang.MODELS} with {excerpt(listed.body)!r}")
    role = sglang.role(server)
    if spec.role not in {None, role}:
        raise EngineNotReady(
            f"SGLang {server.version} was started with --disaggregation-mode {server.disaggregation_mode}, not {spec.role}"
        )
    started = f"--disaggregation-mode {role}" if role is not Role.AGGREGATED else "no --disaggregation-mode"
    if spec.connector not in {None, Connector.ROOMS}:
        raise EngineNotReady(f"SGLang {server.version} does not hand KV over by {spec.connector}: leave connector out")
    if unused := _without_effect(spec, role):
        raise EngineNotReady(f"{unused} has no effect: SGLang {server.version} was started with {started}")
    ranks = sglang.ranks(server)
    sources = _as_given(spec, client.url, sglang.read_kv_sources(server, host_of(client.url)), ranks)
    return EngineInfo(
        id=client.url,
        spec=spec,
        kind=EngineKind.SGLANG,
        version=server.version,
        models=models,
        ranks=ranks,
        block_size=sglang.block_size(server) or spec.block_size,
        total_blocks=sglang.total_blocks(server),
        host_blocks=sglang.host_blocks(server),
        kv_sources=sources,
        tokenizer=spec.tokenizer or server.tokenizer_path,
        chats_take_ids=sglang.chats_take_ids(server),
        texts_take_ids=sglang.texts_take_ids(server),
        max_num_batched_tokens=sglang.max_batched_tokens(server),
        load_path=await _sglang_load_path(client),
        load_sources=sglang.read_load_sources(server, host_of(client.url)),
        no_kv_events="" if sources else "it was started without --kv-events-config (or with another publisher than zmq over tcp)",
        role=role,
        connector=None if role is Role.AGGREGATED else Connector.ROOMS,
        bootstrap=spec.bootstrap or sglang.bootstrap(server, host_of(client.url)),
        kv_dtype=sglang.kv_dtype(server),
    )


async def _sglang_ready(client: EngineClient) -> int:
    status = await client.status(sglang.READY)
    return await client.status(sglang.MODEL_INFO) if status == 404 else status


async def _sglang_load_path(client: EngineClient) -> str | None:
    loads = await client.ask(sglang.LOADS)
    if loads.ok and metrics.read_loads(loads.body):
        return sglang.LOADS
    page = await client.ask(sglang.METRICS)
    offered = page.ok and metrics.read_load(EngineKind.SGLANG, page.body.decode(errors="replace"))
    return sglang.METRICS if offered else None


async def _settled(source: KvSource) -> KvSource:
    """The source with `bind` as it is: an engine configured as `tcp://*:0` reports the address it bound, as if it connected there."""
    if source.bind and await socket_type(source.events, timeout_s=_ZMTP_TIMEOUT_S) in {"PUB", "XPUB"}:
        return msgspec.structs.replace(source, bind=False)
    return source


def _as_given(spec: EngineSpec, url: str, told: tuple[KvSource, ...], ranks: tuple[int, ...]) -> tuple[KvSource, ...]:
    """The user's addresses in place of the engine's, each rank at its port + r; what was not given stays as the engine says."""
    if spec.kv_events is None and spec.kv_replay is None and not spec.kv_topic:
        return told
    by_rank, host = {source.rank: source for source in told}, host_of(url)
    found = []
    for rank in ranks:
        source = by_rank.get(rank)
        if spec.kv_events is not None:
            events, bind = at_rank(reachable(spec.kv_events, host), rank), False
        elif source is not None:
            events, bind = source.events, source.bind
        else:
            continue
        replay = None if spec.kv_replay is None else at_rank(reachable(spec.kv_replay, host), rank)
        found.append(
            KvSource(
                rank=rank,
                events=events,
                replay=replay or (source.replay if source is not None else None),
                topic=spec.kv_topic or (source.topic if source is not None else ""),
                bind=bind,
            )
        )
    return tuple(found)


def _describe_source(source: KvSource) -> str:
    how = " (we bind, the engine connects)" if source.bind else ""
    replay = f"replay {source.replay}" if source.replay is not None else "no replay"
    return f"KV events {source.events}{how}, {replay}"


def _names(models: tuple[Model, ...]) -> list[tuple[str, str | None, str | None, int | None]]:
    return [(model.id, model.root, model.parent, model.max_model_len) for model in models]


def _refused(reply: Reply) -> EngineNotReady | EngineAnswered:
    return EngineNotReady(str(reply.refusal())) if reply.status in _GATEWAY_ERRORS else reply.refusal()


def _unknown(version: Reply, info: Reply) -> NotAnEngine | EngineNotReady | EngineAnswered:
    for reply in (version, info):
        if reply.status in {401, 403}:
            return reply.refusal()
    if version.status in _GATEWAY_ERRORS or info.status in _GATEWAY_ERRORS:
        return EngineNotReady(str((version if version.status in _GATEWAY_ERRORS else info).refusal()))
    who = version.server or info.server or "something"
    words = excerpt(version.body) or excerpt(info.body)
    return NotAnEngine(
        f"{who} answered {version.status} at {version.path} and {info.status} at {info.path}"
        f"{f' ({words!r})' if words else ''}; expected vLLM ({vllm.VERSION}) or SGLang ({sglang.SERVER_INFO})"
    )
