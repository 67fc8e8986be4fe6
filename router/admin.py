"""How is the fleet looked at and changed while the router runs? An HTTP API on a listener of its own, behind a token of its own.

    GET    /admin/engines                what is known of every engine
    POST   /admin/engines                {"url": "http://h:8000", "role": …}: the keys of an engine in the configuration file
    GET    /admin/engines/ID             of one; ID is its URL, encoded or as it is
    DELETE /admin/engines/ID             drain it, then follow it no more; with ?now=1, at once
    POST   /admin/engines/ID/drain       nothing new goes there; what it has ends well
    POST   /admin/engines/ID/undrain     it takes requests again

Who may call is decided at the listener's door (`keys`). What is changed here lasts until the process ends: it is not written anywhere.
"""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING, Final
from urllib.parse import parse_qs, unquote, urlsplit

import msgspec

from discovery.config.errors import ConfigError
from discovery.config.specs import build_engine_spec
from engines.urls import WILDCARDS, normalise, split_tcp
from router.addresses import refusal
from router.errand import in_task
from router.processes.messages import AdminCall, AdminReply
from router.roster import Added, UnknownEngine

if TYPE_CHECKING:
    from engines.types import EngineSpec
    from router.census import Census
    from router.exchange import Exchange
    from router.roster import Roster

ENGINES: Final = b"/admin/engines"
ENGINE: Final = ENGINES + b"/"
ACTIONS: Final = (b"/drain", b"/undrain")
MAX_BODY_BYTES: Final = 64 * 1024
RESOLVE_TIMEOUT_S: Final = 5.0


class Refused(Exception):
    """The request cannot be done; the message is for whoever asked."""


class Admin:
    """What is done and told. `answer` is what all processes of a group do; `serve` is one process's own listener."""

    def __init__(self, roster: Roster, census: Census) -> None:
        self._roster = roster
        self._census = census

    async def serve(self, exchange: Exchange) -> None:
        """Answer one request."""
        respond(exchange, await self.answer(AdminCall(exchange.method, exchange.path, exchange.query, exchange.body)))

    async def answer(self, call: AdminCall) -> AdminReply:
        """What comes of it."""
        try:
            if call.path == ENGINES:
                return await self._engines(call)
            if call.path.startswith(ENGINE):
                return self._engine(call, call.path.removeprefix(ENGINE))
            return AdminReply(404, error="no such path; the admin API is /admin/engines")
        except Refused as error:
            return AdminReply(400, error=str(error))
        except UnknownEngine as error:
            return AdminReply(404, error=f"no engine {error} is followed")

    async def _engines(self, call: AdminCall) -> AdminReply:
        match call.method:
            case "GET" | "HEAD":
                return _reply(200, {"engines": self._census.engines()})
            case "POST":
                spec = await _spec(call.body)
                outcome = self._roster.add(spec)
                return _reply(201 if outcome is Added.NEW else 200, {"outcome": outcome.value, **self._census.engine(spec.url)})
            case _:
                return _not_allowed(call, "GET, HEAD, POST")

    def _engine(self, call: AdminCall, rest: bytes) -> AdminReply:
        action = next((action for action in ACTIONS if rest.endswith(action)), b"")
        engine_id = _engine_id(rest.removesuffix(action))
        match action, call.method:
            case b"", "GET" | "HEAD":
                return _reply(200, self._census.engine(engine_id))
            case b"", "DELETE":
                if self._roster.remove(engine_id, now=_says(call.query, "now")):
                    return _reply(200, {"id": engine_id, "state": "removed"})
                return _reply(202, self._census.engine(engine_id))
            case b"/drain", "POST":
                self._roster.drain(engine_id)
                return _reply(200, self._census.engine(engine_id))
            case b"/undrain", "POST":
                self._roster.undrain(engine_id)
                return _reply(200, self._census.engine(engine_id))
            case _:
                return _not_allowed(call, "POST" if action else "GET, HEAD, DELETE")


def respond(exchange: Exchange, reply: AdminReply) -> None:
    """Send a reply."""
    if reply.error:
        exchange.error(reply.status, reply.error, headers=[(b"allow", reply.allow.encode())] if reply.allow else None)
    else:
        exchange.respond(reply.status, reply.body)


async def _spec(body: bytes) -> EngineSpec:
    """The engine that a body describes, at an address where one can be."""
    try:
        spec = build_engine_spec(msgspec.json.decode(body, type=dict[str, object]), strict=True)
    except ConfigError as error:
        raise Refused(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Refused(f"the body is not a JSON object that describes an engine: {error}") from None
    events = {parts[0] for address in (spec.kv_events, spec.kv_replay) if address is not None and (parts := split_tcp(address)) is not None}
    for host in {urlsplit(spec.url).hostname or "", *(events - WILDCARDS)}:  # a wildcard there means the engine's own host
        await in_task(_must_be_fit(host))  # it looks at the clock
    return spec


async def _must_be_fit(host: str) -> None:
    """Every address that the host's name stands for is one where an engine can be. Names are looked up as a connection would."""
    try:
        async with asyncio.timeout(RESOLVE_TIMEOUT_S):
            found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise Refused(f"the host {host!r} is not known") from None
    except TimeoutError:
        raise Refused(f"the host {host!r} could not be looked up within {RESOLVE_TIMEOUT_S:g} s") from None
    for *_, address in found:
        why = refusal(str(address[0]))
        if why is not None:
            raise Refused(f"the host {host!r} is at {address[0]}, which is {why}; no engine is added there")


def _engine_id(written: bytes) -> str:
    """An engine's id as it may be written in a path. Raises UnknownEngine for what can be none."""
    url = unquote(written.decode("latin-1"))
    try:
        return normalise(url)
    except ValueError:
        raise UnknownEngine(repr(url)) from None


def _says(query: bytes, name: str) -> bool:
    """Whether a query has a switch on. Raises Refused for a value that is neither on nor off."""
    value = parse_qs(query.decode("latin-1"), keep_blank_values=True).get(name, ["0"])[0]
    if value not in ("0", "1"):
        raise Refused(f"`{name}` is 1 or 0, not {value!r}")
    return value == "1"


def _reply(status: int, body: object) -> AdminReply:
    return AdminReply(status, msgspec.json.encode(body))


def _not_allowed(call: AdminCall, methods: str) -> AdminReply:
    return AdminReply(405, error=f"{call.method} is not allowed here; use {methods}", allow=methods)
