"""What a source tells, gathered; and the APIs that sources ask, as far as they are asked."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import deque
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Self
from urllib.parse import unquote

from aiohttp import web

from discovery.sources.finder import Finder
from discovery.sources.source import Source
from engines.types import EngineSpec
from tests.waiting import alongside


class Heard:
    """A target that follows nothing, and remembers."""

    def __init__(self) -> None:
        self.specs: dict[str, EngineSpec] = {}

    def follow(self, spec: EngineSpec, source: str) -> None:
        self.specs[spec.url] = spec

    def release(self, engine_id: str) -> None:
        del self.specs[engine_id]

    @property
    def urls(self) -> list[str]:
        return sorted(self.specs)


@contextlib.asynccontextmanager
async def finding(source: Source) -> AsyncIterator[tuple[Finder, Heard]]:
    """A finder that asks one source while the block lasts."""
    heard = Heard()
    finder = Finder([source], heard)
    async with alongside(finder.run()):
        yield finder, heard


class DockerDaemon:
    """Docker's API on a socket: containers, listed and filtered as Docker does, and its events. `quiet`: events are lost."""

    def __init__(self, socket: Path) -> None:
        self.socket = socket
        self.containers: dict[str, dict[str, Any]] = {}
        self.quiet = False
        self.listed = 0
        self.broken = False
        self._streams: set[asyncio.Queue[dict[str, Any] | None]] = set()
        self._runner: web.AppRunner | None = None

    @property
    def address(self) -> str:
        return f"unix://{self.socket}"

    @property
    def heard(self) -> int:
        """How many follow its events."""
        return len(self._streams)

    def run(self, name: str, address: str, **labels: str) -> None:
        self.containers[name] = {
            "Id": name * 8,
            "Names": [f"/{name}"],
            "State": "running",
            "Labels": {f"commutator.{key}".replace("_", "-"): value for key, value in labels.items()},
            "HostConfig": {"NetworkMode": "bridge"},
            "NetworkSettings": {"Networks": {"bridge": {"IPAddress": address, "GlobalIPv6Address": ""}}},
        }
        self._tell("start", name)

    def stop(self, name: str) -> None:
        del self.containers[name]
        self._tell("die", name)

    def _tell(self, action: str, name: str) -> None:
        if not self.quiet:
            for stream in self._streams:
                stream.put_nowait({"Type": "container", "Action": action, "Actor": {"ID": name * 8}, "time": 1_700_000_000})

    async def start(self) -> None:
        made = web.Application()
        made.add_routes(
            [
                web.get("/version", self._version),
                web.get("/{version:v[0-9.]+}/containers/json", self._list),
                web.get("/{version:v[0-9.]+}/events", self._events),
            ]
        )
        self._runner = web.AppRunner(made, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.UnixSite(self._runner, str(self.socket)).start()

    async def close(self) -> None:
        for stream in self._streams:
            stream.put_nowait(None)
        if self._runner is not None:
            await self._runner.cleanup()
        self._runner = None

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"ApiVersion": "1.47", "Version": "27.0"})

    async def _list(self, request: web.Request) -> web.Response:
        self.listed += 1
        if self.broken:
            return web.json_response({"message": "out of files"}, status=500)
        filters = json.loads(request.query["filters"])
        assert filters["status"] == ["running"]
        wanted = filters["label"]
        return web.json_response([one for one in self.containers.values() if all(label in one["Labels"] for label in wanted)])

    async def _events(self, request: web.Request) -> web.StreamResponse:
        assert json.loads(request.query["filters"])["type"] == ["container"]
        stream: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        answer = web.StreamResponse(headers={"content-type": "application/json"})
        await answer.prepare(request)
        self._streams.add(stream)
        try:
            while (event := await stream.get()) is not None:
                await answer.write(json.dumps(event).encode() + b"\n")
        finally:
            self._streams.discard(stream)
        return answer


