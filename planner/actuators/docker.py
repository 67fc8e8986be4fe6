"""How are containers made more and fewer? Those of a compose service, through Docker's API.

More: one that is stopped is started again; else the newest is made once more, from its own description, as `docker compose up --scale` would.
Fewer: drained, stopped, removed. A container's engine is the one that routers reach at one of its addresses or names.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import aiohttp
import msgspec

from planner.actuators.leaving import Leaving
from planner.actuators.types import ActuatorError
from planner.sightings import laden
from planner.types import Decision, PoolDecision, Replica, ReplicaState

if TYPE_CHECKING:
    from discovery.observations import EngineReport
    from planner.routers import Routers
    from planner.settings import PlanSettings

PROJECT: Final = "com.docker.compose.project"
SERVICE: Final = "com.docker.compose.service"
NUMBER: Final = "com.docker.compose.container-number"
STOP_S: Final = 30
TIMEOUT_S: Final = 60.0
LIVES: Final = frozenset({"running", "restarting", "created"})


class Docker:
    """Scales compose services."""

    def __init__(self, settings: PlanSettings, routers: Routers, group: asyncio.TaskGroup) -> None:
        self._pools = {pool.name: settings.limits(pool.role).target or "" for pool in settings.pools}
        path = urlsplit(settings.docker)
        unix = path.scheme == "unix"
        self._session = aiohttp.ClientSession(
            base_url="http://docker" if unix else settings.docker,
            connector=aiohttp.UnixConnector(path.path) if unix else aiohttp.TCPConnector(),
            timeout=aiohttp.ClientTimeout(total=TIMEOUT_S),
        )
        self._leaving = Leaving(routers, group, settings.drain_s)
        self._seen: dict[str, tuple[str, str | None]] = {}
        """By replica: its container, and its engine where routers know one."""

    async def replicas(self, engines: Mapping[str, EngineReport], now: float) -> Mapping[str, tuple[Replica, ...]]:
        """See `Actuator`."""
        del now
        hosts = {urlsplit(engine).hostname: engine for engine in engines}
        self._seen.clear()
        return {name: tuple([self._replica(one, hosts, engines) for one in await self._containers(name)]) for name in self._pools}

    async def carry_out(self, decision: Decision) -> None:
        """See `Actuator`."""
        for decided in decision.pools:
            for victim in decided.victims:
                container, engine = self._seen[victim]
                self._leaving.begin(victim, engine, lambda container=container: self._stop(container))  # type: ignore[misc]
            await self._grow(decided)

    async def close(self) -> None:
        """See `Actuator`: containers go on without us."""
        await self._session.close()

    # inside

    def _replica(self, container: dict[str, Any], hosts: Mapping[str | None, str], engines: Mapping[str, EngineReport]) -> Replica:
        engine = next((hosts[name] for name in _names(container) if name in hosts), None)
        name = engine or container["Id"][:12]
        self._seen[name] = (container["Id"], engine)
        report = engines.get(engine) if engine is not None else None
        state = ReplicaState.READY if report is not None and report.state not in ("joining", "ejected") else ReplicaState.STARTING
        if name in self._leaving or (report is not None and report.state == "draining"):
            state = ReplicaState.DRAINING
        return laden(Replica(name, state, float(container["Created"])), report)

    async def _containers(self, pool: str, *, stopped: bool = False) -> list[dict[str, Any]]:
        project, _, service = self._pools[pool].partition("/")
        filters = msgspec.json.encode({"label": [f"{PROJECT}={project}", f"{SERVICE}={service}"]}).decode()
        found = await self._ask("GET", "/containers/json", params={"all": "1", "filters": filters})
        return [one for one in found if (one["State"] not in LIVES) is stopped]

    async def _grow(self, decided: PoolDecision) -> None:
        missing = decided.target - decided.current
        if missing <= 0:
            return
        for container in (await self._containers(decided.pool, stopped=True))[:missing]:
            await self._ask("POST", f"/containers/{container['Id']}/start")
            missing -= 1
        for _ in range(missing):
            await self._make_another(decided.pool)

    async def _make_another(self, pool: str) -> None:
        there = await self._containers(pool) + await self._containers(pool, stopped=True)
        if not there:
            raise ActuatorError(f"the compose service {self._pools[pool]} has no container to make another one of; start it once")
        model = await self._ask("GET", f"/containers/{there[0]['Id']}/json")
        project, _, service = self._pools[pool].partition("/")
        number = 1 + max(int(one["Labels"].get(NUMBER, "0")) for one in there)
        labels = model["Config"].get("Labels", {}) | {NUMBER: str(number)}
        body = {
            **{key: value for key, value in model["Config"].items() if key != "Hostname"},
            "Labels": labels,
            "HostConfig": model["HostConfig"],
            "NetworkingConfig": {"EndpointsConfig": {name: {"Aliases": [service]} for name in model["NetworkSettings"]["Networks"]}},
        }
        made = await self._ask("POST", "/containers/create", params={"name": f"{project}-{service}-{number}"}, body=body)
        await self._ask("POST", f"/containers/{made['Id']}/start")

    async def _stop(self, container: str) -> None:
        await self._ask("POST", f"/containers/{container}/stop", params={"t": str(STOP_S)})
        await self._ask("DELETE", f"/containers/{container}")

    async def _ask(self, method: str, path: str, *, params: dict[str, str] | None = None, body: object = None) -> Any:  # noqa: ANN401  JSON
        try:
            async with self._session.request(
                method,
                path,
                params=params,
                data=None if body is None else msgspec.json.encode(body),
                headers={"content-type": "application/json"},
            ) as response:
                answer = await response.read()
                if response.status >= 400:
                    raise ActuatorError(f"Docker answers {response.status} to {method} {path}: {answer[:300].decode('utf-8', 'replace')}")
                return msgspec.json.decode(answer) if answer else None
        except (aiohttp.ClientError, TimeoutError, OSError, msgspec.DecodeError) as error:
            raise ActuatorError(f"Docker's API: {error or type(error).__name__}") from error


def _names(container: dict[str, Any]) -> Iterable[str]:
    """By which a router may reach it: addresses first, names, the beginning of its id."""
    networks = container.get("NetworkSettings", {}).get("Networks", {}).values()
    yield from (network["IPAddress"] for network in networks if network.get("IPAddress"))
    yield from (name.lstrip("/") for name in container.get("Names", []))
    yield container["Id"][:12]
