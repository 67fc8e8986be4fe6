"""How do two real engines hand KV to each other? One computes prompts, the other goes on from them; the KV goes over the loopback interface.

    with Pair(pairs.NIXL, folder) as pair:
        pair.prefill.url, pair.decode.url    # the engines, with the same model, block size and flags as those that stand alone
        pair.bootstrap                       # where the prefill engine is asked for its side of the transfer

Each setting that is not obvious has its reason beside it.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Self

import msgspec

from engines.launch.plan import Ports
from engines.launch.programs import Program as Launched
from engines.types import Connector, Role
from tests.engines import programs
from tests.engines.launch import READY_DEADLINE_S, RealEngine
from tests.engines.programs import SGLANG, VLLM, Program, Setup

LEASE_S = 10
"""How long a prefill engine of vLLM keeps KV that nobody fetches: 30 s over NIXL and 480 s over Mooncake, if it is not told otherwise."""


class Kind(NamedTuple):
    """One way to hand KV over."""

    name: str
    prefill: Callable[[], Program]
    decode: Callable[[], Program]


class Pair:
    """A prefill engine and a decode engine."""

    def __init__(self, kind: Kind, folder: Path) -> None:
        self.kind = kind
        self.prefill = _Engine(kind.prefill(), folder)
        self.decode = _Engine(kind.decode(), folder)
        self._starting: list[_Engine] = []

    @property
    def engines(self) -> Sequence[_Engine]:
        return self.prefill, self.decode

    @property
    def bootstrap(self) -> str:
        """Where the prefill engine serves decode engines: by HTTP (Mooncake, SGLang), or NIXL's side channel."""
        return self.prefill.bootstrap

    def launch(self) -> None:
        """Set those that do not serve on their way."""
        for engine in self.engines:
            if engine not in self._starting and not engine.serves:
                engine.kill()  # what is left of it
                engine.launch()
                self._starting.append(engine)

    def start(self) -> None:
        """Start those that do not serve, and return when both serve. Raises EngineFailed."""
        self.launch()
        while self._starting:
            self._starting[0].wait_ready()
            del self._starting[0]

    def close(self) -> None:
        """Stop both and give their ports back."""
        for engine in self.engines:
            engine.terminate()
        for engine in self.engines:
            engine.close()

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Engine(RealEngine):
    """An engine whose threads run on any core: NIXL's connector keeps the worker to the last one, which both engines then share."""

    @property
    def bootstrap(self) -> str:
        return f"http://127.0.0.1:{self._ports.transfer}"

    @property
    def serves(self) -> bool:
        """Whether it runs and answers: a server whose worker has died takes seconds to end itself."""
        return not self._ended_within(0) and self._answers(self.program.ready_path)

    def wait_ready(self, deadline_s: float = READY_DEADLINE_S) -> None:
        super().wait_ready(deadline_s)
        for member in self._members():
            for thread in (member / "task").iterdir():
                with contextlib.suppress(ProcessLookupError):
                    os.sched_setaffinity(int(thread.name), range(os.cpu_count() or 1))


def _vllm(connector: Connector, role: Role, **config: object) -> Program:
    """Float32, since a prompt computed in one piece elsewhere and one computed here are compared token for token."""
    setup = VLLM._replace(arguments=("--dtype", "float32", "--kv-transfer-config", json.dumps(config)))
    return programs.vllm(setup, role, connector)


def _nixl(role: Role) -> Program:
    return _vllm(
        Connector.NIXL,
        role,
        kv_buffer_device="cpu",
        kv_connector_extra_config={"kv_lease_duration": LEASE_S},
        kv_load_failure_policy="fail",  # vLLM's own default
    )


def _mooncake(role: Role) -> Program:
    program = _vllm(
        Connector.MOONCAKE,
        role,
        kv_connector_module_path="mooncake_cpu",
        kv_connector_extra_config={"mooncake_protocol": "tcp"},
    )

    def made(setup: Setup, ports: Ports) -> Launched:
        launched = program.made(setup, ports)
        return msgspec.structs.replace(launched, environment=launched.environment | {"VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT": str(LEASE_S)})

    return program._replace(made=made)


def _sglang(role: Role, *arguments: str) -> Program:
    transfer = ("--disaggregation-transfer-backend", "mooncake_tcp", *arguments)
    return programs.sglang(SGLANG._replace(arguments=("--dtype", "float32", *transfer)), role)


NIXL = Kind("nixl", lambda: _nixl(Role.PREFILL), lambda: _nixl(Role.DECODE))
MOONCAKE = Kind("mooncake", lambda: _mooncake(Role.PREFILL), lambda: _mooncake(Role.DECODE))
SGLANG_TCP = Kind(
    "sglang",
    lambda: _sglang(Role.PREFILL),
    # else it saves what it takes back from a request to pinned memory, which needs CUDA
    lambda: _sglang(Role.DECODE, "--disaggregation-decode-retraction-backup", "none"),
)
