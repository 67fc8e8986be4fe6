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

from tests.engines import environments, programs
from tests.engines.launch import READY_DEADLINE_S, RealEngine
from tests.engines.programs import SGLANG, VLLM, Ports, Program, Setup

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
        """Set those that do not run on their way."""
        for engine in self.engines:
            if engine.ended:
                engine.kill()  # what is left of it
                engine.launch()
                self._starting.append(engine)

    def start(self) -> None:
        """Start those that do not run, and return when both serve. Raises EngineFailed."""
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
    def ended(self) -> bool:
        """Whether it is not running: never started, stopped, or dead."""
        return self._ended_within(0)

    def wait_ready(self, deadline_s: float = READY_DEADLINE_S) -> None:
        super().wait_ready(deadline_s)
        for member in self._members():
            for thread in (member / "task").iterdir():
                with contextlib.suppress(ProcessLookupError):
                    os.sched_setaffinity(int(thread.name), range(os.cpu_count() or 1))


def _vllm(connector: str, role: str, variables: Callable[[Ports], dict[str, str]], **config: object) -> Program:
    """Float32, since a prompt computed in one piece elsewhere and one computed here are compared token for token."""
    told = {"kv_connector": connector, "kv_role": role} | config
    setup = VLLM._replace(arguments=("--dtype", "float32", "--kv-transfer-config", json.dumps(told)))
    program = programs.vllm(setup)
    environment = program.environment | {
        "PYTHONPATH": str(environments.HERE / "vllm" / "shim"),
        # the address told to the other engine; by default that of an interface
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        # not the shared memory and the network cards it would look for first
        "UCX_TLS": "tcp,self,sm",
    }
    return program._replace(command=_with_variables(program, variables), environment=environment)


def _nixl(role: str) -> Program:
    return _vllm(
        "NixlConnector",
        role,
        lambda ports: {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(ports.transfer)},
        kv_buffer_device="cpu",
        kv_connector_extra_config={"kv_lease_duration": LEASE_S},
    )


def _mooncake(role: str) -> Program:
    return _vllm(
        "MooncakeConnector",
        role,
        lambda ports: {"VLLM_MOONCAKE_BOOTSTRAP_PORT": str(ports.transfer), "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT": str(LEASE_S)},
        kv_connector_module_path="mooncake_cpu",
        kv_connector_extra_config={"mooncake_protocol": "tcp"},
    )


def _with_variables(program: Program, variables: Callable[[Ports], dict[str, str]]) -> Callable[[Setup, Ports], Sequence[str | Path]]:
    """The program's command with variables that name one of its ports."""

    def command(setup: Setup, ports: Ports) -> list[str | Path]:
        return ["env", *(f"{name}={value}" for name, value in variables(ports).items()), *program.command(setup, ports)]

    return command


def _sglang(*arguments: str, told: Callable[[Ports], Sequence[str]] = lambda _: ()) -> Program:
    transfer = ("--disaggregation-transfer-backend", "mooncake_tcp", *arguments)
    program = programs.sglang(SGLANG._replace(arguments=("--dtype", "float32", *transfer)))
    return program._replace(command=lambda setup, ports: [*program.command(setup, ports), *told(ports)])


NIXL = Kind("nixl", lambda: _nixl("kv_producer"), lambda: _nixl("kv_consumer"))
MOONCAKE = Kind("mooncake", lambda: _mooncake("kv_producer"), lambda: _mooncake("kv_consumer"))
SGLANG_TCP = Kind(
    "sglang",
    lambda: _sglang(
        "--disaggregation-mode", "prefill",
        told=lambda ports: ("--disaggregation-bootstrap-port", str(ports.transfer)),
    ),
    # else it saves what it takes back from a request to pinned memory, which needs CUDA
    lambda: _sglang("--disaggregation-mode", "decode", "--disaggregation-decode-retraction-backup", "none"),
)  # fmt: skip
