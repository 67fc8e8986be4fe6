"""`commutator doctor`: each fault of a fleet, one at a time, is named, and nothing else is."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import sys
from collections.abc import AsyncIterator, Sequence
from email.utils import formatdate
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

import engines.simulator
from engines.client import EngineClient
from engines.probe import probe
from engines.simulator.cache import BlockCache
from engines.simulator.engine import SimulatedEngine
from engines.simulator.faults import Answer
from engines.types import Connector, EngineKind, EngineSpec, Role
from router.doctor import broker, connection
from router.doctor.command import SomethingIsWrong, examine, run
from router.doctor.engine import Examiner
from router.doctor.findings import Finding, State
from router.doctor.settings import DoctorSettings
from tests.integration.nats_servers import nats_server
from tests.integration.test_pairs_simulated import WAYS, settings_for, spec_of
from tests.integration.test_relay_process import relay
from tests.rig import fleet, routing, settings_of
from tests.waiting import alongside, until

Broken = list[tuple[str, str]]


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine's idle connection is watched for a moment only."""
    monkeypatch.setattr(connection, "IDLE_LIMIT_S", 0.1)
    monkeypatch.setattr(connection, "LEAST_IDLE_S", 0.0)


async def looked_at(*specs: EngineSpec, **more: Any) -> list[Finding]:  # noqa: ANN401  settings
    return await examine(DoctorSettings(engine=specs, **more))


def broken(found: Sequence[Finding]) -> Broken:
    """What is not well, and whose."""
    return [(finding.check, finding.subject) for finding in found if finding.state in {State.WRONG, State.WARNING}]


def text_of(found: Sequence[Finding], check: str) -> str:
    return next(f"{finding.text} → {finding.mend}" for finding in found if finding.check == check and finding.state is not State.OK)


@pytest.mark.parametrize("kind", EngineKind)
async def test_of_a_healthy_fleet_nothing_is_told_but_that_all_is_well(kind: EngineKind) -> None:
    async with fleet(2, kind=kind) as engines, routing(engines) as router:
        found = await examine(DoctorSettings(router=router.url))
    assert {finding.state for finding in found} == {State.OK}, found
    assert {finding.check for finding in found} == {
        "router", "files", "ready", "signal", "routing", "reachable", "tokenizer", "cache", "usage", "events", "replay", "block-size",
        "keep-alive", "clock",
    }  # fmt: skip


ONE_FAULT: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "it publishes no events": ({"kv_events": False}, {}, "events"),
    "its events are elsewhere": ({}, {"kv_events": "tcp://127.0.0.1:1"}, "events"),
    "its events have another topic": ({"kv_topic": "theirs"}, {"kv_topic": "ours"}, "events"),
    "its replay is elsewhere": ({}, {"kv_replay": "tcp://127.0.0.1:1"}, "replay"),
    "it reports no cached tokens": ({"prompt_tokens_details": False}, {}, "usage"),
    "its block size is another": ({"block_size": 32}, {"block_size": 16}, "block-size"),
    "an option has no effect": ({}, {"connector": Connector.NIXL}, "reachable"),
}


@pytest.mark.parametrize("fault", ONE_FAULT)
@pytest.mark.parametrize("kind", EngineKind)
async def test_O2_each_precondition_of_a_hit_that_is_broken_is_named_and_no_other(kind: EngineKind, fault: str) -> None:
    at_engine, said, check = ONE_FAULT[fault]
    async with SimulatedEngine(settings_of(kind=kind, **at_engine)) as engine:
        found = await looked_at(EngineSpec(engine.url, **said))
        assert broken(found) == [(check, engine.url)], found


async def test_O2_a_publisher_that_is_dead_is_named() -> None:
    async with SimulatedEngine(settings_of()) as engine:
        engine.faults.kv.muted = True
        found = await looked_at(EngineSpec(engine.url))
        assert broken(found) == [("events", engine.url)]
        assert "their events do not come" in text_of(found, "events")


@pytest.mark.parametrize("kind", EngineKind)
async def test_O2_an_engine_that_caches_nothing_is_named(kind: EngineKind, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockCache, "match", lambda self, names: [])
    async with SimulatedEngine(settings_of(kind=kind)) as engine:
        found = await looked_at(EngineSpec(engine.url))
        assert broken(found) == [("cache", engine.url)]
        assert {EngineKind.VLLM: "prefix-caching", EngineKind.SGLANG: "radix-cache"}[kind] in text_of(found, "cache")


async def test_O2_a_cache_that_evicts_before_reuse_is_named() -> None:
    """Half of it is the prompt's; a stream of others takes the rest, and the prompt's between its two times."""
    async with SimulatedEngine(settings_of(kv_blocks=64)) as engine:
        flood = f"{engine.url}/v1/completions"

        async def others(session: Any) -> None:  # noqa: ANN401  aiohttp's
            number = 0
            while True:
                number += 1
                body = {"model": "sim", "prompt": [2000 + (number * 7 + i) % 900 for i in range(900)], "max_tokens": 1}
                async with session.post(flood, json=body) as response:
                    await response.read()

        async with aiohttp.ClientSession() as session, alongside(others(session)):
            found = await looked_at(EngineSpec(engine.url))
        assert ("cache", engine.url) in broken(found)
        assert "evicted before" in text_of(found, "cache")


