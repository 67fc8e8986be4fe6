"""How do we ask an engine about itself? Control-plane HTTP to one engine; requests of clients never come this way.

Every question has a time limit and a size limit, carries the engine's API key, follows no redirect, and fails with one of
`engines.errors`: this is the edge where aiohttp's exceptions are mapped.
"""

from __future__ import annotations

import asyncio
import errno
import os
from typing import Any

import aiohttp
import msgspec

from engines.errors import EngineAnswered, EngineBroken, EngineClosed, EngineTimeout, EngineUnreachable
from engines.types import EngineSpec
from engines.urls import normalise

MAX_ANSWER_BYTES = 16 * 1024 * 1024
"""A metrics page of a large engine is 1 MB; nothing asked here needs more than a few."""
_EXCERPT_CHARS = 120


class Reply(msgspec.Struct, frozen=True):
    """An answer, whatever its status."""

    path: str
    status: int
    server: str
    """The `Server` header; empty when there was none."""
    body: bytes

    @property
    def ok(self) -> bool:
        """Whether the status is 2xx."""
        return 200 <= self.status < 300

    def refusal(self) -> EngineAnswered:
        """This answer as the error it is when a 2xx was needed."""
        return EngineAnswered(self.status, self.path, server=self.server, excerpt=excerpt(self.body))


class EngineClient:
    """Asks one engine. The session is shared between engines and belongs to the caller.

    All methods raise `EngineUnreachable`, `EngineClosed`, `EngineTimeout` or `EngineBroken`; those that return a body raise
    `EngineAnswered` when the status is not 2xx.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        *,
        api_key: str | None = None,
        timeout_s: float = 5.0,
        max_bytes: int = MAX_ANSWER_BYTES,
    ) -> None:
        self.url = normalise(url)
        self._session = session
        self._timeout_s = timeout_s
        self._max_bytes = max_bytes
        # identity: the shared session does not decompress, because it may also serve a byte path that must not.
        self._headers = {"Accept-Encoding": "identity"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"

    @classmethod
    def of(cls, session: aiohttp.ClientSession, spec: EngineSpec, *, timeout_s: float = 5.0) -> EngineClient:
        """A client for the engine that `spec` names."""
        return cls(session, spec.url, api_key=spec.api_key, timeout_s=timeout_s)

    def elsewhere(self, url: str) -> EngineClient:
        """A client for another server of the same engine, which is not given its key."""
        return EngineClient(self._session, url, timeout_s=self._timeout_s, max_bytes=self._max_bytes)

    async def ask(self, path: str) -> Reply:
        """The answer to `GET path`, whatever its status."""
        return await self._ask("GET", path, None)

    async def status(self, path: str) -> int:
        """The status of `GET path`, whatever it is."""
        return (await self.ask(path)).status

    async def get_bytes(self, path: str) -> bytes:
        """The body of `GET path`."""
        return await self._body("GET", path, None)

    async def get_text(self, path: str) -> str:
        """The body of `GET path` as text; bytes that are not UTF-8 are replaced."""
        return (await self.get_bytes(path)).decode(errors="replace")

    async def get_json(self, path: str) -> Any:  # noqa: ANN401 - JSON
        """The body of `GET path`, parsed. Raises `EngineBroken` when it is not JSON."""
        return _parse(path, await self.get_bytes(path))

    async def post_json(self, path: str, body: object) -> Any:  # noqa: ANN401 - JSON
        """The answer to `POST path`, parsed; `body` is anything msgspec encodes. Raises `EngineBroken` when it is not JSON."""
        return _parse(path, await self._body("POST", path, msgspec.json.encode(body)))

    async def _body(self, method: str, path: str, data: bytes | None) -> bytes:
        reply = await self._ask(method, path, data)
        if not reply.ok:
            raise reply.refusal()
        return reply.body

    async def _ask(self, method: str, path: str, data: bytes | None) -> Reply:
        headers = self._headers if data is None else {**self._headers, "Content-Type": "application/json"}
        try:
            async with (
                asyncio.timeout(self._timeout_s),
                self._session.request(
                    method,
                    self.url + path,
                    data=data,
                    headers=headers,
                    allow_redirects=False,
                    timeout=aiohttp.ClientTimeout(total=None),
                ) as response,
            ):
                return Reply(path, response.status, response.headers.get("Server", ""), await self._read(path, response))
        except TimeoutError as error:
            raise EngineTimeout(path, self._timeout_s) from error
        except aiohttp.ClientConnectorError as error:
            raise EngineUnreachable(why_not_connected(error), number=error.os_error.errno) from error
        except (aiohttp.ClientPayloadError, aiohttp.ClientResponseError) as error:
            raise EngineBroken(f"{path}: what answered is not HTTP, or broke off: {excerpt(str(error).encode())}") from error
        except (aiohttp.ClientError, OSError) as error:
            raise EngineClosed(f"{path}: {str(error) or type(error).__name__}") from error

    async def _read(self, path: str, response: aiohttp.ClientResponse) -> bytes:
        body = bytearray()
        async for piece in response.content.iter_any():
            body += piece
            if len(body) > self._max_bytes:
                raise EngineBroken(f"{path}: the answer is longer than {self._max_bytes} bytes")
        return bytes(body)


def excerpt(body: bytes) -> str:
    """The first words of an answer, on one line, for a message."""
    text = " ".join(body[: 4 * _EXCERPT_CHARS].decode(errors="replace").split())
    return text if len(text) <= _EXCERPT_CHARS else text[:_EXCERPT_CHARS] + "…"


def _parse(path: str, body: bytes) -> Any:  # noqa: ANN401 - JSON
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise EngineBroken(f"{path}: the answer is not JSON ({excerpt(body)!r})") from error


def why_not_connected(error: aiohttp.ClientConnectorError) -> str:
    """The reason alone: aiohttp's text repeats host and port, and uvloop's repeats the errno."""
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return f"host {error.host} is not known"
    if isinstance(error, aiohttp.ClientSSLError):
        return f"TLS failed: {error.os_error}"  # its errno is OpenSSL's, not the system's
    number = error.os_error.errno
    if number is not None and number in errno.errorcode:
        return os.strerror(number).lower()
    return str(error.os_error) or str(error)
