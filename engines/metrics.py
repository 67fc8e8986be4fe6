"""How loaded does an engine say it is? The few series of a Prometheus page that routing reads.

    vllm:num_requests_running{engine="0",model_name="tiny"} 3.0   ──▶   {0: EngineLoad(running=3, …)}

A page has thousands of lines and is read every probe period for every engine, so lines are picked by name before anything is
parsed. What is not there is None, never 0: an engine that stopped reporting must not look idle.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Annotated

import msgspec

from engines.answers import read_json, whole
from engines.types import EngineKind


class EngineWork(msgspec.Struct, frozen=True):
    """What one rank of a decode engine has done since it started."""

    computed: int
    """Prompt tokens that it computed itself."""
    fetched: int
    """Prompt tokens whose KV another engine handed to it."""
    steps: int = 0
    """Tokens generated, less the first of each sequence."""
    steps_s: float = 0.0
    """The times between them."""


class EngineLoad(msgspec.Struct, frozen=True):
    """What one rank last reported; None is unknown."""

    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None
    """0..1."""
    asleep: bool | None = None
    """Its weights are not loaded; vLLM alone can sleep."""
    work: EngineWork | None = None
    """Only asked of decode engines."""


class CacheConfig(msgspec.Struct, frozen=True):
    """vLLM's `cache_config_info` of one rank."""

    block_size: int | None = None
    """Tokens per published block: of the full-attention group where the engine tells it apart (a hybrid model picks it at boot)."""
    total_blocks: int | None = None
    dtype: str = ""
    """How the cache is stored; `auto` is as the weights are."""


Sample = tuple[Mapping[str, str], float]
_Count = Annotated[int, msgspec.Meta(ge=0)]

