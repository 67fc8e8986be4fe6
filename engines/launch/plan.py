"""What is to be started? One engine (`LaunchPlan`), or a pool of equal ones, each on its own GPUs.

Pool("chat", gpus=(0, 1, 2, 3), tensor_parallel_size=2)  ──▶  chat-0 on GPUs 0, 1   chat-1 on GPUs 2, 3
"""

from __future__ import annotations

import enum
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from engines.types import Connector, Role

DP_ATTENTION = "--enable-dp-attention"
"""SGLang: one model, whose attention is computed by ranks with a cache of their own."""

Text = Annotated[str, Meta(min_length=1)]
Size = Annotated[int, Meta(ge=1, le=1024)]


class BadPlan(ValueError):
    """What is asked for cannot be started; the message says why."""


class EngineName(enum.StrEnum):
    """Which program an engine is."""

    VLLM = "vllm"
    SGLANG = "sglang"
    SIMULATED = "simulated"


class Ports(NamedTuple):
    """One engine's ports: rank 0's; those of the other ranks follow."""

    http: int
    events: int
    replay: int
    load: int
    transfer: int
    """Where other engines ask for KV: NIXL's side channel, or a bootstrap server."""
    rendezvous: int
    """Where the ranks of SGLang's DP attention meet; its processes talk on ports after it (`ports.RENDEZVOUS`)."""


class LaunchPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One engine that is to be started."""

    name: str
    """Names its log file too."""
    engine: EngineName = EngineName.VLLM
    model: str = ""
    """Folder or hub name. Of a simulated engine, the name it serves its model under."""
    role: Role = Role.AGGREGATED
    connector: Connector | None = None
    """How vLLM hands KV over: NIXL unless it is told."""
    gpus: tuple[int, ...] = ()
    """Empty: all that there are, as the engine finds them."""
    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    arguments: tuple[str, ...] = ()
    """More of its command line, at the end. JSON flags that are set here too are merged with ours, key by key; theirs win."""
    env: dict[str, str] = {}
    python: str | None = None
    """The Python that the engine is installed for; None: this one."""


class Pool(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Equal engines: as many as its GPUs have room for, or as it says."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    engine: EngineName = EngineName.VLLM
    model: str = ""
    role: Role = Role.AGGREGATED
    connector: Connector | None = None
    gpus: tuple[Annotated[int, Meta(ge=0)], ...] = ()
    replicas: Annotated[int, Meta(ge=0)] | None = None
    """None: one for each set of GPUs; one without GPUs."""
    tensor_parallel_size: Size = 1
    data_parallel_size: Size = 1
    arguments: tuple[str, ...] = ()
    env: dict[str, str] = {}
    python: Text | None = None

    @property
    def gpus_per_engine(self) -> int:
        """GPUs that one engine takes. With SGLang's DP attention, ranks share those of tensor parallelism."""
        return self.tensor_parallel_size * (1 if DP_ATTENTION in self.arguments else self.data_parallel_size)

    @property
    def most(self) -> int | None:
        """How many its GPUs have room for; None without GPUs: no limit is known."""
        return len(self.gpus) // self.gpus_per_engine if self.gpus else None

    @property
    def size(self) -> int:
        """How many there are to be at first."""
        if self.replicas is not None:
            return self.replicas
        return 1 if self.most is None else self.most

    def check(self) -> None:
        """Raises BadPlan for what could not be started, or would not do what it says."""
        if self.engine is not EngineName.SIMULATED and not self.model:
            raise BadPlan(f"pool {self.name!r}: no model is named")
        if self.connector is not None and (self.role is Role.AGGREGATED or self.engine is EngineName.SGLANG):
            raise BadPlan(f"pool {self.name!r}: connector has no effect: only vLLM's prefill and decode engines are told one")
        if self.connector is Connector.ROOMS:
            raise BadPlan(f"pool {self.name!r}: connector 'rooms' is SGLang's own; vLLM's are 'nixl' and 'mooncake'")
        if len(set(self.gpus)) != len(self.gpus):
            raise BadPlan(f"pool {self.name!r}: a GPU is named twice")
        if self.gpus and len(self.gpus) % self.gpus_per_engine:
            raise BadPlan(f"pool {self.name!r}: {len(self.gpus)} GPUs cannot be divided into engines of {self.gpus_per_engine}")
        if self.most is not None and self.size > self.most:
            raise BadPlan(f"pool {self.name!r}: {self.size} replicas of {self.gpus_per_engine} GPUs do not fit on {len(self.gpus)} GPUs")
        if not self.gpus and self.size > 1 and self.engine is not EngineName.SIMULATED and "CUDA_VISIBLE_DEVICES" in self.env:
            raise BadPlan(f"pool {self.name!r}: its replicas would all use the GPUs of CUDA_VISIBLE_DEVICES; name them as `gpus`")

    def plan(self, index: int) -> LaunchPlan:
        """The engine at this place in the pool: the same place has the same name and GPUs. Raises BadPlan where there is no room for it."""
        if self.most is not None and index >= self.most:
            raise BadPlan(f"pool {self.name!r} has GPUs for {self.most} engines; there is no room for one more")
        first = index * self.gpus_per_engine
        return LaunchPlan(
            name=f"{self.name}-{index}",
            engine=self.engine,
            model=self.model,
            role=self.role,
            connector=self.connector,
            gpus=self.gpus[first : first + self.gpus_per_engine],
            tensor_parallel_size=self.tensor_parallel_size,
            data_parallel_size=self.data_parallel_size,
            arguments=self.arguments,
            env=self.env,
            python=self.python,
        )
