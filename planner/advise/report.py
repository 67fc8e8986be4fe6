"""How is the advice told? As text for people, or as one JSON object for programs; both with everything that was assumed."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Final

import msgspec

from planner.advise.estimate import EVEN, Estimate, Question, parameters, rate, seconds, size
from planner.advise.gpus import GPUS, MEMORY_UTILISATION
from planner.advise.settings import AdviseSettings
from planner.advise.timing import Work

WIDTH: Final = 110


class Advice(msgspec.Struct, frozen=True):
    """The answer, what it answers, and what it rests on."""

    model: str
    question: Question
    work: Work
    estimate: Estimate
    assumptions: tuple[str, ...]


def as_json(advice: Advice) -> str:
    """One object; its fields are told in docs/advise.md."""
    question, weights = advice.question, advice.work.weights
    asked = {
        "model": advice.model,
        "prompt_tokens": question.prompt_tokens,
        "output_tokens": question.output_tokens,
        "concurrency": question.streams,
        "link": question.link.name,
        "parameters": weights.total,
        "active_parameters": weights.active + weights.head,
    }
    return msgspec.json.encode(asked | msgspec.structs.asdict(advice.estimate) | {"assumptions": advice.assumptions}).decode()


def as_text(advice: Advice) -> str:
    """Some lines: the question, the numbers, the verdict with its reasons, the assumptions."""
    return "\n".join(_lines(advice))


def _lines(advice: Advice) -> Iterator[str]:
    question, found, weights = advice.question, advice.estimate, advice.work.weights
    routed = f", {parameters(weights.active + weights.head)} of them for a token" if weights.routed else ""
    yield f"{advice.model} ({parameters(weights.total)} parameters{routed})"
    yield (
        f"{question.prompt_tokens:,} prompt tokens, {question.output_tokens:,} output tokens, "
        f"{question.streams:,} streams decoding, {question.link.name}"
    )
    yield ""
    rows = {
        "KV cache": f"{found.kv_bytes_per_token:,} bytes a token ({found.kv_bytes_per_token / 1024:.4g} KiB), {size(found.kv_bytes)} a prompt",
        "transfer": f"{seconds(found.transfer_s)} at {rate(found.link_bytes_per_s)}",
        "prefill": f"{seconds(found.prefill_s)} alone; {seconds(found.local_prefill_s)} where streams are decoded",
        "decode step": seconds(found.decode_step_s),
        "interference": f"{seconds(found.delay_per_stream_s)} for each stream, {seconds(found.interference_s)} for all {question.streams:,}",
        "to keep up": f"{found.prefill_engines:.3g} prefill engines for each decode engine, {rate(found.needed_bytes_per_s)} over its link",
        "remote": f"{seconds(found.remote_s)} = {seconds(found.prefill_s)} prefill + {seconds(found.transfer_s)} transfer",
        "local": f"{seconds(found.local_s)} = {seconds(found.local_prefill_s)} prefill + {seconds(found.interference_s)} interference",
    }
    width = max(map(len, rows)) + 2
    for name, text in rows.items():
        yield f"{name:<{width}}{text}"
    yield ""
    yield from textwrap.wrap(f"Disaggregation {found.verdict}: {'; '.join(found.reasons)}.", WIDTH)
    yield ""
    yield "Assumed:"
    for text in advice.assumptions:
        yield from textwrap.wrap(text, WIDTH, initial_indent="- ", subsequent_indent="  ")


def assumptions(settings: AdviseSettings, question: Question, work: Work) -> Iterator[str]:
    """Everything that was taken for granted, a line each."""
    yield from work.kv.notes
    link = question.link
    taken = "as given" if link.efficiency == 1 else f"{link.efficiency:.0%} of its nominal {rate(link.bytes_per_s / link.efficiency)}"
    yield f"the link carries {rate(link.bytes_per_s)} to this engine alone: {taken}"
    yield "the transfer begins when the prefill has ended, and carries the whole prompt's KV cache: none of it is at the decode engine"
    gpu, ranks = GPUS[settings.gpu], settings.tensor_parallel
    each = f"{ranks} × {settings.gpu}" if ranks > 1 else settings.gpu
    if settings.prefill_tokens_per_s is None:
        peak = f"{settings.utilisation:.0%} of {gpu.flops / 1e12:,.0f} TFLOPS, dense bf16 ({gpu.source}), whatever type the weights have"
        yield f"a prefill computes on {each} at {peak}"
    else:
        yield f"a prefill takes {settings.prefill_tokens_per_s:g} tokens/s, as given"
    if settings.decode_step_ms is None:
        memory = f"{MEMORY_UTILISATION:.0%} of {gpu.bytes_per_s / 1e12:.3g} TB/s"
        weights = f"the weights ({work.weights.bytes_per_parameter:.3g} bytes each)"
        yield f"a decode step reads {weights} and the streams' KV caches on {each} at {memory}"
    else:
        yield f"a decode step takes {settings.decode_step_ms:g} ms, as given"
    if question.batched_tokens is None:
        yield "a local prefill goes first: every stream waits for all of it"
    else:
        yield f"a local prefill shares steps of {question.batched_tokens:,} tokens with the streams (chunked prefill)"
    yield f"the streams hold {question.prompt_tokens + question.output_tokens // 2:,} tokens each: a prompt and half an answer"
    yield "seconds of all requests count alike; queues, the handshake and a second request's way are not counted"
    yield f"about even is a difference of less than {EVEN:.0%}"
