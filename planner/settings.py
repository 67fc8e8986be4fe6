"""What can be set about `commutator plan`? As with `serve`, field paths are keys, variables and flags."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from discovery.access import (
    NatsCa,
    NatsCert,
    NatsCreds,
    NatsKey,
    NatsNkey,
    NatsPassword,
    NatsToken,
    NatsUrl,
    NatsUser,
    complaints,
)
from discovery.config import Complaint
from discovery.logs import LogFormat, LogLevel
from engines.launch.plan import BadPlan
from engines.launch.plan import Pool as LaunchPool
from engines.types import Role
from planner.forecast import Predictor
from planner.rules import Rules, Thresholds
from planner.types import Loop, Pool, Slo, Target

Seconds = Annotated[float, Meta(gt=0)]
Share = Annotated[float, Meta(gt=0, le=1)]
Count = Annotated[int, Meta(ge=0, le=100_000)]
Text = Annotated[str, Meta(min_length=1)]


class ActuatorName(enum.StrEnum):
    """How a plan is carried out."""

    DRY_RUN = "dry-run"
    VIRTUAL = "virtual"
    PROCESS = "process"
    DOCKER = "docker"
    KUBERNETES = "kubernetes"


class PoolSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Limits of the pool of one role."""

    min: Annotated[
        Count, Meta(description="Least replicas. 0: the pool is emptied when nobody asks, and a request waits for the first one.")
    ] = 1
    max: Annotated[Count, Meta(description="Most replicas.")] = 8
    gpus: Annotated[int, Meta(ge=0, description="GPUs of one replica.")] = 1
    startup_s: Annotated[Seconds, Meta(description="Time a replica takes from its start to its first request.")] = 60.0
    startup_deadline_s: Annotated[Seconds, Meta(description="Time after which one that is not ready is lost, and replaced.")] = 600.0
    target: Annotated[
        Text | None,
        Meta(
            description="With actuator `kubernetes`: what is scaled, `deployments/NAME`, `statefulsets/NAME` or a custom resource, "
            "`GROUP/VERSION/PLURAL/NAME[:/path/to/replicas]`. With `docker`: the compose service, `PROJECT/SERVICE`."
        ),
    ] = None


class PlanSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How many engines should there be? Watches what clients see and scales, or says what it would do."""

    model: Annotated[Text | None, Meta(description="The model whose engines are planned; all of them, where there is one.")] = None
    mode: Annotated[
        Literal["aggregated", "disaggregated"], Meta(description="One pool of whole engines, or one of prefill and one of decode engines.")
    ] = "aggregated"
    target: Annotated[
        Target,
        Meta(
            description="`sla`: times that clients see. `throughput`, `latency`, `load`: queues and KV caches of engines against thresholds."
        ),
    ] = Target.SLA
    loops: Annotated[
        Literal["load", "throughput", "both"],
        Meta(description="`load` reacts to what is, `throughput` plans for what is expected; `both`: the second is a floor for the first."),
    ] = "both"
    ttft_ms: Annotated[Seconds | None, Meta(description="Target of the time to first token.")] = 500.0
    itl_ms: Annotated[Seconds | None, Meta(description="Target of the time between tokens.")] = 50.0
    percentile: Annotated[
        Literal["p50", "p90", "p95", "p99"], Meta(description="The share of requests that are to be within the targets.")
    ] = "p95"
    prefill_up: Annotated[
        Share, Meta(description="With target `load`: prompt tokens waiting, as a share of the longest request's, from which a pool grows.")
    ] = 0.5
    prefill_down: Annotated[float, Meta(ge=0, description="The share from which it may shrink.")] = 0.1
    decode_up: Annotated[Share, Meta(description="With target `load`: KV cache in use from which a pool grows.")] = 0.8
    decode_down: Annotated[float, Meta(ge=0, description="The use from which it may shrink.")] = 0.4
    load_interval_s: Annotated[Seconds, Meta(description="Time between two ticks; routers tell something new each second.")] = 5.0
    throughput_interval_s: Annotated[Seconds, Meta(description="Time between two looks ahead.")] = 180.0
    predictor: Annotated[Predictor, Meta(description="How arrivals go on; `arima` needs the extra of that name.")] = "holt"
    stabilise_s: Annotated[Seconds, Meta(description="A pool shrinks to what was needed at the busiest moment of so long.")] = 60.0
    fill: Annotated[Share, Meta(description="Share of what a replica can carry that is planned for.")] = 0.85
    down_load: Annotated[Share, Meta(description="Of that, the share that survivors of a step down may have.")] = 0.8
    max_step: Annotated[int, Meta(ge=1, description="Replicas added or taken away in one step.")] = 8
    zero_after_s: Annotated[Seconds, Meta(description="Time without a request after which a pool whose minimum is 0 is emptied.")] = 300.0
    gpu_budget: Annotated[Annotated[int, Meta(ge=1)] | None, Meta(description="GPUs that all pools may take together.")] = None
    aggregated: PoolSettings = PoolSettings()
    prefill: PoolSettings = PoolSettings()
    decode: PoolSettings = PoolSettings()
    actuator: Annotated[ActuatorName, Meta(description="Who makes it so. `dry-run` only says what it would do.")] = ActuatorName.DRY_RUN
    pool: Annotated[
        tuple[LaunchPool, ...],
        Meta(
            description="With actuator `process`: what is started, as `[[pool]]` tables of `commutator up`; one for each role. "
            "`replicas` is how many there are before the first plan."
        ),
    ] = ()
    log_folder: Annotated[Text, Meta(description="With actuator `process`: folder of the engines' logs.")] = "commutator-logs"
    drain_s: Annotated[Seconds, Meta(description="Longest time that requests of an engine that is to go are waited for.")] = 600.0
    router: Annotated[
        tuple[Text, ...],
        Meta(description="Admin API of a router, `http://HOST:8081`; engines are drained there before they go. Repeatable."),
    ] = ()
    router_token: Annotated[Text | None, Meta(description="Token of the routers' admin APIs.", extra={"secret": True})] = None
    webhook: Annotated[Text | None, Meta(description="With actuator `virtual`: where plans are posted; told on the bus either way.")] = None
    docker: Annotated[Text, Meta(description="Docker's API: `unix:///PATH` or `http://HOST:PORT`.")] = "unix:///var/run/docker.sock"
    kubernetes_api: Annotated[
        Text | None, Meta(description="Kubernetes' API, such as `kubectl proxy` offers it; inside a cluster it is found.")
    ] = None
    kubernetes_namespace: Annotated[Text | None, Meta(description="Namespace of what is scaled; that of the pod, inside a cluster.")] = None
    prometheus: Annotated[Text | None, Meta(description="A Prometheus server that scrapes the routers, to look at instead of the bus.")] = (
        None
    )
    profile: Annotated[
        Text | None,
        Meta(
            description="What one engine carries: a file that was written before, or the URL of an idle engine, which is measured; the profile is printed."
        ),
    ] = None
    backtest: Annotated[
        Text | None, Meta(description="A trace (JSON lines with `timestamp`, in ms): shows how each predictor would have done, and ends.")
    ] = None
    backtest_plot: Annotated[Text | None, Meta(description="Where the plot of forecast against actual arrivals is written, as SVG.")] = None
    state_file: Annotated[
        Text | None, Meta(description="Where what is known is kept, so that a planner that starts again decides as if it had not stopped.")
    ] = None
    host: Annotated[str, Meta(min_length=1, description="Address that its page, /metrics and /health listen on.")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="Their port; 0 takes a free one and prints it.")] = 8083
    nats: NatsUrl = None
    nats_user: NatsUser = None
    nats_password: NatsPassword = None
    nats_token: NatsToken = None
    nats_creds: NatsCreds = None
    nats_nkey: NatsNkey = None
    nats_ca: NatsCa = None
    nats_cert: NatsCert = None
    nats_key: NatsKey = None
    namespace: Annotated[
        str, Meta(pattern=r"^[A-Za-z0-9_-]+$", description="First part of every subject on the bus: that of the routers it plans for.")
    ] = "commutator"
    log_level: Annotated[LogLevel, Meta(description="Least severity that is logged.")] = "info"
    log_format: Annotated[LogFormat, Meta(description="`auto` is text on a terminal and JSON lines elsewhere.")] = "auto"

    # What the policy reads

    @property
    def rules(self) -> Rules:
        """By which plans are made."""
        loops = {"load": {Loop.LOAD}, "throughput": {Loop.THROUGHPUT}, "both": {Loop.LOAD, Loop.THROUGHPUT}}[self.loops]
        if self.target is not Target.SLA:
            loops = {Loop.LOAD}
        return Rules(
            target=self.target,
            loops=frozenset(loops),
            slo=Slo(_seconds(self.ttft_ms), _seconds(self.itl_ms), int(self.percentile[1:]) / 100),
            thresholds=Thresholds(self.prefill_up, self.prefill_down, self.decode_up, self.decode_down)
            if self.target is Target.LOAD
            else None,
            throughput_interval_s=self.throughput_interval_s,
            bin_s=min(60.0, self.throughput_interval_s),
            down_load=self.down_load,
            fill=self.fill,
            stabilise_s=self.stabilise_s,
            max_step=self.max_step,
            gpu_budget=self.gpu_budget,
            zero_after_s=self.zero_after_s,
        )

    @property
    def roles(self) -> tuple[Role, ...]:
        """Of the pools that are planned."""
        return (Role.AGGREGATED,) if self.mode == "aggregated" else (Role.PREFILL, Role.DECODE)

    @property
    def pools(self) -> tuple[Pool, ...]:
        """What is planned. Pools that are started here have their own names, and no more replicas than GPUs."""
        made = {pool.role: pool for pool in self.pool}
        return tuple(self._pool(role, made.get(role)) for role in self.roles)

    def limits(self, role: Role) -> PoolSettings:
        """Of one role's pool."""
        return {Role.AGGREGATED: self.aggregated, Role.PREFILL: self.prefill, Role.DECODE: self.decode}[role]

    def _pool(self, role: Role, made: LaunchPool | None) -> Pool:
        limits = self.limits(role)
        most, name = limits.max, role.value
        gpus = limits.gpus
        if made is not None:
            name, gpus = made.name, made.gpus_per_engine
            most = most if made.most is None else min(most, made.most)
        return Pool(name, role, limits.min, most, gpus, limits.startup_s, limits.startup_deadline_s)

    @property
    def measures(self) -> bool:
        """Whether an engine is to be measured, and no more."""
        return self.profile is not None and self.profile.startswith(("http://", "https://"))

    # What is wrong

    def check(self, given: frozenset[str]) -> Iterator[Complaint]:
        """What is wrong in combination; `given` holds the keys that somebody set."""
        if self.backtest is None and not self.measures:
            if self.nats is None and self.prometheus is None:
                yield Complaint("nats", "a planner hears routers on their NATS server: --nats nats://HOST:4222; or names --prometheus")
            yield from self._check_actuator()
        if self.nats is not None:
            yield from complaints(self, given)
        for role in self.roles:
            limits = self.limits(role)
            if limits.min > limits.max:
                yield Complaint(f"{role.value}.max", f"{limits.max} is less than `{role.value}.min`, {limits.min}")
        for what, down, up in (("prefill", self.prefill_down, self.prefill_up), ("decode", self.decode_down, self.decode_up)):
            if self.target is Target.LOAD and down >= up:
                yield Complaint(
                    f"{what}_down", f"{down:g} is not less than `{what}_up`, {up:g}: a pool would have to grow and to shrink at once"
                )
        if self.target is Target.SLA and self.ttft_ms is None and self.itl_ms is None:
            yield Complaint("target", "`sla` needs `ttft_ms` or `itl_ms`")
        yield from self._without_effect(given)

    def _check_actuator(self) -> Iterator[Complaint]:
        drains = self.actuator in (ActuatorName.PROCESS, ActuatorName.DOCKER, ActuatorName.KUBERNETES)
        if drains and not self.router:
            yield Complaint("router", f"actuator `{self.actuator}` drains before it stops: name each router's admin API, --router URL")
        if self.router and self.router_token is None:
            yield Complaint("router_token", "the routers' admin APIs ask for a token")
        if self.actuator is ActuatorName.VIRTUAL and self.nats is None:
            yield Complaint("nats", "actuator `virtual` tells plans on the bus: --nats nats://HOST:4222")
        if self.actuator is ActuatorName.PROCESS:
            yield from self._check_pools()
        if self.actuator in (ActuatorName.DOCKER, ActuatorName.KUBERNETES):
            for role in self.roles:
                if self.limits(role).target is None:
                    yield Complaint(f"{role.value}.target", f"actuator `{self.actuator}` needs to know what it scales")

    def _check_pools(self) -> Iterator[Complaint]:
        roles = sorted(pool.role.value for pool in self.pool)
        if roles != sorted(role.value for role in self.roles):
            wanted = " and ".join(role.value for role in self.roles)
            yield Complaint("pool", f"actuator `process` starts what `[[pool]]` tables describe: one with role {wanted}")
        for pool in self.pool:
            least, most = self.limits(pool.role).min, self._pool(pool.role, pool).max
            if pool.role in self.roles and pool.replicas is not None and not least <= pool.replicas <= most:
                limit = (
                    f"less than `{pool.role.value}.min`, {least}" if pool.replicas < least else f"more than `{pool.role.value}.max`, {most}"
                )
                yield Complaint(
                    "pool",
                    f"pool {pool.name!r} begins with its `replicas`, {pool.replicas}, which is {limit}: change one of them, or leave `replicas` out",
                )
        try:
            for pool in self.pool:
                pool.check()
        except BadPlan as error:
            yield Complaint("pool", str(error))

    def _without_effect(self, given: frozenset[str]) -> Iterator[Complaint]:
        idle = [(keys, why) for keys, read, why in self._read() if not read]
        for key in sorted(given):
            section, _, limit = key.partition(".")
            why = next((why for keys, why in idle if {key, section, f"*.{limit}"}.intersection(keys)), None)
            if why is not None:
                yield Complaint(key, why)

    def _read(self) -> Iterator[tuple[tuple[str, ...], bool, str]]:
        """Keys that are not always read: which, whether they are now, and why not."""
        unplanned = tuple(role.value for role in Role if role not in self.roles)
        yield unplanned, False, f"has no effect with mode {self.mode!r}"
        sla, actuator = self.target is Target.SLA, self.actuator
        thresholds = ("prefill_up", "prefill_down", "decode_up", "decode_down")
        yield thresholds, self.target is Target.LOAD, f"has no effect with target {self.target.value!r}; only 'load' reads it"
        times = ("ttft_ms", "itl_ms", "percentile", "loops", "predictor", "throughput_interval_s", "fill")
        yield times, sla, f"has no effect with target {self.target.value!r}, which goes by thresholds"
        yield ("profile",), sla or self.measures, f"has no effect with target {self.target.value!r}, which goes by thresholds"
        foretells = self.loops != "load" or self.backtest is not None
        yield ("predictor", "throughput_interval_s"), foretells, "has no effect with loops 'load', which go by what is"
        empties = any(self.limits(role).min == 0 for role in self.roles)
        yield ("zero_after_s",), empties, f"has no effect where no pool may be emptied: `{self.roles[0].value}.min` is not 0"
        scales = actuator in (ActuatorName.DOCKER, ActuatorName.KUBERNETES)
        yield ("*.target",), scales, "has no effect without actuator `docker` or `kubernetes`"
        by_pool = "has no effect with actuator `process`: `[[pool]]` tables say how many GPUs an engine takes"
        yield ("*.gpus",), actuator is not ActuatorName.PROCESS, by_pool
        yield ("drain_s",), scales or actuator is ActuatorName.PROCESS, f"has no effect with actuator `{actuator}`, which stops nothing"
        for keys, only in (
            (("pool", "log_folder"), ActuatorName.PROCESS),
            (("webhook",), ActuatorName.VIRTUAL),
            (("docker",), ActuatorName.DOCKER),
            (("kubernetes_api", "kubernetes_namespace"), ActuatorName.KUBERNETES),
        ):
            yield keys, actuator is only, f"has no effect without actuator `{only}`"
        yield ("backtest_plot",), self.backtest is not None, "has no effect without backtest"


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3
