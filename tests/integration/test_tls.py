"""HTTPS on both listeners, and files that guard the router but cannot."""

from __future__ import annotations

import asyncio
import os
import signal
import ssl
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec
import pytest
import trustme

from engines.simulator.engine import SimulatedEngine
from engines.types import EngineSpec
from router.app import running
from router.guards import GuardsUnusable
from router.settings import ServeSettings
from tests.integration.conftest import Log
from tests.rig import asked, fleet, prompt, routing, settings_of
from tests.waiting import until

TOKEN = "an-admin-token-for-tests"
CANARY = "canary-7f3a9"


class Authority:
    """Signs certificates for this machine's address, into files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.authority = trustme.CA()
        self.cert, self.key = folder / "cert.pem", folder / "key.pem"

    def issue(self, name: str) -> None:
        made = self.authority.issue_cert("127.0.0.1", "localhost", common_name=name)
        made.private_key_pem.write_to_path(str(self.key))
        self.cert.write_bytes(b"".join(blob.bytes() for blob in made.cert_chain_pems))

    def trusted(self) -> ssl.SSLContext:
        context = ssl.create_default_context()
        self.authority.configure_trust(context)
        return context


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    made = Authority(tmp_path)
    made.issue("first")
    return made


async def shown(authority: Authority, url: str, server_name: str | None) -> str:
    """The common name of the certificate that a new connection gets."""
    context = authority.trusted()
    if server_name is None:
        context.check_hostname = False
    where = urlsplit(url)
    _, writer = await asyncio.open_connection(where.hostname, where.port, ssl=context, server_hostname=server_name or "")
    subject = writer.get_extra_info("peercert")["subject"]
    writer.transport.abort()
    return str(dict(pair for part in subject for pair in part)["commonName"])


async def test_the_router_serves_https_streams_and_all(authority: Authority) -> None:
    tls: dict[str, Any] = {"tls_cert": str(authority.cert), "tls_key": str(authority.key)}
    async with fleet(1) as (engine,), routing([engine], trust=authority.trusted(), admin_token=TOKEN, **tls) as router:
        assert (router.url[:8], router.admin[:8]) == ("https://", "https://")
        assert (await router.chat(prompt("a"))).status == 200
        stream = await router.begin("x", stream=True, max_tokens=100)
        assert (await stream.read()).endswith(b"data: [DONE]\n\n")
        large = await router.chat("x" * 900_000, max_tokens=1)
        assert large.status in (200, 400)
        assert len(asked(engine)[-1].body) > 900_000
        async with router.session.get(router.admin + "/admin/engines", headers={"authorization": f"Bearer {TOKEN}"}) as listed:
            assert listed.status == 200
        with pytest.raises(aiohttp.ClientError):
            await router.session.get(router.url.replace("https", "http") + "/health")
        async with aiohttp.ClientSession() as stranger:
            with pytest.raises(aiohttp.ClientConnectorCertificateError):
                await stranger.get(router.url + "/health")
        old = authority.trusted()
        old.minimum_version, old.maximum_version = ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_2
        async with router.session.get(router.url + "/health", ssl=old) as answer:
            assert answer.status == 200


async def test_a_client_that_leaves_a_tls_stream_is_noticed(authority: Authority) -> None:
    tls: dict[str, Any] = {"tls_cert": str(authority.cert), "tls_key": str(authority.key)}
    async with (
        SimulatedEngine(settings_of(speedup=1, decode_step_ms=10)) as engine,
        routing([engine], trust=authority.trusted(), **tls) as router,
    ):
        stream = await router.begin("x", stream=True, max_tokens=2000)
        await stream.content.readany()
        stream.close()
        await until(lambda: engine.aborts == 1 and engine.running == 0, what="the engine sees the close")


@pytest.mark.parametrize("server_name", ["localhost", None])
async def test_a_new_certificate_is_served_without_a_restart_and_half_of_one_is_not(
    authority: Authority, server_name: str | None, logged: Log
) -> None:
    tls: dict[str, Any] = {"tls_cert": str(authority.cert), "tls_key": str(authority.key)}
    async with fleet(1) as engines, routing(engines, trust=authority.trusted(), **tls) as router:
        assert await shown(authority, router.url, server_name) == "first"
        key = authority.key.read_bytes()
        authority.issue("second")
        authority.key.write_bytes(key)  # the new certificate with the old key
        os.kill(os.getpid(), signal.SIGHUP)
        await until(lambda: logged.lines("files could not be read again; what was read last stays in force"), what="it is said")
        assert await shown(authority, router.url, server_name) == "first"
        stream = await router.begin("x", stream=True, max_tokens=3)
        authority.issue("third")

        async def third() -> bool:
            return await shown(authority, router.url, server_name) == "third"

        await until(third, what="new connections get the new certificate")
        assert (await stream.read()).endswith(b"data: [DONE]\n\n")


async def test_U3_files_that_cannot_guard_anything_are_named_before_anything_listens(authority: Authority, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(f"alice:sk-1\n{CANARY} {CANARY}\n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    (tmp_path / "token").write_text("too-short\n")
    (tmp_path / "locked").write_bytes(b"-----BEGIN ENCRYPTED PRIVATE KEY-----\nAAAA\n-----END ENCRYPTED PRIVATE KEY-----\n")
    other = Authority(tmp_path / "..")
    other.cert, other.key = tmp_path / "other-cert.pem", tmp_path / "other-key.pem"
    other.issue("other")
    settings = ServeSettings(engine=(EngineSpec("http://127.0.0.1:9"),), host="127.0.0.1", port=0, admin_port=0)
    cases: list[tuple[dict[str, object], str]] = [
        ({"api_keys_file": str(tmp_path / "none")}, "none"),
        ({"api_keys_file": str(tmp_path / "keys")}, "line 2"),
        ({"api_keys_file": str(tmp_path / "binary")}, "binary is not UTF-8"),
        ({"api_keys_file": str(tmp_path)}, str(tmp_path)),
        ({"admin_token_file": str(tmp_path / "token")}, "at least 16"),
        ({"tls_cert": str(tmp_path / "none.pem")}, "none.pem"),
        ({"tls_cert": str(authority.cert), "tls_key": str(tmp_path / "none.pem")}, "none.pem"),
        ({"tls_cert": str(authority.cert), "tls_key": str(other.key)}, str(other.key)),
        ({"tls_cert": str(authority.cert)}, str(authority.cert)),
        ({"tls_cert": str(authority.cert), "tls_key": str(tmp_path / "locked")}, "locked"),
    ]
    for changed, words in cases:
        with pytest.raises(GuardsUnusable) as raised:
            async with running(msgspec.structs.replace(settings, **changed)):
                pass
        assert words in str(raised.value), (changed, str(raised.value))
        assert CANARY not in str(raised.value)
