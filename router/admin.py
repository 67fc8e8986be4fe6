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
    """The admin listener's answers."""

    def __init__(self, roster: Roster, census: Census) -> None:
        self._roster = roster
        self._census = census

    async def serve(self, exchange: Exchange) -> None:
        """Answer one request."""
        try:
            if exchange.path == ENGINES:
                await self._engines(exchange)
            elif exchange.path.startswith(ENGINE):
                self._engine(exchange, exchange.path.removeprefix(ENGINE))
            else:
                exchange.error(404, "no such path; the admin API is /admin/engines")
        except Refused as error:
            exchange.error(400, str(error))
        except UnknownEngine as error:
            exchange.error(404, f"no engine {error} is followed")

    async def _engines(self, exchange: Exchange) -> None:
        match exchange.method:
            case "GET" | "HEAD":
                _respond(exchange, 200, {"engines": self._census.engines()})
            case "POST":
                spec = await _spec(exchange.body)
                outcome = self._roster.add(spec)
                _respond(exchange, 201 if outcome is Added.NEW else 200, {"outcome": outcome.value, **self._census.engine(spec.url)})
            case _:
                _not_allowed(exchange, "GET, HEAD, POST")

    def _engine(self, exchange: Exchange, rest: bytes) -> None:
        action = next((action for action in ACTIONS if rest.endswith(action)), b"")
        engine_id = _engine_id(rest.removesuffix(action))
        match action, exchange.method:
            case b"", "GET" | "HEAD":
                _respond(exchange, 200, self._census.engine(engine_id))
            case b"", "DELETE":
                if self._roster.remove(engine_id, now=_says(exchange.query, "now")):
                    _respond(exchange, 200, {"id": engine_id, "state": "removed"})
                else:
                    _respond(exchange, 202, self._census.engine(engine_id))
            case b"/drain", "POST":
                self._roster.drain(engine_id)
                _respond(exchange, 200, self._census.engine(engine_id))
            case b"/undrain", "POST":
                self._roster.undrain(engine_id)
                _respond(exchange, 200, self._census.engine(engine_id))
            case _:
                _not_allowed(exchange, "POST" if action else "GET, HEAD, DELETE")


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


def _respond(exchange: Exchange, status: int, body: object) -> None:
    exchange.respond(status, msgspec.json.encode(body))


def _not_allowed(exchange: Exchange, methods: str) -> None:
    exchange.error(405, f"{exchange.method} is not allowed here; use {methods}", headers=[(b"allow", methods.encode())])
