"""NATS in every form that users have: each lets us in, and what is wrong is said with the setting that it comes from."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import nkeys
import pytest
import trustme

from discovery.access import Access, AccessUnusable, split
from discovery.bus import Bus, BusOptions, BusUnreachable
from discovery.config import ConfigError, load
from router.settings import ServeSettings
from tests.integration.commands import command, is_ready
from tests.integration.conftest import Log
from tests.integration.nats_servers import Authority, Nkey, cluster, nats_server
from tests.integration.test_several_routers import holds_the_truth
from tests.rig import fleet, prompt, routing
from tests.waiting import until

CANARY = "canary-7f3a9"


@contextlib.asynccontextmanager
async def connected(url: str, **access: str) -> AsyncIterator[Bus]:
    bus = Bus(BusOptions(access=msgspec.convert(access, Access)))
    await bus.connect(url, name="test")
    try:
        yield bus
    finally:
        await bus.close()


async def works(url: str, **access: str) -> None:
    """What is published is heard."""
    async with connected(url, **access) as bus:
        heard: list[bytes] = []
        bus.subscribe("a", lambda _subject, payload, _reply: heard.append(payload))
        bus.publish("a", b"x")
        await until(lambda: heard == [b"x"], what="the message")


async def refused(url: str, **access: str) -> str:
    """Why it cannot be used."""
    with pytest.raises((BusUnreachable, AccessUnusable)) as caught:
        async with connected(url, **access):
            pass
    assert CANARY not in str(caught.value)
    return str(caught.value)


def named(server_url: str, userinfo: str) -> str:
    return server_url.replace("nats://", f"nats://{userinfo}@")


async def test_a_user_and_a_password(tmp_path: Path) -> None:
    password = f"{CANARY}/@:%"
    async with nats_server(tmp_path, f'authorization {{ user: "me", password: "{password}" }}') as server:
        await works(server.url, user="me", password=password)
        await works(named(server.url, f"me:{CANARY}%2F%40%3A%25"))
        assert "check nats_user and nats_password" in await refused(server.url, user="me", password=f"{CANARY}-wrong")
        assert "give nats_user and nats_password, nats_token, nats_creds or nats_nkey" in await refused(server.url)


async def test_a_token(tmp_path: Path) -> None:
    async with nats_server(tmp_path, f'authorization {{ token: "{CANARY}" }}') as server:
        await works(server.url, token=CANARY)
        await works(named(server.url, CANARY))
        assert "check nats_token" in await refused(server.url, token=f"{CANARY}-wrong")


async def test_an_nkey(tmp_path: Path) -> None:
    user, other = Nkey(nkeys.PREFIX_BYTE_USER), Nkey(nkeys.PREFIX_BYTE_USER)
    seed, wrong = tmp_path / "user.nk", tmp_path / "other.nk"
    seed.write_text(f"# {CANARY}\n{user.seed}\n")
    wrong.write_text(other.seed)
    async with nats_server(tmp_path, f"authorization {{ users: [ {{ nkey: {user.public} }} ] }}") as server:
        await works(server.url, nkey=str(seed))
        assert "check nats_nkey" in await refused(server.url, nkey=str(wrong))
        wrong.write_text(f"SU{CANARY}")
        assert "it holds no user's seed" in await refused(server.url, nkey=str(wrong))


async def test_credentials_with_a_jwt_are_read_again_for_every_connection(tmp_path: Path) -> None:
    ours, others = Authority(), Authority()
    creds = tmp_path / "user.creds"
    creds.write_text(ours.creds())
    async with nats_server(tmp_path, ours.config) as server:
        await works(server.url, creds=str(creds))
        async with connected(server.url, creds=str(creds)) as bus:
            creds.write_text(others.creds())
            assert "check nats_creds" in await refused(server.url, creds=str(creds))
            creds.write_text(ours.creds())
            assert bus._client is not None
            await bus._client.close()  # as if the network had
            await until(lambda: bus.counts.reconnects == 1 and bus.connected, what="it is let in with what the file holds now")


async def test_tls_with_an_authority_of_ones_own_and_certificates_on_both_sides(tmp_path: Path) -> None:
    authority, other = trustme.CA(), trustme.CA()
    ca, stranger = tmp_path / "ca.pem", tmp_path / "stranger.pem"
    authority.cert_pem.write_to_path(str(ca))
    other.cert_pem.write_to_path(str(stranger))
    for name, made in (
        ("server", authority.issue_cert("127.0.0.1")),
        ("client", authority.issue_cert("me")),
        ("forged", other.issue_cert("me")),
    ):
        made.private_key_pem.write_to_path(str(tmp_path / f"{name}.key"))
        made.cert_chain_pems[0].write_to_path(str(tmp_path / f"{name}.pem"))

    def pair(name: str) -> dict[str, str]:
        return {"cert": str(tmp_path / f"{name}.pem"), "key": str(tmp_path / f"{name}.key")}

    files = f'cert_file: "{tmp_path}/server.pem", key_file: "{tmp_path}/server.key"'
    async with nats_server(tmp_path, f"tls {{ {files} }}", name="one-sided") as server:
        await works(server.url, ca=str(ca))
        await works(server.url.replace("nats://", "tls://"), ca=str(ca))
        assert "name the authority that signed it as nats_ca" in await refused(server.url, ca=str(stranger))
        assert "name the authority that signed it as nats_ca" in await refused(server.url)
    async with nats_server(tmp_path, f'tls {{ {files}, ca_file: "{ca}", verify: true }}', name="both-sided") as server:
        await works(server.url, ca=str(ca), **pair("client"))
        assert "nats_cert" in await refused(server.url, ca=str(ca))
        assert "nats_cert" in await refused(server.url, ca=str(ca), **pair("forged"))


async def test_nothing_secret_is_shown_to_a_server_without_tls_where_tls_is_wanted(tmp_path: Path) -> None:
    creds = tmp_path / "user.creds"
    creds.write_text(Authority().creds())
    heard = bytearray()

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'INFO {"server_id":"x","version":"2.15.0","auth_required":true,"nonce":"abc","max_payload":1048576}\r\n')
        while data := await reader.read(1000):
            heard.extend(data)
        writer.close()

    server = await asyncio.start_server(greet, "127.0.0.1", 0)
    async with server:
        url = f"tls://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        assert "it offers no TLS" in await refused(url, user="me", password=CANARY)
        assert "it offers no TLS" in await refused(url, token=CANARY)
        assert "it offers no TLS" in await refused(url, creds=str(creds))
    assert b"CONNECT" not in heard


@pytest.mark.parametrize("setting", ["creds", "nkey", "ca", "cert"])
async def test_a_file_that_is_not_there_or_holds_something_else_is_named_with_its_setting(setting: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    assert f"nats_{setting}: {path}: no such file" in await refused("nats://127.0.0.1:1", **{setting: str(path)})
    path.write_text(CANARY)
    assert f"nats_{setting}: {path}: " in await refused("nats://127.0.0.1:1", **{setting: str(path)})


async def test_without_the_package_that_signs_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def none(name: str) -> object:
        raise ImportError(name)

    monkeypatch.setattr("discovery.access.importlib.import_module", none)
    (tmp_path / "user.nk").write_text(Nkey(nkeys.PREFIX_BYTE_USER).seed)
    assert "pip install 'commutator[nkeys]'" in await refused("nats://127.0.0.1:1", nkey=str(tmp_path / "user.nk"))


def test_credentials_leave_the_url_where_all_servers_have_the_same() -> None:
    assert split("nats://me:p%40@a:1, nats://b:2", Access()) == (["nats://a:1", "nats://b:2"], Access(user="me", password="p@"))
    assert split("tls://t@a:1", Access()) == (["tls://a:1"], Access(token="t", tls=True))
    different = "nats://one@a:1,nats://two@b:2"
    assert split(different, Access())[0] == different.split(",")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"nats_token": "t"}, "nats-token: has no effect without nats"),
        ({"nats": "http://a:1"}, "'http://a:1' must begin with nats://"),
        ({"nats": "nats://a:1,b:2"}, "must begin with nats://"),
        ({"nats": "nats://a:1", "nats_user": "u"}, "nats_user and nats_password belong together"),
        ({"nats": "nats://t@a:1", "nats_token": "t"}, "one way to be let in; given are the credentials in nats and nats_token"),
        ({"nats": "nats://a:1", "nats_creds": "f", "nats_nkey": "g"}, "given are nats_creds and nats_nkey"),
        ({"nats": "nats://a:1", "nats_key": "f"}, "has no effect without nats_cert"),
    ],
)
def test_U3_what_contradicts_itself_is_an_error_that_names_it(given: dict[str, str], words: str) -> None:
    argv = [part for name, value in ({"engine": "http://e:1"} | given).items() for part in (f"--{name.replace('_', '-')}", value)]
    with pytest.raises(ConfigError) as caught:
        load(ServeSettings, argv=argv, environ={}, read_file=lambda path: path, known_variables=frozenset())
    assert words in str(caught.value).replace("nats_token: has", "nats-token: has")


async def test_A7_a_router_let_in_by_password_says_it_nowhere(tmp_path: Path, logged: Log) -> None:
    logging.getLogger("nats").setLevel(logging.DEBUG)
    async with (
        nats_server(tmp_path, f'authorization {{ user: "me", password: "{CANARY}" }}') as server,
        fleet(1) as engines,
        routing(engines, nats=server.url, nats_user="me", nats_password=CANARY) as router,
    ):
        assert (await router.chat(prompt("a"))).status == 200
        assert await router.metric("router_bus_connected") == 1
        await server.kill()

        async def away() -> bool:
            return await router.metric("router_bus_connected") == 0

        await until(away)
        assert (await router.chat(prompt("a"))).status == 200
        assert CANARY.encode() not in (await router.get("/metrics")).body
    assert logged.lines("bus lost")
    assert CANARY not in logged.text


async def test_every_process_of_a_group_and_a_relay_are_let_in(tmp_path: Path) -> None:
    async with nats_server(tmp_path, f'authorization {{ token: "{CANARY}" }}') as server, fleet(1) as (engine,):
        flags = ("--nats", server.url, "--engine", engine.url)
        async with (
            command("relay", *flags, log=tmp_path / "relay.log", COMMUTATOR_NATS_TOKEN=CANARY) as relay,
            command("serve", *flags, "--processes", "2", log=tmp_path / "serve.log", COMMUTATOR_NATS_TOKEN=CANARY) as router,
        ):
            await is_ready(relay)
            await is_ready(router)
            assert await router.metric("router_bus_connected") == 1
            assert (await router.chat(prompt("a"))).status == 200
            await holds_the_truth([router], [engine])
        assert CANARY not in (tmp_path / "relay.log").read_text() + (tmp_path / "serve.log").read_text()


async def test_of_a_cluster_one_name_is_enough_to_find_another_server_when_it_dies(tmp_path: Path) -> None:
    async with cluster(tmp_path) as servers, connected(servers[1].url) as teller, connected(servers[0].url) as bus:
        heard: list[bytes] = []
        bus.subscribe("a", lambda _subject, payload, _reply: heard.append(payload))

        def told() -> bool:
            teller.publish("a", b"x")
            return b"x" in heard

        await until(told, what="the servers know each other")
        await until(lambda: bus._discovered, what="the server tells of the others")
        await servers[0].kill()
        await until(lambda: bus.counts.reconnects > 0 and bus.connected, what="another server is found")
        heard.clear()
        await until(told, what="and it has what is published elsewhere")
