"""How are pods made more and fewer? Through the `scale` subresource of what owns them, or a custom resource's own field.

    Deployment     : victims are drained, marked as the cheapest to delete, and then there are fewer
    StatefulSet    : the highest ordinals go, whoever they are: so those are the victims, and a lost one below them stays
    custom resource: as a Deployment; `GROUP/VERSION/PLURAL/NAME:/spec/workers/replicas` without a scale subresource of its own

Inside a cluster the service account's token is used (it may get and patch what it scales, and list and patch pods); elsewhere `kubectl proxy`.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self
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

ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
IN_CLUSTER: Final = "https://kubernetes.default.svc"
DELETION_COST: Final = "controller.kubernetes.io/pod-deletion-cost"
APPS: Final = frozenset({"deployments", "statefulsets", "replicasets"})
TIMEOUT_S: Final = 30.0


class Scaled(msgspec.Struct, frozen=True):
    """What is scaled, and how."""

    path: str
    """Of the resource, within the API."""
    field: tuple[str, ...] = ()
    """Where its replicas are written; empty: by the scale subresource."""
    ordered: bool = False
    """The highest ordinals go first."""


class Kubernetes:
    """Scales what owns pods."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        token: Path | None,
        namespace: str,
        targets: Mapping[str, str],
        leaving: Leaving,
    ) -> None:
        self._session = session
        self._token = token
        self._namespace = namespace
        self._scaled = {pool: scaled(target, namespace) for pool, target in targets.items()}
        self._leaving = leaving
        self._counting = asyncio.Lock()
        """Held from reading a count to writing another: of pods that leave at once, each is one less."""
        self._pods: dict[str, tuple[str, str, str | None]] = {}
        """By replica: pool, pod and engine."""
        self._drained: set[str] = set()
        """Those that somebody else drains: they are there, and carry nothing new."""

    @classmethod
    def of(cls, settings: PlanSettings, routers: Routers, group: asyncio.TaskGroup) -> Self:
        """As the settings say. Raises ActuatorError where the API cannot be found."""
        token, api, context = None, settings.kubernetes_api, None
        namespace = settings.kubernetes_namespace
        if api is None:
            if not (ACCOUNT / "token").exists():
                raise ActuatorError("Kubernetes' API is not known here: run in a pod, or name `kubectl proxy` as kubernetes_api")
            api, token = IN_CLUSTER, ACCOUNT / "token"
            context = ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt"))
            namespace = namespace or (ACCOUNT / "namespace").read_text(encoding="utf-8").strip()
        session = aiohttp.ClientSession(
            base_url=api,
            connector=aiohttp.TCPConnector(ssl=context if context is not None else True),
            timeout=aiohttp.ClientTimeout(total=TIMEOUT_S),
        )
        targets = {pool.name: settings.limits(pool.role).target or "" for pool in settings.pools}
        return cls(session, token, namespace or "default", targets, Leaving(routers, group, settings.drain_s))

    async def replicas(self, engines: Mapping[str, EngineReport], now: float) -> Mapping[str, tuple[Replica, ...]]:
        """See `Actuator`."""
        del now
        hosts = {urlsplit(engine).hostname: engine for engine in engines}
        self._pods.clear()
        self._drained.clear()
        found = {}
        for pool, target in self._scaled.items():
            _, selector = await self._scale_of(target)
            pods = await self._ask("GET", f"/api/v1/namespaces/{self._namespace}/pods", params={"labelSelector": selector})
            found[pool] = tuple(
                self._replica(pool, pod, hosts, engines)
                for pod in pods["items"]
                if pod["status"].get("phase") not in ("Succeeded", "Failed")
            )
        return found

    async def carry_out(self, decision: Decision) -> None:
        """See `Actuator`."""
        for decided in decision.pools:
            surplus = max(0, decided.current - decided.target)
            lost = frozenset(decided.victims[: len(decided.victims) - surplus])
            for victim in self._victims(decided, lost, surplus):
                pool, pod, engine = self._pods[victim]
                self._leaving.begin(victim, engine, lambda pool=pool, pod=pod: self._drop(pool, pod))  # type: ignore[misc]
            if decided.target > decided.current:
                async with self._counting:
                    besides = [one for one in self._of(decided.pool) if one in self._leaving or one in self._drained or one in lost]
                    await self._set(self._scaled[decided.pool], decided.target + len(besides))

    async def close(self) -> None:
        """See `Actuator`: pods go on without us."""
        await self._session.close()

    # inside

    def _of(self, pool: str) -> list[str]:
        return [replica for replica, (of, _, _) in self._pods.items() if of == pool]

    def _victims(self, decided: PoolDecision, lost: frozenset[str], surplus: int) -> Sequence[str]:
        """Of a StatefulSet, those that Kubernetes would take: a lost one below others stays, since it would be one of them that goes."""
        if not self._scaled[decided.pool].ordered:
            return decided.victims
        staying = [replica for replica in self._of(decided.pool) if replica not in self._leaving]
        taken: list[str] = []
        for replica in sorted(staying, key=lambda replica: _ordinal(self._pods[replica][1]), reverse=True):
            if replica not in lost:
                if not surplus:
                    break
                surplus -= 1
            taken.append(replica)
        return taken

    def _replica(self, pool: str, pod: dict[str, Any], hosts: Mapping[str | None, str], engines: Mapping[str, EngineReport]) -> Replica:
        name = pod["metadata"]["name"]
        engine = hosts.get(pod["status"].get("podIP")) or hosts.get(name)
        replica = engine or name
        self._pods[replica] = (pool, name, engine)
        report = engines.get(engine) if engine is not None else None
        ready = any(one["type"] == "Ready" and one["status"] == "True" for one in pod["status"].get("conditions", []))
        state = ReplicaState.READY if ready and report is not None and report.state != "joining" else ReplicaState.STARTING
        if pod["metadata"].get("deletionTimestamp") or replica in self._leaving:
            state = ReplicaState.DRAINING
        elif report is not None and report.state == "draining":
            self._drained.add(replica)
            state = ReplicaState.DRAINING
        since = datetime.fromisoformat(pod["metadata"]["creationTimestamp"]).timestamp()
        return laden(Replica(replica, state, since), report)

    async def _drop(self, pool: str, pod: str) -> None:
        """A drained pod goes, and there is one less."""
        target = self._scaled[pool]
        if not target.ordered:
            body = {"metadata": {"annotations": {DELETION_COST: "-1000"}}}
            await self._ask("PATCH", f"/api/v1/namespaces/{self._namespace}/pods/{pod}", body=body)
        async with self._counting:
            count, _ = await self._scale_of(target)
            await self._set(target, max(0, count - 1))

    async def _scale_of(self, target: Scaled) -> tuple[int, str]:
        """How many there are to be, and how their pods are found."""
        found = await self._ask("GET", target.path if target.field else f"{target.path}/scale")
        selector = found.get("status", {}).get("selector")
        if not isinstance(selector, str) or not selector:  # an empty one would find every pod of the namespace
            raise ActuatorError(f"{target.path} does not say by which labels its pods are found (status.selector)")
        if not target.field:
            return int(found["spec"].get("replicas", 0)), selector
        count: Any = found
        for name in target.field:
            count = count.get(name) if isinstance(count, dict) else None
        if not isinstance(count, int):
            raise ActuatorError(f"{target.path} has no number at /{'/'.join(target.field)}")
        return count, selector

    async def _set(self, target: Scaled, count: int) -> None:
        body: dict[str, Any] = {"spec": {"replicas": count}}
        if target.field:
            body = {target.field[-1]: count}
            for name in reversed(target.field[:-1]):
                body = {name: body}
        await self._ask("PATCH", target.path if target.field else f"{target.path}/scale", body=body)

    async def _ask(self, method: str, path: str, *, params: dict[str, str] | None = None, body: object = None) -> Any:  # noqa: ANN401  JSON
        headers = {"content-type": "application/merge-patch+json", "accept": "application/json"}
        if self._token is not None:  # read each time: it is renewed in place
            headers["authorization"] = "Bearer " + (await asyncio.to_thread(self._token.read_text, encoding="utf-8")).strip()
        data = None if body is None else msgspec.json.encode(body)
        try:
            async with self._session.request(method, path, params=params, data=data, headers=headers) as response:
                answer = await response.read()
                if response.status >= 400:
                    words = answer[:300].decode("utf-8", "replace")
                    raise ActuatorError(f"Kubernetes answers {response.status} to {method} {path}: {words}")
                return msgspec.json.decode(answer)
        except (aiohttp.ClientError, TimeoutError, OSError, msgspec.DecodeError) as error:
            raise ActuatorError(f"Kubernetes' API: {error or type(error).__name__}") from error


def scaled(target: str, namespace: str) -> Scaled:
    """What a setting names. Raises ActuatorError.

    >>> scaled("deployments/llm", "ai").path
    '/apis/apps/v1/namespaces/ai/deployments/llm'
    >>> scaled("leaderworkerset.x-k8s.io/v1/leaderworkersets/llm:/spec/replicas", "ai").field
    ('spec', 'replicas')
    """
    resource, _, pointer = target.partition(":")
    match resource.split("/"):
        case [kind, name] if kind in APPS:
            path = f"/apis/apps/v1/namespaces/{namespace}/{kind}/{name}"
        case [group, version, plural, name]:
            path = f"/apis/{group}/{version}/namespaces/{namespace}/{plural}/{name}"
        case _:
            raise ActuatorError(f"{target!r} is neither deployments/NAME, statefulsets/NAME nor GROUP/VERSION/PLURAL/NAME[:/path]")
    return Scaled(path, tuple(part for part in pointer.split("/") if part), ordered=resource.startswith("statefulsets/"))


def _ordinal(pod: str) -> int:
    last = pod.rpartition("-")[2]
    return int(last) if last.isdigit() else 0
