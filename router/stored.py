"""Which engine keeps a stored response? Clients of the Responses API go on from an earlier answer, which only the engine that made it knows.

    an answer passes ─────────────▶ its id is noted
    `previous_response_id` ─noted─▶ the engine
             └───not noted────────▶ every engine of the model is asked, `GET /v1/responses/{id}`: another router may have
                                    passed the answer on, or this one before it was started again

A request whose response nobody keeps goes where any other would: the engine says best what is wrong with it.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

from engines.client import EngineClient
from engines.errors import EngineError
from router.errand import in_task
from router.relay import Relay

if TYPE_CHECKING:
    import aiohttp

    from engines.types import EngineInfo
    from router.exchange import Exchange, Headers

PATH: Final = "/v1/responses"
MAX_NOTED: Final = 65_536
MAX_ID_CHARS: Final = 256
MAX_ASKING: Final = 32
"""Ids looked for at a time: whoever makes them up must not have every engine asked a thousand times at once."""
MAX_BEGINNING_BYTES: Final = 4096
ASK_TIMEOUT_S: Final = 1.0
FIND_TIMEOUT_S: Final = 2.0
"""In all, the wait for others included; then the request goes where any other would."""
_BEARER: Final = b"bearer "
_ID: Final = re.compile(rb'(?:\A\s*\{|"response"\s*:\s*\{)\s*"id"\s*:\s*"([^"\\]{1,256})"')
"""An answer, or the first event of one, begins with its id at both engines."""


class Whereabouts:
    """Remembers where responses are kept, or finds out."""

    def __init__(self, session: aiohttp.ClientSession, *, pass_clients_keys: bool) -> None:
        """`pass_clients_keys`: engines without a key of their own check the client's."""
        self._session = session
        self._pass_clients_keys = pass_clients_keys
        self._noted: dict[str, str] = {}
        self._asking = asyncio.Semaphore(MAX_ASKING)

    def note(self, response_id: str, engine: str) -> None:
        """An engine has made a response. The ones noted longest ago are forgotten when there are too many. O(1)."""
        self._noted.pop(response_id, None)
        self._noted[response_id] = engine
        if len(self._noted) > MAX_NOTED:
            del self._noted[next(iter(self._noted))]

    async def find(self, response_id: str, engines: Iterable[EngineInfo], authorization: bytes | None) -> str | None:
        """The id of the one of these engines that keeps it; None when none does, or none says so in time."""
        ids = {info.id: info for info in engines}
        noted = self._noted.get(response_id)
        if noted in ids:
            return noted
        if len(response_id) > MAX_ID_CHARS:
            return None
        found = await in_task(self._ask(response_id, list(ids.values()), authorization))
        if found is not None:
            self.note(response_id, found)
        return found

    async def _ask(self, response_id: str, engines: list[EngineInfo], authorization: bytes | None) -> str | None:
        """The first one that says yes; the others are not waited for."""
        try:
            async with asyncio.timeout(FIND_TIMEOUT_S), self._asking, asyncio.TaskGroup() as group:
                asked = [group.create_task(self._keeps(info, response_id, authorization)) for info in engines]
                for answer in asyncio.as_completed(asked):
                    if found := await answer:
                        for task in asked:
                            task.cancel()
                        return found
        except TimeoutError:
            pass
        return None

    async def _keeps(self, info: EngineInfo, response_id: str, authorization: bytes | None) -> str | None:
        key = info.spec.api_key
        if key is None and self._pass_clients_keys and authorization is not None and authorization[:7].lower() == _BEARER:
            key = authorization[7:].decode("latin-1")
        client = EngineClient(self._session, info.id, api_key=key, timeout_s=ASK_TIMEOUT_S)
        try:
            return info.id if (await client.ask(f"{PATH}/{quote(response_id, safe='')}")).ok else None
        except EngineError:
            return None


class NotingRelay(Relay):
    """Notes the id of the answer it passes on."""

    __slots__ = ("_beginning", "_note")

    def __init__(self, exchange: Exchange, extra_headers: Headers, on_first_token: Callable[[], None], note: Callable[[str], None]) -> None:
        super().__init__(exchange, extra_headers, on_first_token)
        self._note: Callable[[str], None] | None = note
        self._beginning = b""

    def body(self, data: bytes, *, last: bool = False) -> None:
        """Look at the beginning, and pass it on."""
        if self._note is not None:
            self._beginning += data
            found = _ID.search(self._beginning)
            if found is not None and self.accepted:
                self._note(found[1].decode("utf-8", "replace"))
            if found is not None or len(self._beginning) > MAX_BEGINNING_BYTES:
                self._note, self._beginning = None, b""
        super().body(data, last=last)
