"""What can `commutator advise` be asked? One frozen struct: its options."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import msgspec
from msgspec import Meta

from discovery.config import Complaint
from engines.kv_bytes import KvDtype
from engines.links import UnknownLink, parse_link
from planner.advise.gpus import UTILISATION, GpuName

Text = Annotated[str, Meta(min_length=1)]
Positive = Annotated[float, Meta(gt=0)]
Tokens = Annotated[int, Meta(ge=1, le=1_000_000_000)]


class AdviseSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Does prefill/decode disaggregation pay for this model, prompt length and link? An estimate, with what it rests on."""

    model: Annotated[
        Text | None,
        Meta(description="A model's `config.json`, the folder it is in, or the name of a model that is known here, such as `Qwen3-32B`."),
    ] = None
    prompt_tokens: Annotated[Tokens | None, Meta(description="Tokens of a prompt that no cache spares the engine.")] = None
    output_tokens: Annotated[Tokens, Meta(description="Tokens of an answer.")] = 256
    concurrency: Annotated[int, Meta(ge=0, le=1_000_000, description="Streams that an engine decodes at once.")] = 16
    link: Annotated[
        Text | None,
        Meta(
            description="What the KV cache is carried over, from engine to engine: a name (`1GbE` to `800GbE`, `NVLink`, `PCIe5`, `NDR`, …; "
            "taken at 80 % of its nominal rate), or a rate as measured, such as `104MB/s`."
        ),
    ] = None
    kv_dtype: Annotated[KvDtype, Meta(description="Type of the KV cache, the engines' `--kv-cache-dtype`; `auto` is the model's own.")] = (
        "auto"
    )
    gpu: Annotated[GpuName, Meta(description="The engines' GPU.")] = "H100"
    tensor_parallel: Annotated[int, Meta(ge=1, le=1024, description="GPUs of one engine.")] = 1
    utilisation: Annotated[float, Meta(gt=0, le=1, description="Share of the GPU's dense bf16 peak that a prefill reaches.")] = UTILISATION
    prefill_tokens_per_s: Annotated[
        Positive | None, Meta(description="How fast one engine prefills prompts of this length, as measured; estimated without it.")
    ] = None
    decode_step_ms: Annotated[
        Positive | None, Meta(description="Time of a decode step (ITL) at this concurrency, as measured; estimated without it.")
    ] = None
    chunked_prefill: Annotated[
        bool,
        Meta(
            description="Prefill in chunks that share steps with decoding, as vLLM does. SGLang does not unless told to "
            "(`--enable-mixed-chunk`): its streams wait for the whole prefill."
        ),
    ] = True
    max_num_batched_tokens: Annotated[int, Meta(ge=1, description="Tokens of one step, prefill and decode together.")] = 8192
    json: Annotated[bool, Meta(description="Print one JSON object instead of text.")] = False

    def check(self, given: frozenset[str]) -> Iterator[Complaint]:
        """What is missing, and what is wrong in combination; `given` holds the keys that somebody set."""
        if self.model is None:
            yield Complaint("model", "a model is needed: --model FILE, FOLDER or NAME")
        if self.prompt_tokens is None:
            yield Complaint("prompt_tokens", "the length of a prompt is needed: --prompt-tokens N")
        if self.link is None:
            yield Complaint("link", "a link is needed: --link 100GbE, or as measured: --link 104MB/s")
        else:
            try:
                parse_link(self.link)
            except UnknownLink as error:
                yield Complaint("link", str(error))
        if self.chunked_prefill and self.max_num_batched_tokens <= self.concurrency:
            message = f"{self.max_num_batched_tokens} leaves no room for a prefill beside {self.concurrency} streams (concurrency)"
            yield Complaint("max_num_batched_tokens", message)
        if "max_num_batched_tokens" in given and not self.chunked_prefill:
            yield Complaint("max_num_batched_tokens", "has no effect without chunked_prefill")
        if "utilisation" in given and self.prefill_tokens_per_s is not None:
            yield Complaint("utilisation", "has no effect with prefill_tokens_per_s, which is measured")
        if "gpu" in given and self.prefill_tokens_per_s is not None and self.decode_step_ms is not None:
            yield Complaint("gpu", "has no effect with prefill_tokens_per_s and decode_step_ms, which are measured")
