"""What can a simulated engine be told to be? One frozen struct: the options of `commutator simulate`."""

from __future__ import annotations

import enum
from typing import Annotated

import msgspec
from msgspec import Meta

from engines.types import EngineKind, Role


class Connector(enum.StrEnum):
    """How two vLLM engines hand KV over."""

    NIXL = "nixl"
    """The decode engine reads it, by the handle that the prefill engine's answer has."""
    MOONCAKE = "mooncake"
    """The prefill engine sends it, under an id that both have been given."""


class LoadFailurePolicy(enum.StrEnum):
    """What a vLLM decode engine does when it cannot have the KV it was told to fetch."""

    FAIL = "fail"
    RECOMPUTE = "recompute"


class SimulateSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Simulated engines: how many, where, and how fast and roomy each one is."""

    engines: Annotated[int, Meta(ge=1, description="How many engines to run.")] = 1
    host: Annotated[str, Meta(description="Address to listen on.")] = "127.0.0.1"
    port: Annotated[
        int, Meta(ge=0, le=65535, description="Port of the first engine; the others follow. 0 lets the kernel choose each.")
    ] = 9000
    kind: Annotated[EngineKind, Meta(description="Whose protocol to speak.")] = EngineKind.VLLM
    model: Annotated[
        str, Meta(description="Folder with tokenizer.json, tokenizer_config.json and config.json; empty for the shipped one.")
    ] = ""
    served_model_name: Annotated[
        str, Meta(description="Name the model is served under; several, separated by commas, name the same one.")
    ] = "sim"
    kv_blocks: Annotated[int, Meta(ge=1, description="Blocks of KV cache.")] = 1024
    block_size: Annotated[int, Meta(ge=1, description="Tokens per block.")] = 16
    prefill_tokens_per_s: Annotated[float, Meta(gt=0, description="Prompt tokens computed per second.")] = 20_000.0
    decode_step_ms: Annotated[float, Meta(ge=0, description="Time of one decode step, however few sequences it serves.")] = 5.0
    decode_sequence_ms: Annotated[float, Meta(ge=0, description="Time each sequence adds to a decode step.")] = 0.1
    step_ms: Annotated[float, Meta(ge=0, description="Time of every step, whatever it computes.")] = 0.0
    kv_token_ns: Annotated[float, Meta(ge=0, description="Time each token adds to a step that its sequences have in the KV cache.")] = 0.0
    max_num_seqs: Annotated[int, Meta(ge=1, description="Sequences running at once; further ones wait.")] = 256
    max_num_batched_tokens: Annotated[int, Meta(ge=1, description="Tokens computed in one step, prefill and decode together.")] = 8192
    speedup: Annotated[float, Meta(ge=0, description="How much faster than the clock the engine's time runs; 0 waits for nothing.")] = 1.0
    output_tokens: Annotated[
        int, Meta(ge=1, description="Tokens generated for a request that names no limit; it then stops by itself.")
    ] = 128
    kv_events: Annotated[bool, Meta(description="Publish KV cache events.")] = True
    kv_topic: Annotated[str, Meta(description="Topic frame of the KV events.")] = ""
    kv_replay_batches: Annotated[int, Meta(ge=1, description="Batches of KV events kept for replay.")] = 10_000
    load_feed: Annotated[bool, Meta(description="Push load reports, as SGLang does when told to; vLLM cannot.")] = False
    prompt_tokens_details: Annotated[bool, Meta(description="Report cached tokens in usage, as vLLM does when told to.")] = True
    require_key: Annotated[str, Meta(description="Bearer token wanted on every path; empty asks for none.", extra={"secret": True})] = ""
    seed: Annotated[int, Meta(ge=0, description="Seed of the generated text; equal seeds and prompts give equal text.")] = 0
    hash_seed: Annotated[
        int,
        Meta(ge=0, description="Root of the block hashes a vLLM engine publishes; engine i of several uses hash_seed + i."),
    ] = 0
    role: Annotated[Role, Meta(description="Part of a request to take on: all of it, or the prompt, or what follows it.")] = Role.AGGREGATED
    connector: Annotated[Connector, Meta(description="How a vLLM engine that has a role hands KV over; SGLang has a way of its own.")] = (
        Connector.NIXL
    )
    kv_transfer_port: Annotated[
        int,
        Meta(
            ge=0,
            le=65535,
            description="Port where other engines ask for KV: NIXL's side channel, or the bootstrap server of Mooncake or SGLang. Those of several "
            "engines follow. 0 lets the kernel choose each.",
        ),
    ] = 0
    kv_bytes_per_token: Annotated[int, Meta(ge=1, description="Bytes of KV that one token takes on the way to another engine.")] = 131_072
    link_bytes_per_s: Annotated[
        float, Meta(gt=0, description="Bytes per second that leave a prefill engine, shared by the transfers under way.")
    ] = 12.5e9
    kv_lease_s: Annotated[
        float,
        Meta(
            ge=0,
            description="How long a prefill engine keeps KV that is not fetched, and a decode engine waits for KV that is not sent; seconds of the clock. "
            "0 for what the real ones do: 30 (NIXL), 480 (Mooncake), 300 (SGLang).",
        ),
    ] = 0.0
    kv_load_failure_policy: Annotated[
        LoadFailurePolicy,
        Meta(description="What a vLLM decode engine does when it cannot fetch KV: fail the request, or compute the prompt itself."),
    ] = LoadFailurePolicy.FAIL
    allow_faults: Annotated[bool, Meta(description="Let anyone who reaches the port cause faults by POST /_sim/faults.")] = False

    @property
    def model_names(self) -> tuple[str, ...]:
        """The names the model is served under, the first one being its own."""
        return tuple(name for name in (part.strip() for part in self.served_model_name.split(",")) if name)
