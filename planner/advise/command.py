"""What does `commutator advise` do? It reads the model, makes the estimate and prints it, with everything that was assumed."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from engines.kv_bytes import kv_shape_of
from engines.links import parse_link
from engines.model_config import read_model
from engines.model_fields import Fields
from planner.advise.estimate import Question, estimate
from planner.advise.files import find_model
from planner.advise.gpus import GPUS, MEMORY_UTILISATION
from planner.advise.report import Advice, as_json, as_text, assumptions
from planner.advise.settings import AdviseSettings
from planner.advise.timing import Hardware, Work
from planner.advise.weights import bytes_per_parameter, count


async def run(settings: AdviseSettings) -> None:
    """Print the advice. Raises ModelNotFound and ModelConfigError."""
    assert settings.model is not None  # noqa: S101  its own check
    name, config = await asyncio.to_thread(find_model, settings.model)
    advice = advise(name, config, settings)
    sys.stdout.write((as_json(advice) if settings.json else as_text(advice)) + "\n")


def advise(name: str, config: dict[str, Any], settings: AdviseSettings) -> Advice:
    """The advice on a model, by its `config.json`'s object. Raises ModelConfigError, naming the field that is missing."""
    assert settings.prompt_tokens is not None and settings.link is not None  # noqa: S101, PT018  its own check
    model = read_model(config)
    kv = kv_shape_of(model, config, kv_dtype=settings.kv_dtype, tensor_parallel=settings.tensor_parallel)
    work = Work(model, count(model, bytes_per_parameter(Fields(config))), kv)
    gpu = GPUS[settings.gpu]
    question = Question(
        prompt_tokens=settings.prompt_tokens,
        output_tokens=settings.output_tokens,
        streams=settings.concurrency,
        link=parse_link(settings.link),
        hardware=Hardware(
            flops=gpu.flops * settings.utilisation * settings.tensor_parallel,
            bytes_per_s=gpu.bytes_per_s * MEMORY_UTILISATION * settings.tensor_parallel,
        ),
        batched_tokens=settings.max_num_batched_tokens if settings.chunked_prefill else None,
        prefill_tokens_per_s=settings.prefill_tokens_per_s,
        decode_step_s=None if settings.decode_step_ms is None else settings.decode_step_ms / 1e3,
    )
    return Advice(name, question, work, estimate(work, question), tuple(assumptions(settings, question, work)))
