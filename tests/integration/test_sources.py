"""Engines that nobody names: found in a file, in DNS, and on the bus, by a router that serves."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from dnslib import AAAA, QTYPE, RCODE, RR, SRV, A, DNSRecord
from dnslib.server import BaseResolver, DNSHandler, DNSLogger, DNSServer

from discovery.access import Access
from discovery.bus import Bus, BusOptions
from discovery.sources.announced import AnnouncedSource, Announcer
from discovery.sources.dns import DnsSource
from discovery.sources.file import FileSource
from discovery.sources.settings import DiscoverSettings
from engines.simulator.engine import SimulatedEngine
from engines.types import EngineSpec, Role
from tests.integration.commands import command
from tests.integration.conftest import Log
from tests.integration.nats_servers import nats_server
from tests.integration.sources import finding
from tests.rig import Router, asked, fleet, routing, settings_of
from tests.waiting import alongside, until


def write(file: Path, *engines: SimulatedEngine | str) -> None:
    """As it should be written: whole, and put in place."""
    new = file.with_suffix(".new")
    new.write_text("".join(f'[[engine]]\nurl = "{engine if isinstance(engine, str) else engine.url}"\n' for engine in engines))
    new.rename(file)


async def serving(router: Router, count: int) -> None:
    async def so_many() -> bool:
        return await router.serving() == count

    await until(so_many, what=f"{count} engines serve")


# ---------------------------------------------------------------------------------------------------------------- a file


async def test_H16_a_file_read_again_ten_times_adds_no_tasks_and_removed_engines_are_not_asked(tmp_path: Path) -> None:
    file = tmp_path / "engines.toml"
    async with fleet(2) as (stays, goes):
        write(file, stays)
        async with routing([], wait_for=1, discover=DiscoverSettings(file=str(file)), probe_period_s=0.05) as router:

            def tasks() -> int:
                return sum(task.get_name().startswith(("watch ", "source ", "load of ", "admit ")) for task in asyncio.all_tasks())

            await until(lambda: tasks() == 2, what="a watch and the source")
            for _ in range(5):
                write(file, stays, goes)
                await serving(router, 2)
                write(file, stays)
                await serving(router, 1)
            await until(lambda: tasks() == 2, what="as many as before")
            asked_before, checks = len(goes.requests), len(asked(stays, "/health"))
            await until(lambda: len(asked(stays, "/health")) >= checks + 5, what="five periods")
            assert len(goes.requests) - asked_before <= 1, "one question may have been on its way"


async def test_H18_an_engine_that_leaves_its_source_ends_its_stream_well_and_gets_none(tmp_path: Path) -> None:
    file = tmp_path / "engines.toml"
    async with SimulatedEngine(settings_of(speedup=1, decode_step_ms=20)) as leaves, SimulatedEngine(settings_of()) as stays:
        write(file, leaves)
        async with routing([], wait_for=1, discover=DiscoverSettings(file=str(file))) as router:
            stream = await router.begin("long", stream=True, max_tokens=100)
            await until(lambda: leaves.running == 1, what="the stream runs")
            write(file, stays)

            async def exchanged() -> bool:
                draining = await router.metric("router_engine_state", engine=leaves.url, state="draining")
                return bool(draining and await router.metric("router_engine_state", engine=stays.url, state="serving"))

            await until(exchanged, what="one drains, and the other serves")
            assert {(await router.chat(f"late {number}")).engine for number in range(5)} == {stays.url}
            assert leaves.running == 1, "the stream still runs: this was a drain, not a wait"
            assert (await stream.read()).endswith(b"data: [DONE]\n\n")

            async def gone() -> bool:
                return leaves.url not in (await router.get("/metrics")).body.decode()

            await until(gone, what="it is let go")
        assert leaves.aborts == 0


async def test_an_engine_that_is_back_before_it_has_drained_stays(tmp_path: Path, logged: Log) -> None:
    file = tmp_path / "engines.toml"
    async with SimulatedEngine(settings_of(speedup=1, decode_step_ms=20)) as engine:
        write(file, engine)
        async with routing([], wait_for=1, discover=DiscoverSettings(file=str(file))) as router:
            stream = await router.begin("long", stream=True, max_tokens=300)
            await until(lambda: engine.running == 1, what="the stream runs")
            write(file)
            await serving(router, 0)
            write(file, engine)
            await serving(router, 1)
            assert engine.running == 1
            stream.close()
    assert len(logged.lines("engine joined")) == 1, "its cache is still known"


async def test_H9_other_words_for_a_url_replace_what_was_there(tmp_path: Path) -> None:
    file = tmp_path / "engines.toml"
    async with SimulatedEngine(settings_of(role=Role.PREFILL)) as engine, SimulatedEngine(settings_of()) as whole:
        write(file, engine, whole)
        async with routing([], wait_for=2, discover=DiscoverSettings(file=str(file))) as router:
            assert {(await router.chat(f"one {number}")).engine for number in range(8)} == {engine.url, whole.url}
            file.write_text(f'engine = ["{engine.url},role=prefill", "{whole.url}"]')

            async def only_whole() -> bool:
                return {(await router.chat(f"two {number}")).engine for number in range(8)} == {whole.url}

            await until(only_whole, what="it is a prefill engine, and takes nothing by itself")


async def test_a_file_that_cannot_be_read_lets_nobody_go(tmp_path: Path, logged: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("discovery.sources.finder.PAUSE_MIN_S", 0.05)
    monkeypatch.setattr("discovery.sources.file.LOOK_PERIOD_S", 0.02)
    file = tmp_path / "engines.toml"
    write(file, "http://h:1")
    async with finding(FileSource(str(file))) as (finder, heard):
        (name,) = finder.states
        await until(lambda: heard.urls == ["http://h:1"])
        for text, why in (("[[engine", "is not TOML"), ('engine = ["h:1"]', "has no scheme"), (None, "no such file")):
            if text is None:
                file.unlink()
            else:
                file.write_text(text)
            await until(lambda why=why: why in finder.states[name].failure, what=why)
            assert heard.urls == ["http://h:1"]
        write(file, "http://h:2")
        await until(lambda: heard.urls == ["http://h:2"], what="it can be read again")
    assert len(logged.lines("source failed; what it said last stands")) == 3


# ------------------------------------------------------------------------------------------------------------------ DNS


class Zone(BaseResolver):  # type: ignore[misc]  # it has no types
    """Records by name and type; a name without any does not exist. `broken`: SERVFAIL to all."""

    def __init__(self) -> None:
        self.records: dict[str, list[tuple[str, A | AAAA | SRV]]] = {}
        self.broken = False

    def resolve(self, request: DNSRecord, handler: DNSHandler) -> DNSRecord:
        reply = request.reply()
        name = str(request.q.qname).rstrip(".")
        if self.broken:
            reply.header.rcode = RCODE.SERVFAIL
        elif name not in self.records:
            reply.header.rcode = RCODE.NXDOMAIN
        for kind, data in self.records.get(name, ()) if not self.broken else ():
            if kind == QTYPE[request.q.qtype]:
                reply.add_answer(RR(request.q.qname, getattr(QTYPE, kind), rdata=data, ttl=1))
        return reply


@pytest.fixture
def zone() -> Iterator[tuple[Zone, str]]:
    """A DNS server, and its address."""
    made = Zone()
    server = DNSServer(made, port=0, address="127.0.0.1", logger=DNSLogger("-request,-reply,-truncated,-error,-recv,-send,-data"))
    server.start_thread()
    yield made, f"127.0.0.1:{server.server.server_address[1]}"
    server.stop()
    server.server.server_close()


async def test_every_address_of_a_name_is_an_engine(zone: tuple[Zone, str]) -> None:
    dns, server = zone
    dns.records["vllm.test"] = [("A", A("127.0.0.1")), ("AAAA", AAAA("::1"))]
    async with (
        SimulatedEngine(settings_of()) as one,
        SimulatedEngine(settings_of(host="127.0.0.2", port=int(one.url.rpartition(":")[2]))) as two,
    ):
        port = one.url.rpartition(":")[2]
        discover = DiscoverSettings(dns=(EngineSpec(f"http://vllm.test:{port}"),), dns_server=server, period_s=0.1)
        async with routing([], wait_for=1, discover=discover) as router:
            assert (await router.chat("hello")).engine == one.url, "and not by its IPv6 address too"
            dns.records["vllm.test"].append(("A", A("127.0.0.2")))
            await serving(router, 2)
            dns.records["vllm.test"] = [("A", A("127.0.0.2"))]
            await serving(router, 1)
            assert (await router.chat("hello")).engine == two.url


async def test_the_targets_of_a_service_are_engines_at_their_ports_and_a_server_that_fails_lets_nobody_go(
    zone: tuple[Zone, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("discovery.sources.finder.PAUSE_MIN_S", 0.05)
    dns, server = zone
    name = "_http._tcp.vllm.test"
    dns.records |= {
        name: [("SRV", SRV(0, 1, 8000, "a.test")), ("SRV", SRV(0, 1, 8001, "b.test"))],
        "a.test": [("A", A("10.0.0.1"))],
        "b.test": [("AAAA", AAAA("fd00::2"))],
    }
    source = DnsSource(EngineSpec(f"http://{name}:80", role=Role.DECODE, kv_events="tcp://*:5557"), 0.05, server)
    async with finding(source) as (finder, heard):
        await until(lambda: heard.urls == ["http://10.0.0.1:8000", "http://[fd00::2]:8001"])
        assert heard.specs["http://10.0.0.1:8000"] == EngineSpec("http://10.0.0.1:8000", role=Role.DECODE, kv_events="tcp://10.0.0.1:5557")
        dns.broken = True
        await until(lambda: "SERVFAIL" in finder.states[source.name].failure, what="it is said")
        assert len(heard.urls) == 2
        dns.broken = False
        del dns.records[name]
        await until(lambda: heard.urls == [], what="a name that does not exist has no engines")
        assert not finder.states[source.name].failure


# -------------------------------------------------------------------------------------------------------------- the bus


async def test_an_engine_that_a_relay_announces_joins_and_leaves_with_it(tmp_path: Path) -> None:
    async with nats_server(tmp_path) as nats, fleet(1) as (engine,):
        discover = DiscoverSettings(announced=True)
        async with routing([], wait_for=0, discover=discover, nats=nats.url) as router:
            flags = ("--nats", nats.url, "--engine", engine.url, "--announce")
            async with command("relay", *flags, log=tmp_path / "relay.log"):
                await serving(router, 1)
                assert (await router.chat("hello")).engine == engine.url
            await serving(router, 0)


async def test_announcements_end_by_withdrawal_or_by_their_lease_and_carry_no_key(tmp_path: Path) -> None:
    now = 100.0
    spec = EngineSpec("http://h:1", role=Role.PREFILL, api_key="sk-of-the-engine")
    async with nats_server(tmp_path) as nats, connected(nats.url) as theirs, connected(nats.url) as ours:
        overheard: list[bytes] = []
        ours.subscribe("commutator.engines", lambda _, payload, __: overheard.append(payload))
        source = AnnouncedSource(ours, "commutator", api_key="sk-of-the-router", clock=lambda: now)
        async with finding(source) as (_, heard):
            announcer = Announcer(theirs, "commutator")
            async with alongside(announcer.run()):
                announcer.announce(spec)
                await until(
                    lambda: heard.specs.get("http://h:1") == EngineSpec("http://h:1", role=Role.PREFILL, api_key="sk-of-the-router")
                )
                announcer.withdraw("http://h:1")
                await until(lambda: heard.urls == [], what="it has been withdrawn")
                announcer.announce(spec)
                await until(lambda: heard.urls == ["http://h:1"])
            await until(lambda: heard.urls == [], what="who announced it has ended in order")
            announcer = Announcer(theirs, "commutator")
            announcer.announce(spec)
            await until(lambda: heard.urls == ["http://h:1"], what="announced once, by somebody who then dies")
            now += 60
            await until(lambda: heard.urls == [], what="its lease has ended")
            theirs.publish("commutator.engines", b"\xc1 not a message")
            await until(lambda: source.rejected == 1)
        assert overheard
        assert not any(b"sk-of" in payload for payload in overheard)


@contextlib.asynccontextmanager
async def connected(url: str) -> AsyncIterator[Bus]:
    bus = Bus(BusOptions(access=Access()))
    await bus.connect(url, name="test")
    try:
        yield bus
    finally:
        await bus.close()
