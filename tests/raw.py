"""How does a test speak HTTP byte by byte? A client that sends any bytes and reads answers strictly (h11), and a scripted server."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from urllib.parse import urlsplit

import h11
import msgspec

READ_WITHIN_S = 20.0


class Reply(msgspec.Struct):
    """One answer as a strict client sees it."""

    status: int
    headers: dict[str, str]
    body: bytes = b""
    whole: bool = False
    """It ended properly."""
    reset: bool = False
    """The connection was reset, not closed."""
    interim: list[int] = []
    """Statuses of 1xx answers before it."""


class RawClient:
    """One connection to a server."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.patience_s = READ_WITHIN_S
        """How long it waits for anything to come."""
        self._left = b""

    async def send(self, *parts: bytes) -> None:
        """Send the parts, each in a segment of its own."""
        for part in parts:
            self.writer.write(part)
            await self.writer.drain()
            if len(parts) > 1:
                await asyncio.sleep(0)

    async def read(self) -> bytes:
        """Whatever comes next; empty at the end."""
        if self._left:
            left, self._left = self._left, b""
            return left
        async with asyncio.timeout(self.patience_s):
            return await self.reader.read(1 << 18)

    async def read_until(self, end: bytes) -> bytes:
        """Everything up to and with `end`; what came behind it is left for later."""
        data = b""
        while end not in data:
            piece = await self.read()
            assert piece, (data, end)
            data += piece
        at = data.index(end) + len(end)
        self._left = data[at:]
        return data[:at]

    async def read_to_end(self) -> bytes:
        """Everything until the server closes or resets."""
        data = b""
        with contextlib.suppress(ConnectionError):
            while piece := await self.read():
                data += piece
        return data

    async def answer(self, method: str = "POST") -> Reply:
        """The next answer, read as the answer to a request of that method."""
        parser = h11.Connection(h11.CLIENT)
        parser.send(h11.Request(method=method, target="/", headers=[("host", "x")]))
        parser.send(h11.EndOfMessage())
        interim: list[int] = []
        reply: Reply | None = None
        while True:
            try:
                event = parser.next_event()
                if event is h11.NEED_DATA:
                    parser.receive_data(await self.read())
                    continue
            except (h11.RemoteProtocolError, ConnectionError) as error:
                if reply is None:
                    raise
                reply.reset = isinstance(error, ConnectionError)
                return reply
            match event:
                case h11.InformationalResponse():
                    interim.append(event.status_code)
                case h11.Response():
                    headers = {name.decode(): value.decode("latin-1") for name, value in event.headers}
                    assert len(headers) == len(list(event.headers)), "a header came twice"
                    reply = Reply(event.status_code, headers, interim=interim)
                case h11.Data() if reply is not None:
                    reply.body += bytes(event.data)
                case h11.EndOfMessage() if reply is not None:
                    reply.whole = True
                    self._left = parser.trailing_data[0]
                    return reply
                case _:
                    raise AssertionError(event)

    def half_close(self) -> None:
        """Send no more."""
        self.writer.write_eof()

    def reset(self) -> None:
        """Leave at once."""
        self.writer.transport.abort()

    async def closed(self) -> bool:
        """Whether the server has closed, having sent nothing more."""
        return not await self.read()


@contextlib.asynccontextmanager
async def talking(port: int, *, receive_buffer: int | None = None) -> AsyncIterator[RawClient]:
    """A connection to a port of this machine; with a small `receive_buffer`, the server soon feels that nobody reads."""
    sock = socket.socket()
    sock.setblocking(False)
    if receive_buffer is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
    reader, writer = await asyncio.open_connection(sock=sock, limit=receive_buffer or 1 << 16)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        yield RawClient(reader, writer)
    finally:
        writer.transport.abort()


async def ask(url: str, request: bytes, method: str = "POST") -> Reply:
    """The answer to one request, sent byte for byte on a connection of its own."""
    async with talking(urlsplit(url).port or 0) as client:
        await client.send(request)
        return await client.answer(method)


def request(path: str, body: bytes = b"", *headers: str, method: str = "POST") -> bytes:
    """A whole request; `headers` are whole lines."""
    lines = [f"{method} {path} HTTP/1.1", "host: router", f"content-length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def websocket(path: str) -> bytes:
    """A request for a WebSocket."""
    headers = ["connection: Upgrade", "upgrade: websocket", "sec-websocket-version: 13", "sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ=="]
    return "\r\n".join([f"GET {path} HTTP/1.1", "host: router", *headers]).encode() + b"\r\n\r\n"


def port_of(url: str) -> int:
    """The port of a URL on this machine."""
    return int(url.rpartition(":")[2])


Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def scripted(script: Script) -> AsyncIterator[int]:
    """A server that does what the script says with each connection, and then closes it; its port."""
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            await script(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            tasks.discard(task)
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, backlog=4096)
    try:
        yield int(server.sockets[0].getsockname()[1])
    finally:
        server.close()
        for task in tuple(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Request(msgspec.Struct):
    """A request as a scripted server read it."""

    head: bytes
    body: bytes
    rest: asyncio.StreamReader | None = None
    """What comes behind it: of a WebSocket, or where bodies are not read."""

    @property
    def line(self) -> bytes:
        return self.head.partition(b"\r\n")[0]

    def header(self, name: str) -> bytes | None:
        for line in self.head.split(b"\r\n")[1:]:
            key, _, value = line.partition(b":")
            if key.decode().lower() == name:
                return value.strip()
        return None


async def read_head(reader: asyncio.StreamReader) -> Request:
    """The next request's head; its body is left unread."""
    head = await reader.readuntil(b"\r\n\r\n")
    return Request(head.removesuffix(b"\r\n\r\n"), b"")


async def read_request(reader: asyncio.StreamReader) -> Request:
    """The next request, whole. Raises IncompleteReadError when the client has left."""
    request = await read_head(reader)
    request.body = await reader.readexactly(int(request.header("content-length") or b"0"))
    return request