async def test_O2_a_tokenizer_that_differs_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(Path(engines.simulator.__file__).parent / "model", folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = "{% for m in messages %}{{ m.content }}{% endfor %}"
    async with SimulatedEngine(settings_of(model=str(folder))) as engine:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        found = await looked_at(EngineSpec(engine.url))
        assert broken(found) == [("tokenizer", engine.url)]
        assert "parity" in text_of(found, "tokenizer") or "differing" in text_of(found, "tokenizer")


async def test_an_engine_that_is_not_there_and_a_stranger_are_named() -> None:
    async with SimulatedEngine(settings_of()) as engine:
        engine.faults.add(Answer(404), path="/version", times=None)
        engine.faults.add(Answer(404), path="/server_info", times=None)
        engine.faults.add(Answer(404), path="/get_server_info", times=None)
        found = await looked_at(EngineSpec("http://127.0.0.1:1"), EngineSpec(engine.url))
        assert broken(found) == [("reachable", "http://127.0.0.1:1"), ("reachable", engine.url)]


async def test_a_clock_that_is_ahead_is_named() -> None:
    async with SimulatedEngine(settings_of()) as engine:
        ahead = formatdate(4_000_000_000, usegmt=True)
        engine.faults.add(Answer(200, b'{"version":"0.32.0"}', (("Date", ahead),)), path="/version", times=None)
        found = await looked_at(EngineSpec(engine.url))
        assert broken(found) == [("clock", engine.url)]
        assert "ahead of" in text_of(found, "clock")


async def test_an_engine_that_closes_idle_connections_early_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    async def hangs_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
        writer.close()

    monkeypatch.setattr(connection, "IDLE_LIMIT_S", 30.0)
    async with SimulatedEngine(settings_of()) as engine, await asyncio.start_server(hangs_up, "127.0.0.1", 0) as server:
        async with aiohttp.ClientSession() as session:
            info = await probe(EngineClient(session, engine.url), EngineSpec(engine.url))
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        found = await connection.connection(msgspec.structs.replace(info, id=url))
        assert broken(found) == [("keep-alive", url)]


@contextlib.asynccontextmanager
async def handing(way: str, **changed: Any) -> AsyncIterator[list[EngineSpec]]:  # noqa: ANN401  settings
    async with (
        SimulatedEngine(settings_for(way, Role.PREFILL)) as there,
        SimulatedEngine(settings_for(way, Role.DECODE, **changed)) as here,
    ):
        yield [spec_of(way, there), spec_of(way, here)]


@pytest.mark.parametrize("way", WAYS)
async def test_a_pair_that_hands_over_is_well(way: str) -> None:
    async with handing(way) as specs:
        found = await looked_at(*specs)
        assert broken(found) == []
        assert [finding.state for finding in found if finding.check == "transfer"] == [State.OK]


@pytest.mark.parametrize("way", WAYS)
async def test_P12_a_pair_that_cannot_is_named_with_what_differs(way: str) -> None:
    async with handing(way, block_size=32) as specs:
        found = await looked_at(*specs)
        assert [check for check, _ in broken(found)] == ["pair", "pair"]
        assert "another block size" in text_of(found, "pair")


async def test_a_decode_engine_that_computes_the_prompt_again_is_named() -> None:
    """Without a connector it ignores the handshake: all looks well."""
    async with (
        SimulatedEngine(settings_for("nixl", Role.PREFILL)) as there,
        SimulatedEngine(settings_of()) as here,
    ):
        found = await looked_at(EngineSpec(there.url, role=Role.PREFILL), EngineSpec(here.url, role=Role.DECODE))
        assert broken(found) == [("transfer", f"{there.url} ▸ {here.url}")]
        assert "a second time" in text_of(found, "transfer")


async def test_a_prefill_engine_that_hands_nothing_over_is_named() -> None:
    async with (
        SimulatedEngine(settings_of()) as there,
        SimulatedEngine(settings_for("nixl", Role.DECODE)) as here,
    ):
        found = await looked_at(EngineSpec(there.url, role=Role.PREFILL), EngineSpec(here.url, role=Role.DECODE))
        assert broken(found) == [("transfer", f"{there.url} ▸ {here.url}")]
        assert "hands nothing over" in text_of(found, "transfer")


async def test_an_engine_without_a_partner_is_named() -> None:
    async with SimulatedEngine(settings_for("nixl", Role.DECODE)) as here:
        assert broken(await looked_at(EngineSpec(here.url, role=Role.DECODE))) == [("pair", here.url)]


async def test_R3_a_router_that_guesses_says_whose_events_are_missing() -> None:
    async with fleet(1, kv_events=False) as engines, routing(engines) as router:
        found = await examine(DoctorSettings(router=router.url))
        url = engines[0].url
        assert broken(found) == [("signal", f"{url}#0"), ("routing", "sim"), ("events", url)]
        assert "by what had been sent" in text_of(found, "routing")


async def test_a_router_that_is_not_there_and_one_whose_engine_has_gone_are_named() -> None:
    found = await examine(DoctorSettings(router="http://127.0.0.1:1"))
    assert broken(found) == [("router", "http://127.0.0.1:1")]
    assert "it does not answer: connection refused" in text_of(found, "router")
    async with fleet(1) as engines, routing(engines) as router:
        await engines[0].die()

        async def gone() -> bool:
            return await router.serving() == 0

        await until(gone, what="the router has noticed")
        found = await examine(DoctorSettings(router=router.url))
        assert ("ready", router.url) in broken(found)
        assert "no engine serves sim" in text_of(found, "ready")


async def test_an_engine_that_has_gone_is_named_though_another_serves() -> None:
    async with fleet(2) as (stays, goes), routing([stays, goes], probe_period_s=0.2) as router:
        await goes.die()

        async def gone() -> bool:
            return await router.metric("router_engine_state", engine=goes.url, state="waiting") == 1

        await until(gone, what="the router has noticed")
        found = await examine(DoctorSettings(router=router.url))
    assert broken(found) == [("state", goes.url)]
    assert [finding.state for finding in found if (finding.check, finding.subject) == ("reachable", goes.url)] == [State.UNKNOWN]


async def test_an_engine_that_only_the_router_reaches_is_not_called_wrong() -> None:
    async with aiohttp.ClientSession() as session:
        examiner = Examiner(session, tokenizer=None, timeout_s=1.0)
        for named, state in ((False, State.UNKNOWN), (True, State.WRONG)):
            engine, found = await examiner.reach(EngineSpec("http://127.0.0.1:1"), named=named)
            assert (engine, found.check, found.state) == (None, "reachable", state)


async def test_a_relay_and_a_router_on_one_bus_are_well_and_of_differing_namespaces_are_named(tmp_path: Path) -> None:
    async with nats_server(tmp_path) as nats, fleet(1) as engines:
        spec = EngineSpec(engines[0].url)
        assert broken(await looked_at(spec, nats=nats.url)) == [("relay", spec.url)], "nobody relays it"
        async with relay(engines, nats.url, tmp_path / "relay.log", "--namespace", "theirs"):
            found = await looked_at(spec, nats=nats.url, namespace="theirs")
            assert broken(found) == []
            assert {"bus", "permissions", "payload", "lag", "relay"} <= {finding.check for finding in found}
            found = await looked_at(spec, nats=nats.url)
            assert broken(found) == [("relay", spec.url)]
            assert "namespace theirs" in text_of(found, "relay")


@pytest.mark.parametrize(
    ("config", "check"),
    [
        ("max_payload: 4096", "payload"),
        ('authorization: {users: [{user: u, password: p, permissions: {subscribe: ">", publish: "commutator.kv.>"}}]}', "permissions"),
    ],
)
async def test_a_nats_server_that_does_not_take_what_routers_say_is_named(
    config: str, check: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker, "LISTEN_S", 0.0)
    async with nats_server(tmp_path, config) as nats:
        user = None if check == "payload" else "u"
        found = await examine(DoctorSettings(nats=nats.url, nats_user=user, nats_password=user and "p"))
        assert [name for name, _ in broken(found)] == [check], found


async def test_tls_asked_of_a_nats_server_that_has_none_is_named(tmp_path: Path) -> None:
    async with nats_server(tmp_path) as nats:
        found = await examine(DoctorSettings(nats=nats.url.replace("nats://", "tls://")))
        assert [name for name, _ in broken(found)] == ["bus"]
        assert "offers no TLS" in text_of(found, "bus")


async def test_what_it_prints_is_for_programs_too_and_it_fails_when_something_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    async with fleet(1) as engines:
        await run(DoctorSettings(engine=(EngineSpec(engines[0].url),), json=True))
        assert json.loads(capsys.readouterr().out)["ok"] is True
    with pytest.raises(SomethingIsWrong, match="1 of 2 things looked at is wrong"):
        await run(DoctorSettings(engine=(EngineSpec("http://127.0.0.1:1"),), json=True))
    told = json.loads(capsys.readouterr().out)
    assert told["ok"] is False
    assert told["findings"][-1].keys() == {"check", "subject", "state", "text", "mend"}


async def test_O2_the_command_says_it_in_lines_and_in_its_exit_status() -> None:
    async with fleet(1, prompt_tokens_details=False) as engines:
        command = [sys.executable, "-m", "commutator", "doctor", "--engine", engines[0].url]
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE)
        out, err = await process.communicate()
    assert process.returncode == 1
    assert [line.split()[:3] for line in out.decode().splitlines() if line.startswith("wrong")] == [["wrong", "usage", engines[0].url]]
    assert err.decode().startswith("commutator doctor: error: 1 of ")
