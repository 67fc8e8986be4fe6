"""Docker's and Kubernetes' APIs, as far as a planner uses them: what they hold can be looked at, and changes as theirs would."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

from aiohttp import web


@contextlib.asynccontextmanager
async def served(application: web.Application) -> AsyncIterator[str]:
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


class FakeDocker:
    """Containers of one compose service."""

    def __init__(self, project: str, service: str) -> None:
        self.project, self.service = project, service
        self.containers: dict[str, dict[str, Any]] = {}
        self.calls: list[str] = []
        self.addresses: list[str] = []
        """Given to containers in order."""

    def add(self, state: str = "running", **config: Any) -> str:  # noqa: ANN401
        number = len(self.containers) + 1
        name = f"{number:064x}"
        labels = {
            "com.docker.compose.project": self.project,
            "com.docker.compose.service": self.service,
            "com.docker.compose.container-number": str(number),
        }
        address = self.addresses.pop(0) if self.addresses else f"10.9.0.{number}"
        self.containers[name] = {
            "Id": name,
            "Names": [f"/{self.project}-{self.service}-{number}"],
            "State": state,
            "Created": 1_000_000 + number,
            "Labels": labels,
            "NetworkSettings": {"Networks": {"net": {"IPAddress": address}}},
            "Config": {"Image": "engine:1", "Cmd": ["serve"], "Hostname": name[:12], "Labels": labels, **config},
            "HostConfig": {"NetworkMode": "net", "DeviceRequests": [{"Count": 1}]},
        }
        return name

    def application(self) -> web.Application:
        made = web.Application()
        made.add_routes(
            [
                web.get("/containers/json", self._list),
                web.get("/containers/{id}/json", self._inspect),
                web.post("/containers/create", self._create),
                web.post("/containers/{id}/start", self._start),
                web.post("/containers/{id}/stop", self._stop),
                web.delete("/containers/{id}", self._remove),
            ]
        )
        return made

    async def _list(self, request: web.Request) -> web.Response:
        wanted = dict(label.split("=", 1) for label in json.loads(request.query["filters"])["label"])
        found = [one for one in self.containers.values() if wanted.items() <= one["Labels"].items()]
        return web.json_response([{key: value for key, value in one.items() if key not in ("Config", "HostConfig")} for one in found])

    async def _inspect(self, request: web.Request) -> web.Response:
        return web.json_response(self.containers[request.match_info["id"]])

    async def _create(self, request: web.Request) -> web.Response:
        body = await request.json()
        name = self.add("created")
        self.containers[name] |= {"Labels": body["Labels"], "Names": [f"/{request.query['name']}"], "HostConfig": body["HostConfig"]}
        self.containers[name]["Config"] = {key: value for key, value in body.items() if key not in ("HostConfig", "NetworkingConfig")}
        self.calls.append(f"create {request.query['name']}")
        return web.json_response({"Id": name}, status=201)

    async def _start(self, request: web.Request) -> web.Response:
        self.containers[request.match_info["id"]]["State"] = "running"
        self.calls.append("start")
        return web.Response(status=204)

    async def _stop(self, request: web.Request) -> web.Response:
        self.containers[request.match_info["id"]]["State"] = "exited"
        self.calls.append("stop")
        return web.Response(status=204)

    async def _remove(self, request: web.Request) -> web.Response:
        del self.containers[request.match_info["id"]]
        self.calls.append("remove")
        return web.Response(status=204)


class FakeKubernetes:
    """One workload and its pods; its controller acts at once, and deletes by cost or by ordinal as theirs do.

    `kind` is a plural of `apps/v1`, or `GROUP/VERSION/PLURAL` of a custom resource: with a scale subresource, unless the path of its replicas
    is given; with `replicas` there as its definition says, and other fields, which a patch must leave alone.
    """

    def __init__(self, kind: str, name: str, count: int, addresses: list[str], *, replicas_at: tuple[str, ...] = ()) -> None:
        self.kind, self.name = kind, name
        self.replicas_at = replicas_at
        self.selector: str | None = "app=llm"
        self.resource: dict[str, Any] = {"spec": {"model": "m", "workers": {"image": "engine:1", "ports": [8000]}}}
        self.replicas = 0
        self.pods: dict[str, dict[str, Any]] = {}
        self.calls: list[str] = []
        self.addresses = addresses
        self.conflicts = 0
        """So many patches are refused."""
        self._scale_to(count)

    def application(self) -> web.Application:
        made = web.Application()
        group, _, plural = f"apps/v1/{self.kind}".rpartition("/") if "/" not in self.kind else self.kind.rpartition("/")
        base = f"/apis/{group}/namespaces/ai/{plural}/{self.name}"
        whole = [web.get(base, self._get_whole), web.patch(base, self._patch_whole)]
        scale = [web.get(f"{base}/scale", self._get), web.patch(f"{base}/scale", self._patch)]
        made.add_routes(
            [
                *(whole if self.replicas_at else scale),
                web.get("/api/v1/namespaces/ai/pods", self._list),
                web.patch("/api/v1/namespaces/ai/pods/{name}", self._annotate),
            ]
        )
        return made

    def _scale_to(self, count: int) -> None:
        while len(self.pods) < count:
            number = next(number for number in range(100) if f"{self.name}-{number}" not in self.pods)
            self.pods[f"{self.name}-{number}"] = {
                "metadata": {"name": f"{self.name}-{number}", "creationTimestamp": "2026-01-01T00:00:00Z", "annotations": {}},
                "status": {
                    "phase": "Running",
                    "podIP": self.addresses[number] if number < len(self.addresses) else f"10.8.0.{number + 1}",
                    "conditions": [{"type": "Ready", "status": "True"}],
                },
            }
        while len(self.pods) > count:
            cost = "controller.kubernetes.io/pod-deletion-cost"
            if self.kind == "statefulsets":
                gone = max(self.pods, key=lambda name: int(name.rpartition("-")[2]))
            else:
                gone = min(self.pods, key=lambda name: int(self.pods[name]["metadata"]["annotations"].get(cost, "0")))
            del self.pods[gone]
        self.replicas = count
        for name in reversed(self.replicas_at):
            count = {name: count}  # type: ignore[assignment]
        if self.replicas_at:
            self.resource = merged(self.resource, count)

    async def _get(self, request: web.Request) -> web.Response:
        return web.json_response({"spec": {"replicas": self.replicas}, "status": self._status()})

    async def _patch(self, request: web.Request) -> web.Response:
        if self.conflicts:
            self.conflicts -= 1
            return web.json_response({"message": "the object has been modified"}, status=409)
        assert request.headers["content-type"] == "application/merge-patch+json"
        count = int((await request.json())["spec"]["replicas"])
        self.calls.append(f"scale {count}")
        self._scale_to(count)
        return web.json_response({})

    def _status(self) -> dict[str, Any]:
        return {"replicas": len(self.pods)} | ({} if self.selector is None else {"selector": self.selector})

    async def _get_whole(self, request: web.Request) -> web.Response:
        return web.json_response(self.resource | {"status": self._status()})

    async def _patch_whole(self, request: web.Request) -> web.Response:
        assert request.headers["content-type"] == "application/merge-patch+json"
        self.resource = merged(self.resource, await request.json())
        count: Any = self.resource
        for name in self.replicas_at:
            count = count[name]
        self.calls.append(f"scale {count}")
        self._scale_to(count)
        return web.json_response(self.resource)

    async def _list(self, request: web.Request) -> web.Response:
        assert request.query["labelSelector"] == "app=llm"
        return web.json_response({"items": list(self.pods.values())})

    async def _annotate(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        self.pods[name]["metadata"]["annotations"] |= (await request.json())["metadata"]["annotations"]
        self.calls.append(f"cost {name}")
        return web.json_response({})


def merged(whole: Any, patch: Any) -> Any:  # noqa: ANN401  JSON
    """A JSON merge patch, by RFC 7396."""
    if not isinstance(patch, dict):
        return patch
    made = dict(whole) if isinstance(whole, dict) else {}
    for name, value in patch.items():
        if value is None:
            made.pop(name, None)
        else:
            made[name] = merged(made.get(name), value)
    return made
