"""Plans made so through Docker and Kubernetes: against fakes of their APIs, in front of real routers that drain."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

import aiohttp
import msgspec
import pytest

from discovery.lifetime import cancelled_at_exit
from discovery.observations import EngineReport
from engines.launch.plan import EngineName
from engines.launch.plan import Pool as LaunchPool
from engines.types import Role
from planner.actuators.docker import Docker
from planner.actuators.kubernetes import Kubernetes
from planner.actuators.leaving import Leaving
from planner.actuators.process import Processes
from planner.actuators.types import ActuatorError
from planner.routers import Routers, RouterUnreachable
from planner.settings import ActuatorName, PlanSettings, PoolSettings
from planner.types import Decision, PoolDecision, Replica, ReplicaState
from tests.planning.orchestrators import FakeDocker, FakeKubernetes, served
from tests.rig import Router, fleet, routing
from tests.waiting import until

TOKEN = "operator"


def reports(engines: Mapping[str, int]) -> dict[str, EngineReport]:
    """Engines with so many requests each."""
    return {url: EngineReport(url, Role.AGGREGATED, "serving", ("sim",), count, 0) for url, count in engines.items()}


def decision(there: Sequence[Replica], target: int, victims: Sequence[str] = ()) -> Decision:
    current = sum(one.state in (ReplicaState.READY, ReplicaState.STARTING) for one in there)
    return Decision(0.0, (PoolDecision("aggregated", Role.AGGREGATED, current, target, tuple(victims)),))


@contextlib.asynccontextmanager
async def told(router: Router) -> AsyncIterator[tuple[Routers, asyncio.TaskGroup]]:
    async with aiohttp.ClientSession() as session, cancelled_at_exit() as group:
        yield Routers(session, [router.admin], TOKEN), group


async def test_containers_are_started_again_and_made_from_the_description_of_another() -> None:
    docker = FakeDocker("llm", "engine")
    docker.add(), docker.add("exited")
    settings = PlanSettings(actuator=ActuatorName.DOCKER, aggregated=PoolSettings(target="llm/engine"))
    async with served(docker.application()) as api, routing([], admin_token=TOKEN) as router, told(router) as (routers, group):
        actuator = Docker(msgspec.structs.replace(settings, docker=api), routers, group)
        there = (await actuator.replicas({}, 0.0))["aggregated"]
        assert [one.state for one in there] == [ReplicaState.STARTING]
        await actuator.carry_out(decision(there, 3))
        assert docker.calls == ["start", "create llm-engine-3", "start"]
        made = list(docker.containers.values())[-1]
        assert made["Config"]["Image"] == "engine:1"
        assert "Hostname" not in made["Config"]
        assert made["HostConfig"]["DeviceRequests"] == [{"Count": 1}]
        assert len((await actuator.replicas({}, 0.0))["aggregated"]) == 3
        await actuator.close()


async def test_a_container_is_drained_before_it_is_stopped_and_its_streams_end_well() -> None:
    docker = FakeDocker("llm", "engine")
    async with (
        fleet(2, speedup=1, decode_step_ms=10) as engines,
        routing(engines, admin_token=TOKEN) as router,
        served(docker.application()) as api,
        told(router) as (routers, group),
    ):
        docker.addresses = ["127.0.0.1", "10.9.9.9"]
        docker.add(), docker.add()
        settings = PlanSettings(actuator=ActuatorName.DOCKER, docker=api, aggregated=PoolSettings(target="llm/engine"))
        actuator = Docker(settings, routers, group)
        victim = engines[0].url
        there = (await actuator.replicas(reports({victim: 1}), 0.0))["aggregated"]
        assert (there[0].id, there[0].state, there[0].in_flight) == (victim, ReplicaState.READY, 1)
        streams = [await router.begin(f"stream {number}", max_tokens=100, stream=True) for number in range(4)]
        await actuator.carry_out(decision(there, 1, [victim]))
        await actuator.carry_out(decision(there, 1, [victim]))
        bodies = [await stream.read() for stream in streams]
        assert all(body.rstrip().endswith(b"data: [DONE]") for body in bodies)
        await until(lambda: "remove" in docker.calls, what="the container is gone")
        assert docker.calls == ["stop", "remove"]
        await actuator.close()


async def test_what_docker_refuses_is_said_in_words() -> None:
    docker = FakeDocker("llm", "engine")
    settings = PlanSettings(actuator=ActuatorName.DOCKER, aggregated=PoolSettings(target="llm/engine"))
    async with served(docker.application()) as api, routing([], admin_token=TOKEN) as router, told(router) as (routers, group):
        actuator = Docker(msgspec.structs.replace(settings, docker=api), routers, group)
        with pytest.raises(ActuatorError, match="has no container to make another one of"):
            await actuator.carry_out(decision((), 1))
        await actuator.close()
        away = Docker(msgspec.structs.replace(settings, docker="unix:///nowhere/docker.sock"), routers, group)
        with pytest.raises(ActuatorError, match="Docker's API"):
            await away.replicas({}, 0.0)
        await away.close()


@pytest.mark.parametrize("kind", ["deployments", "statefulsets"])
async def test_pods_are_drained_before_there_are_fewer_and_the_drained_one_goes(kind: str) -> None:
    async with fleet(1) as engines, routing(engines, admin_token=TOKEN) as router, told(router) as (routers, group):
        # The engine's pod is one that Kubernetes would take last, if it were not told: the first of a Deployment; or the last of a StatefulSet.
        last = 2 if kind == "statefulsets" else 0
        cluster = FakeKubernetes(kind, "llm", 3, ["127.0.0.1" if number == last else f"10.8.0.{number + 1}" for number in range(3)])
        async with served(cluster.application()) as api, aiohttp.ClientSession(base_url=api) as session:
            actuator = Kubernetes(session, None, "ai", {"aggregated": f"{kind}/llm"}, Leaving(routers, group, 30.0))
            there = (await actuator.replicas(reports({engines[0].url: 0}), 0.0))["aggregated"]
            assert [one.state for one in there].count(ReplicaState.READY) == 1
            cluster.conflicts = 1
            await actuator.carry_out(decision(there, 2, [engines[0].url]))
            await until(lambda: len(cluster.pods) == 2, what="there is one less")
            assert f"llm-{last}" not in cluster.pods
            assert (await router.request("GET", "/health")).status == 200
            assert await router.metric("router_engine_state", state="draining") == 1
            there = (await actuator.replicas(reports({engines[0].url: 0}), 0.0))["aggregated"]
            await actuator.carry_out(decision(there, 5))
            assert (cluster.calls[-1], len(cluster.pods)) == ("scale 5", 5)


WORKERS = "ai.example/v1/engines/llm"


@pytest.mark.parametrize("path", ["", "/spec/workers/replicas"])
async def test_a_custom_resource_is_scaled_by_its_scale_or_its_own_field(path: str) -> None:
    at = tuple(path.split("/")[1:])
    async with fleet(1) as engines, routing(engines, admin_token=TOKEN) as router, told(router) as (routers, group):
        cluster = FakeKubernetes("ai.example/v1/engines", "llm", 3, ["127.0.0.1"], replicas_at=at)
        others = cluster.resource["spec"]["model"], cluster.resource["spec"]["workers"]["ports"]
        async with served(cluster.application()) as api, aiohttp.ClientSession(base_url=api) as session:
            target = f"{WORKERS}:{path}" if path else WORKERS
            actuator = Kubernetes(session, None, "ai", {"aggregated": target}, Leaving(routers, group, 30.0))
            there = (await actuator.replicas(reports({engines[0].url: 0}), 0.0))["aggregated"]
            assert len(there) == 3
            await actuator.carry_out(decision(there, 2, [engines[0].url]))
            await until(lambda: len(cluster.pods) == 2, what="there is one less")
            assert sorted(cluster.pods) == ["llm-1", "llm-2"], "the one that was drained is gone"
            assert await router.metric("router_engine_state", state="draining") == 1
            there = (await actuator.replicas({}, 0.0))["aggregated"]
            await actuator.carry_out(decision(there, 4))
            assert (cluster.calls[-1], len(cluster.pods)) == ("scale 4", 4)
            assert (cluster.resource["spec"]["model"], cluster.resource["spec"]["workers"]["ports"]) == others


@contextlib.asynccontextmanager
async def scaling(cluster: FakeKubernetes, target: str) -> AsyncIterator[tuple[Kubernetes, Leaving]]:
    """An actuator of one pool in front of a cluster, with a router that knows of no engine."""
    async with (
        routing([], admin_token=TOKEN) as router,
        told(router) as (routers, group),
        served(cluster.application()) as api,
        aiohttp.ClientSession(base_url=api) as session,
    ):
        leaving = Leaving(routers, group, 30.0)
        yield Kubernetes(session, None, "ai", {"aggregated": target}, leaving), leaving


async def test_several_pods_that_leave_at_once_are_each_counted() -> None:
    cluster = FakeKubernetes("deployments", "llm", 5, [])
    async with scaling(cluster, "deployments/llm") as (actuator, _):
        there = (await actuator.replicas({}, 0.0))["aggregated"]
        await actuator.carry_out(decision(there, 2, ["llm-1", "llm-3", "llm-4"]))
        await until(lambda: sorted(cluster.pods) == ["llm-0", "llm-2"], what="three are gone")


@pytest.mark.parametrize(
    ("kind", "lost", "left"),
    [
        ("deployments", "llm-1", ["llm-0", "llm-2", "llm-3"]),  # replaced, by a pod of another name
        ("statefulsets", "llm-2", ["llm-0", "llm-1", "llm-2"]),  # replaced: the highest may go
        ("statefulsets", "llm-1", ["llm-0", "llm-1", "llm-2", "llm-3"]),  # to take it would take a healthy one
    ],
)
async def test_a_lost_pod_is_made_up_for_and_costs_no_healthy_one(kind: str, lost: str, left: list[str]) -> None:
    cluster = FakeKubernetes(kind, "llm", 3, [])
    async with scaling(cluster, f"{kind}/llm") as (actuator, leaving):
        healthy = [one for one in (await actuator.replicas({}, 0.0))["aggregated"] if one.id != lost]
        await actuator.carry_out(decision(healthy, 3, [lost]))
        await until(lambda: lost not in leaving, what="whatever can go is gone")
        assert sorted(cluster.pods) == left
        assert {one.id for one in healthy} <= cluster.pods.keys()


async def test_a_pod_that_somebody_else_drains_is_made_up_for() -> None:
    cluster = FakeKubernetes("deployments", "llm", 2, ["10.8.0.1", "10.8.0.2"])
    drained = EngineReport("http://10.8.0.1:8000", Role.AGGREGATED, "draining", ("sim",), 0, 0)
    serving = EngineReport("http://10.8.0.2:8000", Role.AGGREGATED, "serving", ("sim",), 0, 0)
    async with scaling(cluster, "deployments/llm") as (actuator, _):
        there = (await actuator.replicas({report.engine: report for report in (drained, serving)}, 0.0))["aggregated"]
        assert [one.state for one in there] == [ReplicaState.DRAINING, ReplicaState.READY]
        await actuator.carry_out(decision(there, 2))
        assert len(cluster.pods) == 3


@pytest.mark.parametrize(
    ("path", "selector", "why"),
    [
        ("", None, "does not say by which labels its pods are found"),
        ("/spec/workers/replicas", None, "does not say by which labels its pods are found"),
        ("/spec/workers/count", "app=llm", "has no number at /spec/workers/count"),
        ("/spec/model", "app=llm", "has no number at /spec/model"),
        ("/spec/model/replicas", "app=llm", "has no number at /spec/model/replicas"),
    ],
)
async def test_a_custom_resource_that_does_not_tell_what_is_needed_changes_nothing(path: str, selector: str | None, why: str) -> None:
    cluster = FakeKubernetes("ai.example/v1/engines", "llm", 3, [], replicas_at=("spec", "workers", "replicas") if path else ())
    cluster.selector = selector
    async with scaling(cluster, f"{WORKERS}:{path}" if path else WORKERS) as (actuator, _):
        with pytest.raises(ActuatorError, match=why):
            await actuator.replicas({}, 0.0)
    assert (cluster.calls, len(cluster.pods)) == ([], 3)


async def test_a_pool_begins_with_its_replicas_and_one_that_cannot_be_started_is_lost(tmp_path: Path) -> None:
    (tmp_path / "sims-1.log").mkdir()  # no log can be written there
    pool = LaunchPool(name="sims", engine=EngineName.SIMULATED, replicas=2)
    async with routing([], admin_token=TOKEN) as router, told(router) as (routers, group), aiohttp.ClientSession() as session:
        actuator = Processes((pool,), routers, session, group, logs=tmp_path, drain_s=1.0)
        try:
            with pytest.raises(ActuatorError, match="pool 'sims'"):
                await actuator.replicas({}, 0.0)

            async def states() -> list[str]:
                return [one.state.value for one in (await actuator.replicas({}, 0.0))["sims"]]

            assert await states() == ["starting", "lost"]

            async def one_is_ready() -> bool:
                return await states() == ["ready", "lost"]

            await until(one_is_ready, what="the other is ready")
        finally:
            await actuator.close()


async def test_a_router_that_cannot_be_told_keeps_its_engine_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("planner.actuators.leaving.RETRY_S", 0.05)
    stopped: list[str] = []
    async with aiohttp.ClientSession() as session, cancelled_at_exit() as group:
        routers = Routers(session, ["http://127.0.0.1:9"], TOKEN)
        with pytest.raises(RouterUnreachable, match=r"127\.0\.0\.1:9"):
            await routers.drain("http://engine:8000")
        leaving = Leaving(routers, group, 1.0)

        async def stop() -> None:
            stopped.append("stopped")

        leaving.begin("pod", "http://engine:8000", stop)
        tries: list[None] = []
        real = routers.drained

        async def counted(engine: str, within_s: float) -> bool:
            tries.append(None)
            return await real(engine, within_s)

        monkeypatch.setattr(routers, "drained", counted)
        await until(lambda: len(tries) > 2, what="it is tried again")
        assert not stopped
        assert "pod" in leaving