_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')
_ESCAPE = re.compile(r"\\(.)")
_NAMES: Mapping[EngineKind, tuple[str, tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {
    # kind: the label that holds the rank; running; waiting; KV usage (newest name first)
    EngineKind.VLLM: (
        "engine",
        ("vllm:num_requests_running",),
        ("vllm:num_requests_waiting",),
        ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    ),
    EngineKind.SGLANG: ("dp_rank", ("sglang:num_running_reqs",), ("sglang:num_queue_reqs",), ("sglang:token_usage",)),
}


def samples(text: str, name: str) -> Iterator[Sample]:
    """Every sample of exactly this series; lines that cannot be read are skipped."""
    at = text.find(name)
    while at >= 0:
        after = at + len(name)
        if (at == 0 or text[at - 1] == "\n") and text[after : after + 1] in {"{", " "}:
            end = text.find("\n", after)
            sample = _parse(text[after : end if end >= 0 else len(text)])
            if sample is not None:
                yield sample
        at = text.find(name, after)


def read_load(kind: EngineKind, text: str) -> dict[int, EngineLoad]:
    """What each rank reports on this page; a rank that reports none of the three is absent."""
    label, running, waiting, usage = _NAMES[kind]
    asleep = _asleep(text) if kind is EngineKind.VLLM else {}
    by_rank: dict[int, dict[str, float]] = {}
    for field, names in (("running", running), ("waiting", waiting), ("kv_usage", usage)):
        for rank, value in _by_rank(text, label, names):
            values = by_rank.setdefault(rank, {})
            # Tensor-parallel processes of one rank may each report; they agree but for the moment they were asked.
            values[field] = max(values.get(field, 0.0), value)
    return {rank: _load(values, asleep=asleep.get(rank)) for rank, values in sorted(by_rank.items())}


def read_work(text: str) -> dict[int, EngineWork]:
    """What each rank of vLLM has done, by its page; empty where this version does not tell where its prompts' KV came from."""
    counted: dict[int, dict[str, float]] = {}
    for labels, value in samples(text, "vllm:prompt_tokens_by_source_total"):
        _add(counted, labels, labels.get("source", ""), value)
    for name in ("count", "sum"):
        for labels, value in samples(text, f"vllm:inter_token_latency_seconds_{name}"):
            _add(counted, labels, name, value)
    return {
        rank: EngineWork(
            round(values["local_compute"]), round(values["external_kv_transfer"]), round(values.get("count", 0)), values.get("sum", 0.0)
        )
        for rank, values in counted.items()
        if "local_compute" in values and "external_kv_transfer" in values
    }


def read_loads(answer: bytes) -> dict[int, EngineLoad]:
    """The same from SGLang's `/v1/loads`, which is there without `--enable-metrics`."""
    answered = read_json(answer, _Loads)
    loads = answered.loads if answered is not None else []
    return {one.dp_rank: EngineLoad(one.num_running_reqs, one.num_waiting_reqs, one.token_usage) for one in loads}


def read_load_stat(message: bytes) -> EngineLoad | None:
    """One rank's report on SGLang's feed; None when it is none. Fields added at its end are passed over."""
    try:
        stat = _STAT.decode(message)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    return EngineLoad(stat.running, stat.waiting, min(1.0, stat.tokens / stat.most_tokens) if stat.most_tokens else None)


def read_cache_config(text: str) -> dict[int, CacheConfig]:
    """Each rank's cache layout, from vLLM's page."""
    found = {}
    for labels, _ in samples(text, "vllm:cache_config_info"):
        rank = whole(labels.get("engine", "0"))
        if rank is not None:
            size = whole(labels.get("effective_attention_block_size")) or whole(labels.get("block_size"))
            found[rank] = CacheConfig(size, whole(labels.get("num_gpu_blocks")), labels.get("cache_dtype", ""))
    return dict(sorted(found.items()))


def read_boot(text: str) -> float | None:
    """When the process that serves this page started, in seconds since the epoch."""
    return next((value for _, value in samples(text, "process_start_time_seconds") if math.isfinite(value)), None)


class _Rank(msgspec.Struct):
    dp_rank: int = 0
    num_running_reqs: int | None = None
    num_waiting_reqs: int | None = None
    token_usage: float | None = None


class _Loads(msgspec.Struct):
    loads: list[_Rank]


class _LoadStat(msgspec.Struct, array_like=True, tag="LoadStat", gc=False):
    running: _Count
    waiting: _Count
    tokens: _Count
    most_tokens: _Count
    """0 when the engine does not know."""


_STAT = msgspec.msgpack.Decoder(_LoadStat)


def _by_rank(text: str, label: str, names: tuple[str, ...]) -> Iterator[tuple[int, float]]:
    for name in names:
        found = [
            (rank, value)
            for labels, value in samples(text, name)
            if (rank := whole(labels.get(label, "0"))) is not None and math.isfinite(value)
        ]
        if found:
            yield from found
            return


def _add(counted: dict[int, dict[str, float]], labels: Mapping[str, str], name: str, value: float) -> None:
    """Add a sample to what its rank has; a rank may serve several models, each counted apart."""
    rank = whole(labels.get("engine", "0"))
    if rank is not None and math.isfinite(value):
        values = counted.setdefault(rank, {})
        values[name] = values.get(name, 0.0) + value


def _asleep(text: str) -> dict[int, bool]:
    """By rank; empty where the version does not tell. Level 0 (paused, nothing offloaded) shows only in that it is not awake."""
    states = samples(text, "vllm:engine_sleep_state")
    return {
        rank: value == 0
        for labels, value in states
        if labels.get("sleep_state") == "awake" and (rank := whole(labels.get("engine", "0"))) is not None
    }


def _load(values: Mapping[str, float], *, asleep: bool | None) -> EngineLoad:
    running, waiting = values.get("running"), values.get("waiting")
    return EngineLoad(
        running=None if running is None else round(running),
        waiting=None if waiting is None else round(waiting),
        kv_usage=values.get("kv_usage"),
        asleep=asleep,
    )


def _parse(rest: str) -> Sample | None:
    """A line after its name: `{a="b"} 1.0`, ` 1.0`, each with an optional timestamp."""
    labels: dict[str, str] = {}
    if rest.startswith("{"):
        at = 1
        while match := _LABEL.match(rest, at):
            labels[match[1]] = _ESCAPE.sub(lambda escaped: "\n" if escaped[1] == "n" else escaped[1], match[2])
            at = match.end()
            while rest[at : at + 1] in {",", " "}:
                at += 1
        if rest[at : at + 1] != "}":
            return None
        rest = rest[at + 1 :]
    fields = rest.split()
    if not fields:
        return None
    try:
        return labels, float(fields[0])
    except ValueError:
        return None
