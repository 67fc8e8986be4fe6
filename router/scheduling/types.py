"""The nouns of choosing. A policy is a plain class with one method, `score`: lower wins.

    request + candidates ──filter──▶ eligible ──Policy.score──▶ costs ──pick──▶ Decision

Everything a policy may look at is in these values; nothing here has a clock, a socket or a random source of its own.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec

from discovery.signal import LIVE, Signal
from engines.types import Endpoint


class RoutingRequest(msgspec.Struct, frozen=True):
    """What routing knows of a request."""

    model: str
    prompt_tokens: int = 0
    """0 when the prompt could not be tokenized; `untokenizable` then says why."""
    untokenizable: str = ""
    session: str | None = None
    """The session header's value, else the body's `user`."""


class Overlap(msgspec.Struct, frozen=True):
    """How many of the prompt's leading blocks an endpoint already has. Blocks are the endpoint's own size.

    `device`, `host` and `disk` follow one another: a block is counted once, in its fastest tier. `in_flight` is the length of
    the leading run that is cached on the device *or* is part of a request being served there now, so it is ≥ `device`.
    """

    device: int = 0
    host: int = 0
    disk: int = 0
    in_flight: int = 0
    predicted: bool = False
    """From what was sent there, not from events: the signal is not live."""


class Load(msgspec.Struct, frozen=True):
    """What this router has in flight on an endpoint, and what the endpoint itself last reported."""

    active_requests: int = 0
    active_prefill_tokens: int = 0
    """Uncached prompt tokens of requests whose first token has not come yet."""
    active_blocks: int = 0
    """Distinct blocks of the requests in flight."""
    last_assigned: int = 0
    """Ordinal of the latest request sent here; 0 when none was. The smallest is the longest unassigned."""
    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None
    """0..1, as the endpoint reports it."""
    prefill_done: float = 0.0
    """Of `active_prefill_tokens`, those that should have been computed by now, at its pace."""
    unknown_tokens: float = 0.0
    """Prompt tokens that the endpoint has waiting beyond those known here, estimated from its own report."""
    s_per_token: float | None = None
    """Its pace: seconds for each prompt token it computes, as learned; None until it is."""
    busy: float = 0.0
    """Share of the last minute in which it had prompts to compute, 0..1."""
    generated_tokens: float = 0.0
    """Tokens of the answers in flight so far, estimated from the pace at which they come."""
    residence_s: float = 0.0
    """How long answers take there from the first token to the last, of late; 0 until one has."""
    computing: int = 0
    """Of `active_requests`, those of this router whose first token is still to come."""


class Candidate(msgspec.Struct, frozen=True):
    """One endpoint as seen by one request."""

    endpoint: Endpoint
    block_size: int
    prompt_blocks: int
    """Full blocks of this prompt, in this endpoint's block size."""
    new_blocks: int
    """Of those, the ones not part of a request in flight here: what `load.active_blocks` would grow by."""
    overlap: Overlap = Overlap()
    load: Load = Load()
    signal: Signal = LIVE
    """Not looked up, and LIVE, for a policy with `uses_cache` False."""
    total_blocks: int | None = None
    """What its KV cache holds, where it says so."""


class Rejection(enum.StrEnum):
    """Why an endpoint was not scored. A closed list: metrics and dashboards rely on it."""

    EXCLUDED = "excluded"
    """Already tried for this request."""
    DRAINING = "draining"
    ASLEEP = "asleep"
    """Its weights are not loaded: somebody has put it to sleep."""
    EJECTED = "ejected"
    """Not healthy now."""
    COOLING = "cooling"
    """It answered 429 or 503 a moment ago."""
    SATURATED = "saturated"
    """It has as many requests of ours in flight as it may have."""
    PREFILLS = "only_prefills"
    """It computes prompts for others, and no other engine is there to answer."""
    NO_PARTNER = "no_prefill_engine"
    """It goes on from prompts computed elsewhere, and no engine can compute this one for it."""
    INDIVISIBLE = "cannot_be_shared"
    """It only goes on from prompts computed elsewhere, and this is no request that two engines can share."""


class Reason(enum.StrEnum):
    """Why the chosen endpoint won. A closed list: see `explain`."""

    KV = "kv"
    """The longest cached prefix, by events, decided."""
    IN_FLIGHT = "in_flight"
    """The prefix is being made there right now."""
    PREDICTED = "predicted"
    """The longest prefix by what was sent there: its signal is not live."""
    OUTWEIGHED = "load_outweighed"
    """Another endpoint has a longer prefix and more load."""
    NO_OVERLAP = "no_shared_prefix"
    SHORT = "below_one_block"
    BLIND = "blind"
    """Nothing is known of its cache: no events, and nothing sent there matches."""
    UNTOKENIZABLE = "untokenizable"
    POLICY = "policy"
    """The policy in use does not look at the cache."""
    SAMPLED = "sampled"
    """Another endpoint has a longer prefix and costs less; `router_temperature` drew this one all the same."""


class Context(msgspec.Struct, frozen=True):
    """What a policy may need besides the values: the time and a random source, both handed in."""

    now: float
    """Monotonic seconds."""
    rng: random.Random


class Policy(Protocol):
    """A routing policy: the whole interface.

    A policy may also have a bool attribute `uses_cache` (default: True): False tells the router that prompts need not be
    tokenized for it, and that `reason` is always `policy`.

    And it may have a method `explain(request, candidates, context)` that gives the parts of each cost, `{name: part}` for each
    candidate: they are shown to whoever asks why.
    """

    def score(self, request: RoutingRequest, candidates: Sequence[Candidate], context: Context) -> Sequence[float]:
        """Cost of each candidate, in their order; the lowest wins; of equals, the one longest without a request."""
        ...


class Scored(msgspec.Struct, frozen=True):
    """A candidate and its cost."""

    candidate: Candidate
    cost: float


def _no_parts() -> None:
    """For a decision made by hand."""


class Decision(msgspec.Struct, frozen=True):
    """Where a request goes, and everything needed to say why."""

    chosen: Candidate
    position: int
    """Of `chosen`, among the candidates."""
    cost: float
    reason: Reason
    policy: str
    candidates: Sequence[Candidate]
    costs: Sequence[float]
    """Of the candidates, in their order."""
    rejected: Sequence[tuple[Endpoint, Rejection]] = ()
    parts: Callable[[], Sequence[Mapping[str, float]] | None] = _no_parts
    """Gives what each cost is made of, where the policy tells: `{name: part}` for each candidate. Raises PolicyError."""

    @property
    def looked_at_caches(self) -> bool:
        """Whether the policy is one that does: else nobody asked for signals and overlaps."""
        return self.reason is not Reason.POLICY

    @property
    def scores(self) -> tuple[Scored, ...]:
        """Every candidate with its cost."""
        return tuple(map(Scored, self.candidates, self.costs))
