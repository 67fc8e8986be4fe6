"""What does an engine's metrics page say? The series a router reads, under the names of vLLM 0.32 and SGLang 0.5."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from engines.simulator.handover import Transfers
from engines.simulator.scheduler import Counters, Scheduler
from engines.types import EngineKind, Role

_FINISH_REASONS = ("stop", "length", "abort", "error", "repetition")


class Series(msgspec.Struct, frozen=True):
    """One sample of one metric."""

    name: str
    value: float
    labels: Mapping[str, str] = {}
    kind: str = "gauge"
    family: str = ""
    """The metric that it is a part of, where it is called otherwise."""


def page(scheduler: Scheduler, kind: EngineKind, model: str, *, started: float, asleep: bool, transfers: Transfers | None = None) -> str:
    """The page in Prometheus' text format."""
    series = (
        _vllm(scheduler, transfers, model, started=started, asleep=asleep)
        if kind is EngineKind.VLLM
        else _sglang(scheduler, transfers, model)
    )
    lines: list[str] = []
    declared = ""
    for sample in series:
        if (sample.family or sample.name) != declared:
            declared = sample.family or sample.name
            lines.append(f"# TYPE {declared} {sample.kind}")
        labels = ",".join(f'{key}="{value}"' for key, value in sample.labels.items())
        lines.append(f"{sample.name}{{{labels}}} {sample.value!r}" if labels else f"{sample.name} {sample.value!r}")
    return "\n".join(lines) + "\n"


def _vllm(scheduler: Scheduler, transfers: Transfers | None, model: str, *, started: float, asleep: bool) -> Iterator[Series]:
    cache, counters = scheduler.cache, scheduler.counters
    labels = {"engine": "0", "model_name": model}
    yield Series("process_start_time_seconds", started)
    yield Series("vllm:num_requests_running", float(len(scheduler.running)), labels)
    yield Series("vllm:num_requests_waiting", float(scheduler.queued), labels)
    for state in ("awake", "weights_offloaded", "discard_all"):
        on = state == ("weights_offloaded" if asleep else "awake")
        yield Series("vllm:engine_sleep_state", float(on), {**labels, "sleep_state": state})
    yield Series("vllm:kv_cache_usage_perc", cache.used / cache.capacity, labels)
    yield Series("vllm:prefix_cache_queries_total", float(counters.queries), labels, "counter")
    yield Series("vllm:prefix_cache_hits_total", float(counters.hits), labels, "counter")
    yield Series("vllm:num_preemptions_total", float(counters.preemptions), labels, "counter")
    yield Series("vllm:prompt_tokens_total", float(counters.queries), labels, "counter")
    yield from _sources(counters, labels)
    if transfers is not None:
        yield from _vllm_transfers(scheduler, transfers, labels)
    yield Series("vllm:generation_tokens_total", float(counters.generated), labels, "counter")
    yield from _histogram("vllm:inter_token_latency_seconds", counters.steps, counters.steps_s, labels)
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


def _sources(counters: Counters, labels: Mapping[str, str]) -> Iterator[Series]:
    """Where the prompts' KV came from."""
    computed = counters.queries - counters.hits - counters.fetched
    sources = {"local_compute": computed, "local_cache_hit": counters.hits, "external_kv_transfer": counters.fetched}
    for source, tokens in sources.items():
        yield Series("vllm:prompt_tokens_by_source_total", float(tokens), {**labels, "source": source}, "counter")


