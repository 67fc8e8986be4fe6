"""What does a prompt that was sent twice say of each precondition of a cache hit? Pure: a Trial in, findings out.

What one fault makes look wrong elsewhere is not told: an engine that caches nothing has nothing to publish.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from engines.types import EngineKind
from router.doctor.findings import Finding, ok, unknown, warning, wrong
from router.doctor.trial import Trial

KV_EVENTS: Final = (
    '--kv-events-config \'{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:5557","replay_endpoint":"tcp://*:5558"}\''
)
REPORTING: Final = {EngineKind.VLLM: "--enable-prompt-tokens-details", EngineKind.SGLANG: "--enable-cache-report"}
CACHING: Final = {
    EngineKind.VLLM: "start it without --no-enable-prefix-caching",
    EngineKind.SGLANG: "start it without --disable-radix-cache",
}


def judged(trial: Trial) -> list[Finding]:
    """A line for each precondition."""
    return [_cache(trial), _usage(trial), _events(trial), *_replay(trial), _block_size(trial)]


def _subject(trial: Trial) -> str:
    return trial.info.id + (f"#{trial.rank}" if trial.info.pins_rank else "")


def _cache(trial: Trial) -> Finding:
    subject, first, second = _subject(trial), trial.first, trial.second
    took = f"first token after {second.ttft_s * 1e3:.0f} ms, {first.ttft_s * 1e3:.0f} ms the first time"
    if trial.cached:
        return ok("cache", subject, f"{trial.cached} of {len(trial.ids)} prompt tokens were cached the second time; {took}")
    if trial.second.cached_tokens is None and trial.hits is None:
        return unknown("cache", subject, f"it says nowhere what it had cached; {took}")
    told = f"it had nothing cached of a prompt of {len(trial.ids)} tokens that it had computed a moment before"
    held = trial.heard.blocks_of(trial.ids) if trial.heard is not None else {}
    if trial.heard is not None and any(name in trial.heard.removed for names in held.values() for name in names):
        mend = "more memory for its KV cache (vLLM: --gpu-memory-utilization, SGLang: --mem-fraction-static), more engines, or fewer requests at once"
        return wrong("cache", subject, f"{told}: its blocks were evicted before they could be used again", mend)
    if len(trial.ids) <= (trial.info.block_size or 0):
        return wrong(
            "cache",
            subject,
            f"{told}: one block of {trial.info.block_size} tokens is longer than that",
            "start it with a smaller block size",
        )
    return wrong("cache", subject, told, CACHING[trial.info.kind])


def _usage(trial: Trial) -> Finding:
    subject = _subject(trial)
    if trial.second.cached_tokens is not None:
        return ok("usage", subject, "it says in its answers how much of a prompt was cached")
    if not trial.cached:  # engines leave the number out where it is 0
        return unknown("usage", subject, "with nothing cached there was nothing to say")
    mend = f"start it with {REPORTING[trial.info.kind]}, so that wrong beliefs are noticed"
    return wrong("usage", subject, "it does not say in its answers how much of a prompt was cached", mend)


def _events(trial: Trial) -> Finding:
    subject, source, heard = _subject(trial), trial.source, trial.heard
    if source is None:
        return wrong("events", subject, f"it publishes no KV events: {trial.info.no_kv_events}", f"start it with {KV_EVENTS}")
    if source.bind or heard is None:
        return unknown(
            "events", subject, f"it connects to whoever listens at {source.events}; only the router can tell whether events come"
        )
    mend = "is the address right, and open from here? give kv-events=tcp://HOST:PORT where the engine's own word is not"
    if not heard.listening:
        return wrong("events", subject, f"nobody publishes at {source.events}: {heard.down or 'no answer'}", mend)
    blocks = heard.blocks_of(trial.ids)
    if blocks:
        lag = f" after {min(heard.lags_s) * 1e3:.0f} ms at best" if heard.lags_s else ""
        return ok("events", subject, f"{len(blocks)} blocks of a prompt were announced at {source.events}{lag}")
    if trial.other_topic:
        return wrong(
            "events", subject, f"its events do not come under the topic {source.topic!r}, but under another one", "mend kv-topic=…"
        )
    if not trial.cached:
        return unknown("events", subject, "it caches nothing, so there was nothing to announce")
    if heard.skipped:
        reasons = ", ".join(f"{reason} × {count}" for reason, count in heard.skipped.items())
        return wrong(
            "events", subject, f"its events cannot be used: {reasons}", "the model's layers, or the engine's version, are not supported"
        )
    other = " (those of other prompts do)" if heard.batches else ""
    return wrong(
        "events", subject, f"it caches prompts, and their events do not come at {source.events}{other}", f"{mend}; restart the engine"
    )


def _replay(trial: Trial) -> Iterator[Finding]:
    source, subject = trial.source, _subject(trial)
    if source is None or source.bind or trial.heard is None or not trial.heard.listening:
        return
    if source.replay is None:
        told = "it keeps no events: what it holds is unknown to a router that starts after it, and what is lost stays lost"
        yield warning("replay", subject, told, "add replay_endpoint to its --kv-events-config")
    elif trial.replay_unanswered:
        yield wrong("replay", subject, f"nobody answers at {source.replay}", "is the port open from here? give kv-replay=tcp://HOST:PORT")
    else:
        yield ok("replay", subject, f"what was missed can be had at {source.replay}")


def _block_size(trial: Trial) -> Finding:
    info, subject = trial.info, _subject(trial)
    told = {stored.block_size for stored in trial.heard.stored} if trial.heard is not None else set()
    sizes = told or ({info.block_size} if info.block_size is not None else set())
    size = ", ".join(str(one) for one in sorted(sizes))
    if info.spec.block_size is not None and sizes and sizes != {info.spec.block_size}:
        return wrong(
            "block-size",
            subject,
            f"its blocks have {size} tokens, and it is configured with block-size={info.spec.block_size}",
            "leave block-size out: it is learned",
        )
    if not sizes:
        return unknown("block-size", subject, "it does not say how long its blocks are, and announced none")
    if len(trial.ids) < 2 * max(sizes):
        return warning(
            "block-size",
            subject,
            f"its blocks have {size} tokens: shorter prompts are never reused",
            "a smaller block size, if its model allows",
        )
    return ok("block-size", subject, f"its blocks have {size} tokens")
