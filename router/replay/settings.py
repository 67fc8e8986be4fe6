"""What can be asked of `commutator replay`? One frozen struct: its options. `check` finds what is wrong only in combination."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from discovery.config import Complaint
from engines.links import UnknownLink, parse_link
from engines.virtual.models import MODELS, EngineModel
from router.disagg import Mode
from router.replay.generators import BLOCK_SIZE, GENERATORS
from router.replay.traces import TOKENS_PER_ID

MAX_SEEDS: Final = 5
"""Jitters of a load near saturation, where nobody has said how many."""
_UNEVEN: Final = re.compile(r"(\d+)x(\d+(?:\.\d+)?)")
_FAILURE: Final = re.compile(r"(\d+)@(\d+(?:\.\d+)?)(?:\+(\d+(?:\.\d+)?))?")

Text = Annotated[str, Meta(min_length=1)]
Positive = Annotated[float, Meta(gt=0)]
Whole = Annotated[int, Meta(ge=1)]
ModelName = Literal["8b-h100", "8b-a100", "8b-l4", "70b-4xh100", "32b-2xh200"]


class EngineSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What each engine is: a model of the table, and what of it is known better."""

    model: Annotated[ModelName, Meta(description="How fast and how roomy engines are: see docs/replay.md for the table.")] = "8b-h100"
    step_ms: Annotated[Positive | None, Meta(description="Time of every step, as measured; the model's without it. So it is below.")] = None
    prefill_token_us: Annotated[Positive | None, Meta(description="Time each prompt token adds to its step.")] = None
    decode_sequence_us: Annotated[
        Annotated[float, Meta(ge=0)] | None, Meta(description="Time each sequence adds to a step in which it decodes.")
    ] = None
    kv_token_ns: Annotated[
        Annotated[float, Meta(ge=0)] | None, Meta(description="Time each token adds to a step that its sequences have in the KV cache.")
    ] = None
    max_num_batched_tokens: Annotated[Whole | None, Meta(description="Tokens computed in one step, prefill and decode together.")] = None
    max_num_seqs: Annotated[Whole | None, Meta(description="Sequences running at once; further ones wait.")] = None
    kv_tokens: Annotated[Whole | None, Meta(description="Tokens that the KV cache holds.")] = None
    uneven: Annotated[
        str,
        Meta(
            pattern=r"^$|^\d+x\d+(\.\d+)?(,\d+x\d+(\.\d+)?)*$",
            description="So many engines at so many times the model's speed, as `2x0.333`; several with commas between them.",
        ),
    ] = ""

    def built(self) -> EngineModel:
        """The model."""
        base = MODELS[self.model]
        own: dict[str, float | int | None] = {
            "step_s": None if self.step_ms is None else self.step_ms / 1e3,
            "prefill_token_s": None if self.prefill_token_us is None else self.prefill_token_us / 1e6,
            "decode_sequence_s": None if self.decode_sequence_us is None else self.decode_sequence_us / 1e6,
            "kv_token_s": None if self.kv_token_ns is None else self.kv_token_ns / 1e9,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "max_num_seqs": self.max_num_seqs,
            "kv_tokens": self.kv_tokens,
        }
        return msgspec.structs.replace(base, **{name: value for name, value in own.items() if value is not None})

    def slower(self) -> list[float]:
        """The speeds of those that are not as the others."""
        return [float(speed) for count, speed in _UNEVEN.findall(self.uneven) for _ in range(int(count))]


class ReplaySettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What would these policies have done with that traffic? A trace, or generated traffic, in virtual time against a simulated fleet."""

    trace: Annotated[
        Text | None,
        Meta(
            description="A Mooncake trace (`.jsonl`), a table of your own requests (`.csv`), or generated traffic: "
            "`shared`, `chat`, `agents`, `bursts` or `unshared`.",
            extra={"positional": True},
        ),
    ] = None
    requests: Annotated[Whole | None, Meta(description="The first so many requests only; of generated traffic, 4000 without it.")] = None
    engines: Annotated[int, Meta(ge=1, le=4096, description="Engines in the fleet.")] = 8
    policies: Annotated[
        str,
        Meta(min_length=1, description="Policies to compare, with commas between them; `module:Class` for one of your own."),
    ] = "kv,round-robin"
    speed: Annotated[
        str,
        Meta(
            pattern=r"^\d+(\.\d+)?(,\d+(\.\d+)?)*$",
            description="How much faster than its own clock the traffic comes; several with commas between them.",
        ),
    ] = "1"
    jitter: Annotated[bool, Meta(description="Spread arrivals inside the steps of the trace's clock, which in Mooncake's is 3 s.")] = False
    seeds: Annotated[
        Whole | None,
        Meta(
            description="How many times, with other random numbers each; without it once, and with `--jitter` five times at a load near saturation."
        ),
    ] = None
    block_size: Annotated[
        Whole | None, Meta(description="Tokens per block of KV cache; a trace's own without it (512, Mooncake's), 64 for all else.")
    ] = None
    engine: EngineSettings = EngineSettings()
    prefill_engines: Annotated[
        int, Meta(ge=0, description="So many of the engines compute prompts, and the others go on from them; 0: every engine does both.")
    ] = 0
    link: Annotated[Text, Meta(description="What a prefill engine's KV cache is carried over: a name such as `100GbE`, or a rate.")] = (
        "100GbE"
    )
    kv_bytes_per_token: Annotated[Whole, Meta(description="Bytes of KV cache that a token takes on the way.")] = 131_072
    disagg: Annotated[Mode, Meta(description="When a prompt is computed by a prefill engine, as for `commutator serve`.")] = Mode.ALWAYS
    fail: Annotated[
        str,
        Meta(
            pattern=r"^$|^\d+@\d+(\.\d+)?(\+\d+(\.\d+)?)?(,\d+@\d+(\.\d+)?(\+\d+(\.\d+)?)?)*$",
            description="Engines that are killed: `3@600+60`, number 3 after 600 s, back with an empty cache 60 s later; several with commas.",
        ),
    ] = ""
    kv_events: Annotated[bool, Meta(description="Have engines publish KV events.")] = True
    event_delay_ms: Annotated[float, Meta(ge=0, description="Time from an engine's step to the router's index.")] = 5.0
    max_active_requests: Annotated[int, Meta(ge=1, description="Requests in flight on one engine; further ones wait in the router.")] = 4096
    max_waiting: Annotated[int, Meta(ge=0, description="Requests that may wait; further ones are turned away.")] = 1000
    max_wait_s: Annotated[Positive, Meta(description="How long a request may wait; then it is turned away.")] = 10.0
    router_temperature: Annotated[
        float, Meta(ge=0, description="Above 0, engines are drawn with odds by cost instead of always taking the cheapest.")
    ] = 0.0
    planner: Annotated[
        bool,
        Meta(
            description="Have the planner decide how many engines there are, up to four times `engines`, by the targets below; and say what it took."
        ),
    ] = False
    startup_s: Annotated[Positive, Meta(description="With the planner: time that an engine takes to start.")] = 60.0
    ttft_target_s: Annotated[Positive, Meta(description="Time to first token of a request that counts as good.")] = 2.0
    itl_target_ms: Annotated[Positive, Meta(description="Mean time between its tokens.")] = 50.0
    json: Annotated[Text | None, Meta(description="File to write every run to, as a JSON array; `-` for stdout, instead of the table.")] = (
        None
    )
    page: Annotated[
        Text | None, Meta(description="Folder to write plots of goodput and TTFT against load to, and a page that shows them.")
    ] = None

    def check(self, given: frozenset[str]) -> Iterator[Complaint]:
        """What is missing, and what is wrong in combination; `given` holds the keys that somebody set."""
        if self.trace is None:
            yield Complaint("trace", f"what to replay is needed: a .jsonl or .csv file, or one of {', '.join(GENERATORS)}")
        elif self.trace not in GENERATORS and not self.trace.endswith((".jsonl", ".csv")):
            yield Complaint("trace", f"{self.trace!r} is neither a .jsonl or .csv file nor one of {', '.join(GENERATORS)}")
        if min(self.speeds) <= 0:
            yield Complaint("speed", "must be more than 0")
        if not self.names:
            yield Complaint("policies", "names no policy")
        yield from self._check_engines()
        yield from self._check_blocks()
        yield from self._without_effect(given)

    def _check_engines(self) -> Iterator[Complaint]:
        if len(self.engine.slower()) > self.engines:
            yield Complaint("engine.uneven", f"names {len(self.engine.slower())} engines, of {self.engines} in all")
        if any(speed <= 0 for speed in self.engine.slower()):
            yield Complaint("engine.uneven", "an engine's speed must be more than 0")
        for number, _, _ in self.failures:
            if number >= self.engines:
                yield Complaint("fail", f"there is no engine {number}: they are numbered from 0 to {self.engines - 1}")
        if self.prefill_engines >= self.engines:
            yield Complaint("prefill_engines", "leaves no engine to go on from the prompts")
        try:
            parse_link(self.link)
        except UnknownLink as error:
            yield Complaint("link", str(error))

    def _without_effect(self, given: frozenset[str]) -> Iterator[Complaint]:
        if self.jitter and self.trace in GENERATORS:
            yield Complaint("jitter", "has no effect on generated traffic, whose times are exact")
        for key in ("link", "disagg", "kv_bytes_per_token"):
            if key in given and not self.prefill_engines:
                yield Complaint(key, "has no effect without prefill_engines")
        if "startup_s" in given and not self.planner:
            yield Complaint("startup_s", "has no effect without planner")
        if "event_delay_ms" in given and not self.kv_events:
            yield Complaint("event_delay_ms", "has no effect without kv_events")

    def _check_blocks(self) -> Iterator[Complaint]:
        size = self.blocks_of
        if self.trace is not None and self.trace.endswith(".jsonl") and TOKENS_PER_ID % size:
            yield Complaint("block_size", f"must divide {TOKENS_PER_ID}, the tokens that each hash id of the trace stands for")
        if self.engine.built().kv_tokens < size:
            yield Complaint("engine.kv_tokens", "holds no block")

    @property
    def speeds(self) -> tuple[float, ...]:
        """One or several."""
        return tuple(float(speed) for speed in self.speed.split(","))

    @property
    def names(self) -> tuple[str, ...]:
        """The policies."""
        return tuple(dict.fromkeys(name.strip() for name in self.policies.split(",") if name.strip()))

    @property
    def failures(self) -> tuple[tuple[int, float, float | None], ...]:
        """Engine, when, and how much later it is back."""
        return tuple((int(engine), float(at), float(back) if back else None) for engine, at, back in _FAILURE.findall(self.fail))

    @property
    def blocks_of(self) -> int:
        """Tokens per block."""
        if self.block_size is not None:
            return self.block_size
        return TOKENS_PER_ID if self.trace is not None and self.trace.endswith(".jsonl") else BLOCK_SIZE
