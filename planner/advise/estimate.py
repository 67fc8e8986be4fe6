"""Does it pay to prefill on another engine and carry the KV cache over, rather than prefill where the streams are decoded?

    remote = prefill + transfer                    the prompt waits for the link
    local  = prefill + streams · delay             each stream that is being decoded there falls behind by `delay`

Both are seconds that requests wait, added up over all of them: one waits for the transfer, or all the others for the prefill.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal

import msgspec

from engines.links import Link
from planner.advise.timing import Hardware, Local, Work, before, beside, steps_of

Verdict = Literal["pays", "does not pay", "about even"]

EVEN: Final = 0.1
"""Remote and local that differ by less than this share of the larger one are about even: the estimate is no better."""


class Question(msgspec.Struct, frozen=True):
    """What is asked, the model aside."""

    prompt_tokens: int
    output_tokens: int
    streams: int
    """Being decoded on an engine at once."""
    link: Link
    hardware: Hardware
    batched_tokens: int | None
    """Tokens of a step of chunked prefill; None where a prefill goes first."""
    prefill_tokens_per_s: float | None = None
    """As measured, in place of the estimate."""
    decode_step_s: float | None = None
    """As measured, in place of the estimate."""


class Estimate(msgspec.Struct, frozen=True):
    """The numbers: bytes, tokens and seconds."""

    kv_bytes_per_token: int
    """Of the layers whose cache grows with every token."""
    kv_bytes: int
    """Of the whole prompt."""
    transfer_s: float
    prefill_s: float
    """With nothing else going on, as on a prefill engine."""
    prefill_flops: float
    decode_step_s: float
    local_prefill_s: float
    """Among the streams."""
    chunks: int
    """Steps that the local prefill shares with the streams; 1 where it shares none."""
    delay_per_stream_s: float
    interference_s: float
    """Of all streams together: what a remote prefill saves them."""
    remote_s: float
    local_s: float
    link_bytes_per_s: float
    needed_bytes_per_s: float
    """What the link must carry for the engine to go on with as many streams: each ends after `output_tokens` steps, and a prompt follows."""
    prefill_engines: float
    """How many prefill engines it takes for that, for each decode engine."""
    verdict: Verdict
    reasons: tuple[str, ...]


def estimate(work: Work, question: Question) -> Estimate:
    """The answer to `question`. Raises ValueError where the streams leave no room in a step of chunked prefill."""
    tokens, streams = question.prompt_tokens, question.streams
    measured = question.prefill_tokens_per_s
    prefill_s = work.prefill_s(tokens, question.hardware) if measured is None else tokens / measured
    weights_s, caches_s = work.decode_step_s(streams, tokens + question.output_tokens // 2, question.hardware)
    if question.decode_step_s is not None:  # divided between weights and caches as estimated
        share = weights_s / (weights_s + caches_s)
        weights_s, caches_s = question.decode_step_s * share, question.decode_step_s * (1 - share)
    if not streams:
        local = Local(1, prefill_s, 0.0)
    elif question.batched_tokens is None:
        local = before(prefill_s)
    else:
        local = beside(prefill_s, weights_s, caches_s, steps_of(tokens, question.batched_tokens, streams))
    carried = work.kv.bytes(tokens)
    transfer_s = carried / question.link.bytes_per_s
    prompts_per_s = streams / (question.output_tokens * (weights_s + caches_s))  # Little's law
    needed = prompts_per_s * carried
    remote_s, local_s = prefill_s + transfer_s, local.prefill_s + streams * local.delay_s
    return Estimate(
        kv_bytes_per_token=work.kv.bytes_per_token,
        kv_bytes=carried,
        transfer_s=transfer_s,
        prefill_s=prefill_s,
        prefill_flops=work.flops(tokens),
        decode_step_s=weights_s + caches_s,
        local_prefill_s=local.prefill_s,
        chunks=local.steps,
        delay_per_stream_s=local.delay_s,
        interference_s=streams * local.delay_s,
        remote_s=remote_s,
        local_s=local_s,
        link_bytes_per_s=question.link.bytes_per_s,
        needed_bytes_per_s=needed,
        prefill_engines=prompts_per_s * prefill_s,
        verdict=_verdict(remote_s, local_s, saturated=needed > question.link.bytes_per_s),
        reasons=tuple(_reasons(question, local, transfer_s, prefill_s, needed)),
    )


def _verdict(remote_s: float, local_s: float, *, saturated: bool) -> Verdict:
    if saturated:
        return "does not pay"
    if abs(remote_s - local_s) < EVEN * max(remote_s, local_s):
        return "about even"
    return "pays" if remote_s < local_s else "does not pay"


def _reasons(question: Question, local: Local, transfer_s: float, prefill_s: float, needed: float) -> Iterator[str]:
    link = question.link
    yield f"the transfer takes {seconds(transfer_s)}, the prefill {seconds(prefill_s)}"
    if not question.streams:
        yield "nothing is being decoded that a local prefill could delay"
    elif local.delay_s == 0:
        yield "the prompt fits beside the streams' own steps: a local prefill delays none of them"
    else:
        yield (
            f"a local prefill delays each of {question.streams} streams by {seconds(local.delay_s)}, "
            f"together by {seconds(question.streams * local.delay_s)}"
        )
    if needed > link.bytes_per_s:
        yield (
            f"{question.streams} streams of {question.output_tokens} tokens ask for {rate(needed)} of prompts' KV, "
            f"and the link carries {rate(link.bytes_per_s)}, enough for {question.streams * link.bytes_per_s / needed:.2g} of them"
        )


def seconds(value: float) -> str:
    """A duration for people."""
    if value == 0 or value >= 1:
        return f"{value:,.3g} s" if value < 1000 else f"{value:,.0f} s"
    return f"{value * 1e3:.3g} ms" if value >= 1e-3 else f"{value * 1e6:.3g} µs"


def rate(value: float) -> str:
    """Bytes per second for people."""
    return f"{size(value)}/s"


def parameters(value: float) -> str:
    """A number of weights for people."""
    return f"{value / 1e9:.3g} billion" if value >= 1e9 else f"{value / 1e6:.3g} million"


def size(value: float) -> str:
    """Bytes for people, in powers of ten."""
    for power, unit in ((4, "TB"), (3, "GB"), (2, "MB"), (1, "kB")):
        if value >= 1000**power:
            return f"{value / 1000**power:.4g} {unit}"
    return f"{value:.0f} bytes"
