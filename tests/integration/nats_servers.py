"""Real NATS servers as users run them: one with a configuration of the test's own, or a cluster of several."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import nkeys

from discovery.broker import find_binary
from tests.waiting import until


class NatsServer:
    """One process; `kill` ends it as a crash does."""

    def __init__(self, port: int, process: asyncio.subprocess.Process, log: Path) -> None:
        self.port = port
        self.process = process
        self.log = log

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    async def kill(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()


@contextlib.asynccontextmanager
async def nats_server(folder: Path, config: str = "", *, port: int = -1, name: str = "nats") -> AsyncIterator[NatsServer]:
    """A server with `config` besides its port, which the kernel chooses unless one is given."""
    folder = folder / name
    folder.mkdir(exist_ok=True)
    file, log = folder / "nats.conf", folder / "nats.log"
    file.write_text(f'listen: "127.0.0.1:{port}"\nports_file_dir: "{folder}"\nlog_file: "{log}"\n{config}\n')
    process = await asyncio.create_subprocess_exec(
        await asyncio.to_thread(find_binary), "--config", file, stderr=asyncio.subprocess.DEVNULL
    )
    ports = folder / f"nats-server_{process.pid}.ports"

    def listens() -> bool:
        assert process.returncode is None, log.read_text()
        with contextlib.suppress(OSError, ValueError, LookupError):
            server.port = int(json.loads(ports.read_bytes())["nats"][0].rpartition(":")[2])
        return server.port > 0

    server = NatsServer(-1, process, log)
    try:
        await until(listens, what="the NATS server listens")
        yield server
    finally:
        await server.kill()


@contextlib.asynccontextmanager
async def cluster(folder: Path, size: int = 3) -> AsyncIterator[list[NatsServer]]:
    """Servers that know each other; what is published at one is heard at all."""
    routes = [_free_port() for _ in range(size)]
    async with contextlib.AsyncExitStack() as stack:
        servers = []
        for number, port in enumerate(routes):
            others = ", ".join(f'"nats://127.0.0.1:{other}"' for other in routes if other != port)
            config = f'server_name: s{number}\ncluster {{ name: test, listen: "127.0.0.1:{port}", routes: [{others}] }}'
            servers.append(await stack.enter_async_context(nats_server(folder, config, name=f"s{number}")))
        yield servers


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class Nkey:
    """A pair of keys of one kind: operator, account or user."""

    def __init__(self, prefix: int) -> None:
        self.seed = nkeys.encode_seed(os.urandom(32), prefix).decode()
        self.public = nkeys.from_seed(bytearray(self.seed.encode())).public_key.decode()

    def signs(self, subject: str, **claims: object) -> str:
        """A JWT about `subject`."""
        body = {"iat": 1, "iss": self.public, "sub": subject, "name": "test", "nats": {"version": 2} | claims}
        body["jti"] = hashlib.sha256(json.dumps(body).encode()).hexdigest()
        text = f"{_packed(json.dumps({'typ': 'JWT', 'alg': 'ed25519-nkey'}).encode())}.{_packed(json.dumps(body).encode())}"
        return f"{text}.{_packed(nkeys.from_seed(bytearray(self.seed.encode())).sign(text.encode()))}"


def _packed(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


class Authority:
    """An operator with one account, as `nsc` makes them; lets users in by JWT."""

    def __init__(self) -> None:
        self.operator, self.account = Nkey(nkeys.PREFIX_BYTE_OPERATOR), Nkey(nkeys.PREFIX_BYTE_ACCOUNT)
        limits = dict.fromkeys(("subs", "conn", "leaf", "imports", "exports", "data", "payload"), -1) | {"wildcards": True}
        self.config = (
            f"operator: {self.operator.signs(self.operator.public, type='operator')}\n"
            f"resolver: MEMORY\n"
            f"resolver_preload: {{ {self.account.public}: {self.operator.signs(self.account.public, type='account', limits=limits)} }}\n"
        )

    def creds(self, user: Nkey | None = None) -> str:
        """A `.creds` file of a new user."""
        user = user or Nkey(nkeys.PREFIX_BYTE_USER)
        jwt = self.account.signs(user.public, type="user", subs=-1, data=-1, payload=-1)
        return (
            f"-----BEGIN NATS USER JWT-----\n{jwt}\n------END NATS USER JWT------\n\n*** IMPORTANT ***\n"
            f"-----BEGIN USER NKEY SEED-----\n{user.seed}\n------END USER NKEY SEED------\n"
        )
