"""Which engines run in Kubernetes? Pods, or the endpoints of services, that a label selector chooses; listed, then watched.

    list ──▶ what there is, and a resource version ──▶ watch from it: ADDED, MODIFIED, DELETED, BOOKMARK …
      ▲        disconnected, or 5 minutes are over: watch again from the last version                │
      └── 410 Gone (the version is too old), an error, or `relist_s` are over ◀──────────────────────┘

A list says everything: an event that was lost is made good by the next one. A pod that is told to end leaves at once, and drains while it
still runs. Whether an engine is ready is asked of the engine, not of its pod.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import aiohttp
import msgspec

from discovery.sources.found import Found, SourceFailed, Tell
from discovery.sources.objects import KINDS, Kind, found_in

if TYPE_CHECKING:
    from kubernetes_asyncio.client import ApiClient

INSTALL: Final = "kubernetes-asyncio is not installed: pip install 'commutator[kubernetes]'"
ASK_TIMEOUT_S: Final = 30.0
WATCH_S: Final = 300
"""The server ends a watch after so long; another goes on from where it was."""
RELIST_S: Final = 300.0
LASTED_S: Final = 5.0
MAX_BROKEN: Final = 2
AGAIN_S: Final = 0.2
PAGE: Final = 500
MAX_LINE: Final = 4 * 1024 * 1024
OWN_NAMESPACE: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


class _Gone(Exception):
    """The server does not know that version any more."""


class _Meta(msgspec.Struct):
    resourceVersion: str = ""  # noqa: N815  Kubernetes' own name
    continue_: str = msgspec.field(default="", name="continue")


class _List(msgspec.Struct):
    metadata: _Meta
    items: list[dict[str, Any]] = []


class _Event(msgspec.Struct):
    type: str
    object: dict[str, Any]


class KubernetesSource:
    """One selector in one namespace, or in all."""

    def __init__(
        self,
        selector: str,
        *,
        kind: str = "pods",
        namespace: str | None = None,
        kubeconfig: str | None = None,
        relist_s: float = RELIST_S,
    ) -> None:
        """`namespace`: None for our own, `*` for all. `kubeconfig`: None for the pod's own account, or where there is none, the user's."""
        self.name = f"kubernetes {selector}"
        self.relists = self.watches = 0
        self._selector = selector
        self._kind: Kind = KINDS[kind]
        self._namespace = namespace
        self._relist_s = relist_s
        self._kubeconfig = kubeconfig
        self._clock = time.monotonic
        self._objects: dict[str, dict[str, Any]] = {}
        self._version = ""

    async def run(self, tell: Tell) -> None:
        """See `Source`."""
        try:
            async with _api(self._kubeconfig) as (api, own):
                path = self._kind.path(self._namespace or own)
                while True:
                    await self._list(api, path)
                    tell(self._found())
                    await self._watch(api, path, tell, until=self._clock() + self._relist_s)
        except (aiohttp.ClientError, TimeoutError, OSError, msgspec.MsgspecError) as error:
            raise SourceFailed(str(error) or type(error).__name__) from None

    async def _list(self, api: ApiClient, path: str) -> None:
        """Everything there is, page by page, as of one version."""
        objects: dict[str, dict[str, Any]] = {}
        query, version = {"labelSelector": self._selector, "limit": str(PAGE)}, ""
        while True:
            async with await self._ask(api, path, query, ASK_TIMEOUT_S) as answer:
                if answer.status == 410 and "continue" in query:  # the rest of the pages is too old: from the beginning, in one
                    objects, query = {}, {"labelSelector": self._selector}
                    continue
                page = msgspec.json.decode(await self._body(answer), type=_List)
            objects |= {_key(item): item for item in page.items}
            version = page.metadata.resourceVersion
            if not page.metadata.continue_:
                break
            query["continue"] = page.metadata.continue_
        self.relists += 1
        self._objects, self._version = objects, version

    async def _watch(self, api: ApiClient, path: str, tell: Tell, until: float) -> None:
        """Take in what changes, until it is time to list again."""
        broken = 0
        while (left := until - self._clock()) > 0:
            query = {
                "labelSelector": self._selector,
                "watch": "1",
                "allowWatchBookmarks": "true",
                "resourceVersion": self._version,
                "timeoutSeconds": str(max(1, min(WATCH_S, int(left)))),
            }
            began, version = self._clock(), self._version
            self.watches += 1
            try:
                async with asyncio.timeout(left), await self._ask(api, path, query, None) as answer:
                    if answer.status == 410:
                        return
                    if answer.status != 200:
                        await self._body(answer)
                    async for line in _lines(answer):
                        if self._take(msgspec.json.decode(line, type=_Event)):
                            tell(self._found())
            except _Gone:
                return
            except TimeoutError:
                return
            except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError):
                # Broken off: it goes on from the last version, unless that is broken off at once too.
                broken = 1 if self._version != version or self._clock() - began > LASTED_S else broken + 1
                if broken > MAX_BROKEN:
                    raise
                await asyncio.sleep(AGAIN_S)

    def _take(self, event: _Event) -> bool:
        """Whether something is otherwise now. Raises _Gone, and SourceFailed for another error."""
        match event.type:
            case "ERROR":
                if event.object.get("code") == 410:
                    raise _Gone
                raise SourceFailed(str(event.object.get("message") or event.object))
            case "BOOKMARK":
                pass
            case "ADDED" | "MODIFIED":
                self._objects[_key(event.object)] = event.object
            case "DELETED":
                self._objects.pop(_key(event.object), None)
            case _:
                return False
        self._version = event.object.get("metadata", {}).get("resourceVersion") or self._version
        return event.type != "BOOKMARK"

    def _found(self) -> Found:
        return found_in(self._kind, self._objects.values(), os.environ)

    async def _ask(self, api: ApiClient, path: str, query: dict[str, str], timeout_s: float | None) -> aiohttp.ClientResponse:
        headers: dict[str, str] = {"Accept": "application/json"}
        params = list(query.items())
        await api.update_params_for_auth(headers, params, ["BearerToken"])
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=ASK_TIMEOUT_S)
        url = f"{api.configuration.host}{path}"
        return await api.rest_client.pool_manager.get(url, params=params, headers=headers, timeout=timeout)

    async def _body(self, answer: aiohttp.ClientResponse) -> bytes:
        body: bytes = await answer.read()
        if answer.status != 200:
            raise SourceFailed(f"the API server answered {answer.status}: {_message(body)}")
        return body


async def _lines(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Lines of any length up to a limit: a pod can be longer than what a reader gathers by itself."""
    rest = bytearray()
    async for piece in answer.content.iter_any():
        rest += piece
        *lines, last = rest.split(b"\n")
        rest = bytearray(last)
        if len(rest) > MAX_LINE:
            raise SourceFailed(f"a watch event is longer than {MAX_LINE} bytes")
        for line in lines:
            if line.strip():
                yield bytes(line)