class KubernetesApi:
    """The API server's lists and watches of one resource, with versions, pages, bookmarks, and all that ends a watch."""

    def __init__(self, resource: str = "/api/v1/namespaces/ns/pods", token: str = "t0ken") -> None:  # noqa: S107  made up
        self.resource = resource
        self.token = token
        self.objects: dict[str, dict[str, Any]] = {}
        self.lists: list[dict[str, str]] = []
        self.watches: list[dict[str, str]] = []
        self.lose = False
        """Changes are told to no watch."""
        self.refuse = 0
        """Status to answer everything with, if any."""
        self.version = 100
        self._oldest = 0
        self._history: deque[tuple[int, dict[str, Any]]] = deque()
        self._streams: set[asyncio.Queue[dict[str, Any] | str]] = set()
        self._runner: web.AppRunner | None = None
        self.url = ""

    @property
    def heard(self) -> int:
        return len(self._streams)

    def put(self, item: dict[str, Any]) -> None:
        name = item["metadata"]["name"]
        kind = "MODIFIED" if name in self.objects else "ADDED"
        self._change(kind, name, item)

    def delete(self, name: str) -> None:
        self._change("DELETED", name, self.objects[name])

    def bookmark(self) -> None:
        """Time has passed elsewhere: the version of all is another."""
        self.version += 10
        self._tell({"type": "BOOKMARK", "object": {"kind": "Pod", "metadata": {"resourceVersion": str(self.version)}}})

    def compact(self) -> None:
        """Versions of before are forgotten: a watch from one is answered 410 Gone."""
        self._oldest = self.version
        self._history.clear()

    def expire(self) -> None:
        """Watches that run are told 410 Gone."""
        self._tell({"type": "ERROR", "object": {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}})
        self._tell("end")

    def break_off(self) -> None:
        """Watches end amid a line, as when a server or a proxy dies."""
        self._tell("break")

    def _change(self, kind: str, name: str, item: dict[str, Any]) -> None:
        self.version += 1
        item = item | {"metadata": item["metadata"] | {"resourceVersion": str(self.version)}}
        if kind == "DELETED":
            del self.objects[name]
        else:
            self.objects[name] = item
        event = {"type": kind, "object": item}
        if not self.lose:
            self._history.append((self.version, event))
            self._tell(event)

    def _tell(self, event: dict[str, Any] | str) -> None:
        for stream in self._streams:
            stream.put_nowait(event)

    def kubeconfig(self, folder: Path) -> str:
        file = folder / "kubeconfig"
        file.write_text(
            json.dumps(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "current-context": "it",
                    "contexts": [{"name": "it", "context": {"cluster": "it", "user": "me", "namespace": "ns"}}],
                    "clusters": [{"name": "it", "cluster": {"server": self.url}}],
                    "users": [{"name": "me", "user": {"token": self.token}}],
                }
            )
        )
        return str(file)

    async def __aenter__(self) -> Self:
        made = web.Application()
        made.add_routes([web.get(self.resource, self._get)])
        self._runner = web.AppRunner(made, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._tell("end")
        assert self._runner is not None
        await self._runner.cleanup()

    async def _get(self, request: web.Request) -> web.StreamResponse:
        query = {name: unquote(value) for name, value in request.query.items()}
        if request.headers.get("authorization") != f"Bearer {self.token}":
            return _status(401, "Unauthorized")
        if self.refuse:
            return _status(self.refuse, "etcdserver: leader changed")
        return await (self._watch(request, query) if "watch" in query else self._list(query))

    async def _list(self, query: dict[str, str]) -> web.Response:
        self.lists.append(query)
        label, _, value = query["labelSelector"].partition("=")
        chosen = [one for _, one in sorted(self.objects.items()) if one["metadata"]["labels"].get(label) == value]
        begin = int(query.get("continue", "0"))
        if "continue" in query and begin == 404:
            return _status(410, "The provided continue parameter is too old")
        page = chosen[begin : begin + int(query["limit"])] if "limit" in query else chosen
        more = {"continue": str(begin + len(page))} if begin + len(page) < len(chosen) else {}
        return web.json_response({"metadata": {"resourceVersion": str(self.version)} | more, "items": page})

    async def _watch(self, request: web.Request, query: dict[str, str]) -> web.StreamResponse:
        self.watches.append(query)
        since = int(query["resourceVersion"])
        answer = web.StreamResponse(headers={"content-type": "application/json"})
        await answer.prepare(request)
        stream: asyncio.Queue[dict[str, Any] | str] = asyncio.Queue()
        if since < self._oldest:
            stream.put_nowait({"type": "ERROR", "object": {"kind": "Status", "code": 410, "message": "too old resource version"}})
            stream.put_nowait("end")
        for version, event in self._history:
            if version > since:
                stream.put_nowait(event)
        self._streams.add(stream)
        try:
            while (told := await stream.get()) != "end":
                if told == "break":
                    await answer.write(b'{"type": "ADDED", "object": {"metad')
                    assert request.transport is not None
                    request.transport.close()
                    break
                await answer.write(json.dumps(told).encode() + b"\n")
        finally:
            self._streams.discard(stream)
        return answer


def _status(code: int, message: str) -> web.Response:
    return web.json_response({"kind": "Status", "code": code, "message": message}, status=code)
