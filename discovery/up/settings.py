"""What can be set about `commutator up`? Pools of engines, or one pool in short; and what the router before them is told.

commutator up --model M --gpus 0,1                                one engine on each GPU
commutator up --model M --prefill-gpus 0 --decode-gpus 1          a pair
commutator up --config up.toml                                    [[pool]] tables, [serve]
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator
from typing import Annotated

import msgspec
from msgspec import Meta

from discovery.config import Complaint
from discovery.logs import LogFormat, LogLevel
from engines.launch.plan import BadPlan, EngineName, Pool
from engines.types import Role

Text = Annotated[str, Meta(min_length=1)]
Seconds = Annotated[float, Meta(gt=0)]
Gpus = Annotated[str, Meta(pattern=r"^\d{1,4}(,\d{1,4})*$")]
_SHORT = ("model", "launch", "gpus", "prefill_gpus", "decode_gpus", "replicas", "tensor_parallel_size", "arguments", "python")
"""Keys that describe the one pool, or pair of pools, of the short form."""
_OURS = ("engine", "host", "port", "log_level", "log_format")
"""Keys of `serve` that are set here, beside the table."""
_PLANNED = ("actuator", "pool", "router", "router_token", "nats", "namespace", "log_folder", "log_level", "log_format")
"""Keys of `plan` that follow from what else is said."""


class UpSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Engines on this machine, started and ended with the router in front of them."""

    pool: Annotated[
        tuple[Pool, ...],
        Meta(
            description="Equal engines: in the file a `[[pool]]` table with `name`, `engine` (vllm, sglang, simulated), `model`, `gpus`, "
            "`tensor_parallel_size`, `data_parallel_size`, `replicas`, `role`, `connector`, `arguments`, `env`, `python`. Repeatable."
        ),
    ] = ()
    model: Annotated[Text | None, Meta(description="Without pools: the model of all engines, a folder or hub name.")] = None
    launch: Annotated[EngineName, Meta(description="Without pools: which engines to start.")] = EngineName.VLLM
    gpus: Annotated[Gpus | None, Meta(description="Without pools: GPUs to start engines on, `0,1`; as many engines as fit.")] = None
    prefill_gpus: Annotated[Gpus | None, Meta(description="Without pools: GPUs of prefill engines; `decode_gpus` are needed too.")] = None
    decode_gpus: Annotated[Gpus | None, Meta(description="Without pools: GPUs of decode engines.")] = None
    replicas: Annotated[
        Annotated[int, Meta(ge=1)] | None, Meta(description="Without pools and GPUs: how many engines to start; one by default.")
    ] = None
    tensor_parallel_size: Annotated[int, Meta(ge=1, description="Without pools: GPUs that one engine's tensors are spread over.")] = 1
    arguments: Annotated[
        Text | None,
        Meta(description="Without pools: more of each engine's command line, quoted as in a shell: `--arguments='--max-model-len 8192'`."),
    ] = None
    python: Annotated[
        Text | None, Meta(description="Without pools: the Python that the engines are installed for, where it is not this one.")
    ] = None
    host: Annotated[str, Meta(min_length=1, description="Address that the router listens on.")] = "0.0.0.0"  # noqa: S104  as `serve`
    port: Annotated[int, Meta(ge=0, le=65535, description="Its port; 0 takes a free one and prints it.")] = 8080
    serve: Annotated[
        dict[str, object],
        Meta(description="Anything else that `commutator serve` can be told, by its keys: in the file a `[serve]` table."),
    ] = {}
    plan: Annotated[
        dict[str, object] | None,
        Meta(
            description="Has `commutator plan` say how many engines there are, from those that pools name at first up to what they have room for; "
            "what it can be told by its keys: in the file a `[plan]` table, which may be empty."
        ),
    ] = None
    log_folder: Annotated[Text, Meta(description="Folder of the engines' logs, one file for each.")] = "commutator-logs"
    ready_within_s: Annotated[
        Seconds, Meta(description="Time an engine has to serve, weights to download included; after that everything is stopped.")
    ] = 1800.0
    log_level: Annotated[LogLevel, Meta(description="Least severity that is logged.")] = "info"
    log_format: Annotated[LogFormat, Meta(description="`auto` is text on a terminal and JSON lines elsewhere.")] = "auto"

    @property
    def pools(self) -> tuple[Pool, ...]:
        """The pools given, or those that the short form stands for."""
        if self.pool:
            return self.pool
        if self.prefill_gpus is None and self.decode_gpus is None:
            return (self._short("engine", Role.AGGREGATED, self.gpus, self.replicas),)
        return (self._short("prefill", Role.PREFILL, self.prefill_gpus), self._short("decode", Role.DECODE, self.decode_gpus))

    def _short(self, name: str, role: Role, gpus: str | None, replicas: int | None = None) -> Pool:
        return Pool(
            name=name,
            engine=self.launch,
            model=self.model or "",
            role=role,
            gpus=tuple(map(int, gpus.split(","))) if gpus else (),
            replicas=replicas,
            tensor_parallel_size=self.tensor_parallel_size,
            arguments=tuple(shlex.split(self.arguments)) if self.arguments else (),
            python=self.python,
        )

    def check(self, given: frozenset[str]) -> Iterator[Complaint]:
        """What is wrong in combination; `given` holds the keys that somebody set."""
        yield from self._of_the_short_form(given)
        for name, count in Counter(pool.name for pool in self.pool).items():
            if count > 1:
                yield Complaint("pool", f"{count} pools are named {name!r}")
        try:
            for pool in self.pools:
                pool.check()
        except BadPlan as error:
            yield Complaint("pool" if self.pool else "model", str(error))
        except ValueError as error:
            yield Complaint("arguments", f"cannot be taken apart: {error}")
        roles = {pool.role for pool in self.pool if pool.size}
        if self.pool and Role.PREFILL in roles and Role.DECODE not in roles:
            yield Complaint("pool", 'prefill engines have an effect only with decode engines; name a pool with role = "decode"')
        yield from self._of_the_tables()

    def _of_the_tables(self) -> Iterator[Complaint]:
        for key in _PLANNED:
            if key in (self.plan or {}):
                yield Complaint("plan", f"`{key}` has no effect in it: it follows from the rest")
        for key in _OURS:
            if key in self.serve:
                where = "the pools say" if key == "engine" else f"`{key}` says, outside of it,"
                yield Complaint("serve", f"`{key}` has no effect in it: {where} what it is")

    def _of_the_short_form(self, given: frozenset[str]) -> Iterator[Complaint]:
        if self.pool:
            for key in sorted(given.intersection(_SHORT)):
                if getattr(self, key) != getattr(UpSettings(), key):
                    yield Complaint(key, "has no effect beside pools, which have their own")
            return
        if self.model is None and self.launch is not EngineName.SIMULATED:
            yield Complaint("model", "no engine is described; name a model, --model M, or pools in a file, --config FILE")
        if (self.prefill_gpus is None) != (self.decode_gpus is None):
            yield Complaint("prefill_gpus", "a pair needs both prefill_gpus and decode_gpus")
        elif self.prefill_gpus is not None and self.gpus is not None:
            yield Complaint("gpus", "has no effect beside prefill_gpus and decode_gpus")
        if self.replicas is not None and (self.gpus or self.prefill_gpus):
            yield Complaint("replicas", "has no effect with GPUs: there are as many engines as fit on them")
