"""What does an engine's metrics page say? The series a router reads, under the names of vLLM 0.32 and SGLang 0.5."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from engines.simulator.scheduler import Scheduler
from engines.types import EngineKind

_FINISH_REASONS = ("stop", "length", "abort", "error", "repetition")


class Series(msgspec.Struct, frozen=True):
    """One sample of one metric."""

    name: str
    value: float
    labels: Mapping[str, str] = {}
    kind: str = "gauge"


def page(scheduler: Scheduler, kind: EngineKind, model: str, *, started: float, asleep: bool) -> str:
    """The page in Prometheus' text format."""
    series = _vllm(scheduler, model, started=started, asleep=asleep) if kind is EngineKind.VLLM else _sglang(scheduler, model)
    lines: list[str] = []
    declared = ""
    for sample in series:
        if sample.name != declared:
            declared = sample.name
            lines.append(f"# TYPE {sample.name} {sample.kind}")
        labels = ",".join(f'{key}="{value}"' for key, value in sample.labels.items())
        lines.append(f"{sample.name}{{{labels}}} {sample.value!r}" if labels else f"{sample.name} {sample.value!r}")
    return "\n".join(lines) + "\n"


def _vllm(scheduler: Scheduler, model: str, *, started: float, asleep: bool) -> Iterator[Series]:
    cache, counters = scheduler.cache, scheduler.counters
    labels = {"engine": "0", "model_name": model}
    yield Series("process_start_time_seconds", started)
    yield Series("vllm:num_requests_running", float(len(scheduler.running)), labels)
    yield Series("vllm:num_requests_waiting", float(len(scheduler.waiting)), labels)
    for state in ("awake", "weights_offloaded", "discard_all"):
        on = state == ("weights_offloaded" if asleep else "awake")
        yield Series("vllm:engine_sleep_state", float(on), {**labels, "sleep_state": state})
    yield Series("vllm:kv_cache_usage_perc", cache.used / cache.capacity, labels)
    yield Series("vllm:prefix_cache_queries_total", float(counters.queries), labels, "counter")
    yield Series("vllm:prefix_cache_hits_total", float(counters.hits), labels, "counter")
    yield Series("vllm:num_preemptions_total", float(counters.preemptions), labels, "counter")
    yield Series("vllm:prompt_tokens_total", float(counters.queries), labels, "counter")
    yield Series("vllm:generation_tokens_total", float(counters.generated), labels, "counter")
    finished = {**counters.finished, "abort": counters.aborted}
    for reason in _FINISH_REASONS:
        yield Series("vllm:request_success_total", float(finished.get(reason, 0)), {**labels, "finished_reason": reason}, "counter")
    yield Series(
        "vllm:cache_config_info",
        1.0,
        {
            "block_size": str(cache.block_size),
            "effective_attention_block_size": str(cache.block_size),
            "enable_prefix_caching": "True",
            "engine": "0",
            "hash_block_size": "None",
            "kv_cache_size_tokens": str(cache.capacity * cache.block_size),
            "num_gpu_blocks": str(cache.capacity),
            "prefix_caching_hash_algo": "sha256",
        },
    )


def _sglang(scheduler: Scheduler, model: str) -> Iterator[Series]:
    cache, counters = scheduler.cache, scheduler.counters
    labels = {"engine_type": "unified", "model_name": model}
    total = cache.capacity * cache.block_size
    used = cache.used * cache.block_size
    yield Series("sglang:num_running_reqs", float(len(scheduler.running)), labels)
    yield Series("sglang:num_queue_reqs", float(len(scheduler.waiting)), labels)
    yield Series("sglang:token_usage", used / total, labels)
    yield Series("sglang:kv_used_tokens", float(used), labels)
    yield Series("sglang:max_total_num_tokens", float(total), labels)
    yield Series("sglang:page_size", float(cache.block_size), labels)
    yield Series("sglang:cached_tokens_total", float(counters.hits), {**labels, "cache_source": "device"}, "counter")
    yield Series("sglang:prompt_tokens_total", float(counters.queries), labels, "counter")
    yield Series("sglang:generation_tokens_total", float(counters.generated), labels, "counter")