def _vllm_transfers(scheduler: Scheduler, transfers: Transfers, labels: Mapping[str, str]) -> Iterator[Series]:
    counters = scheduler.counters
    yield Series("vllm:external_prefix_cache_queries_total", float(counters.queries - counters.hits), labels, "counter")
    yield Series("vllm:external_prefix_cache_hits_total", float(counters.fetched), labels, "counter")
    to_fetch = sum(sequence.fetches for sequence in scheduler.waiting)
    stages = {"waiting_to_start": to_fetch, "in_progress": len(scheduler.fetching), "completed_waiting": 0}
    for stage, count in stages.items():
        yield Series("vllm:num_requests_kv_fetch_by_stage", float(count), {**labels, "stage": stage})
    if not transfers.counts_nixl:
        return
    yield from _histogram("vllm:nixl_xfer_time_seconds", transfers.transfers, transfers.seconds, labels)
    yield from _histogram("vllm:nixl_bytes_transferred", transfers.transfers, transfers.bytes, labels)
    yield from _histogram("vllm:nixl_num_descriptors", transfers.transfers, transfers.blocks, labels)
    totals = {
        "num_failed_transfers": transfers.failed,
        "num_failed_notifications": 0,
        "num_kv_expired_reqs": transfers.expired,
        "num_notifications_after_expiry": transfers.late,
    }
    for name, count in totals.items():
        yield Series(f"vllm:nixl_{name}_total", float(count), labels, "counter")


def _histogram(name: str, count: int, total: float, labels: Mapping[str, str]) -> Iterator[Series]:
    """A histogram of one bucket: how many there were, and their sum."""
    yield Series(f"{name}_bucket", float(count), {**labels, "le": "+Inf"}, "histogram", name)
    yield Series(f"{name}_count", float(count), labels, "histogram", name)
    yield Series(f"{name}_sum", float(total), labels, "histogram", name)


def _sglang(scheduler: Scheduler, transfers: Transfers | None, model: str) -> Iterator[Series]:
    cache, counters = scheduler.cache, scheduler.counters
    role = Role.AGGREGATED if transfers is None else transfers.role
    labels = {"engine_type": "unified" if role is Role.AGGREGATED else role.value, "model_name": model}
    total = cache.capacity * cache.block_size
    used = cache.used * cache.block_size
    yield Series("sglang:num_running_reqs", float(len(scheduler.running)), labels)
    yield Series("sglang:num_queue_reqs", float(_plain(scheduler)), labels)
    yield Series("sglang:token_usage", used / total, labels)
    yield Series("sglang:kv_used_tokens", float(used), labels)
    yield Series("sglang:max_total_num_tokens", float(total), labels)
    yield Series("sglang:page_size", float(cache.block_size), labels)
    yield Series("sglang:cached_tokens_total", float(counters.hits), {**labels, "cache_source": "device"}, "counter")
    yield Series("sglang:prompt_tokens_total", float(counters.queries), labels, "counter")
    yield Series("sglang:generation_tokens_total", float(counters.generated), labels, "counter")
    if transfers is not None:
        yield from _sglang_transfers(scheduler, transfers, labels)


def queues(scheduler: Scheduler, transfers: Transfers) -> dict[str, int]:
    """Requests of an SGLang engine that has a role, by what they wait for."""
    return {
        "prefill_bootstrap_queue_reqs": transfers.early,
        "prefill_inflight_queue_reqs": transfers.in_flight,
        "decode_prealloc_queue_reqs": len(scheduler.waiting) - _plain(scheduler),
        "decode_transfer_queue_reqs": len(scheduler.fetching),
    }


def _plain(scheduler: Scheduler) -> int:
    """Those that wait and have nothing to fetch."""
    return sum(not sequence.fetches for sequence in scheduler.waiting)


def _sglang_transfers(scheduler: Scheduler, transfers: Transfers, labels: Mapping[str, str]) -> Iterator[Series]:
    for name, count in queues(scheduler, transfers).items():
        yield Series(f"sglang:num_{name}", float(count), labels)
    yield from _histogram("sglang:kv_transfer_latency_ms", transfers.transfers, transfers.seconds * 1000, labels)
    yield from _histogram("sglang:kv_transfer_total_mb", transfers.transfers, transfers.bytes / 1_000_000, labels)
    yield Series("sglang:num_transfer_failed_reqs_total", float(transfers.failed), labels, "counter")