def _key(item: Mapping[str, Any]) -> str:
    meta = item.get("metadata", {})
    return f"{meta.get('namespace', '')}/{meta.get('name', '')}"


def _message(body: bytes) -> str:
    try:
        told = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return body[:200].decode(errors="replace")
    return str(told.get("message", told))[:500] if isinstance(told, dict) else str(told)[:500]


@asynccontextmanager
async def _api(kubeconfig: str | None) -> AsyncIterator[tuple[ApiClient, str]]:
    """A client, and the namespace that is ours. Raises SourceFailed."""
    client, config = await asyncio.to_thread(_library)
    configuration = client.Configuration()
    try:
        if kubeconfig is None and await asyncio.to_thread(OWN_NAMESPACE.exists):
            await asyncio.to_thread(config.load_incluster_config, client_configuration=configuration)
            namespace = (await asyncio.to_thread(OWN_NAMESPACE.read_text)).strip()
        else:
            # it reads files as if nobody else had the loop, and may run a program that gives out tokens: on a loop of its own
            loading = config.load_kube_config(config_file=kubeconfig, client_configuration=configuration)
            await asyncio.to_thread(asyncio.run, loading)
            _, context = await asyncio.to_thread(config.list_kube_config_contexts, config_file=kubeconfig)
            namespace = (context or {}).get("context", {}).get("namespace") or "default"
    except (config.ConfigException, OSError) as error:
        raise SourceFailed(f"no way to the API server is configured: {error}") from None
    api = client.ApiClient(configuration)
    try:
        yield api, namespace
    finally:
        await api.close()


def _library() -> tuple[Any, Any]:
    """Importing it takes a second or two."""
    try:
        from kubernetes_asyncio import client, config  # noqa: PLC0415  an extra
    except ImportError:
        raise SourceFailed(INSTALL) from None
    return client, config
