"""Membership as it happens: engines that come up, fall silent, refuse, restart, and change their models."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec
import pytest

from discovery.monitor import Monitor
from discovery.registry import Registry
from discovery.watch import MIN_APART_S
from engines.metrics import EngineLoad
from engines.simulator.engine import SimulatedEngine
from engines.simulator.settings import SimulateSettings
from engines.types import EngineInfo, EngineSpec
from tests.integration.engine_fakes import Answer, FakeEngine, sglang_answers, vllm_answers
from tests.waiting import until

PERIOD_S = 0.2
TIMEOUT_S = 0.1
FAR_S = 60.0
"""A period that no test lives to see: what happens then happens for another reason than the clock."""


class Heard:
    """A listener that remembers."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []
        self.infos: dict[str, EngineInfo] = {}
        self.reasons: list[str] = []
        self.loads: dict[str, list[dict[int, EngineLoad]]] = {}
        self.pushed: dict[str, list[dict[int, EngineLoad]]] = {}
        self.streaming: set[str] = set()
        self.left_at = 0.0

    def joined(self, info: EngineInfo) -> None:
        self.events.append(("joined", info.id))
        self.infos[info.id] = info

    def changed(self, info: EngineInfo) -> None:
        self.events.append(("changed", info.id))
        self.infos[info.id] = info

    def left(self, info: EngineInfo, reason: str) -> None:
        self.events.append(("left", info.id))
        self.reasons.append(reason)
        self.left_at = asyncio.get_running_loop().time()
        del self.infos[info.id]

    def load(self, engine_id: str, load: dict[int, EngineLoad], *, answered: bool = True) -> None:
        assert engine_id in self.infos
        (self.loads if answered else self.pushed).setdefault(engine_id, []).append(load)

    def busy(self, engine_id: str) -> bool:
        return engine_id in self.streaming

    def of(self, engine: FakeEngine) -> list[str]:
        return [what for what, engine_id in self.events if engine_id == engine.url]


Start = Callable[..., Awaitable[FakeEngine]]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    started: list[FakeEngine] = []

    async def start(answers: dict[str, Answer] | None = None) -> FakeEngine:
        started.append(await FakeEngine(vllm_answers() if answers is None else answers).start())
        return started[-1]

    yield start
    for engine in started:
        await engine.stop()


@asynccontextmanager
async def watching(
    specs: Iterable[EngineSpec | FakeEngine], *, period_s: float = PERIOD_S, timeout_s: float = TIMEOUT_S
) -> AsyncIterator[tuple[Monitor, Heard, Registry]]:
    """A running monitor; at the end, registry and listener must agree on who is there."""
    heard, registry = Heard(), Registry()
    async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as group:
        named = [spec if isinstance(spec, EngineSpec) else EngineSpec(spec.url) for spec in specs]
        monitor = Monitor(named, registry, session, heard, probe_period_s=period_s, probe_timeout_s=timeout_s)
        task = group.create_task(monitor.run())
        yield monitor, heard, registry
        assert {info.id: info for info in registry.members} == heard.infos
        task.cancel()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def booted(at: float) -> Answer:
    page = vllm_answers()["/metrics"].body
    return Answer(page.replace(b"process_start_time_seconds 1.79595407436e+09", f"process_start_time_seconds {at}".encode()))


async def test_H13_one_engine_of_three_is_up_and_the_others_join_later(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    up = await start()
    late = [FakeEngine(vllm_answers()), FakeEngine(sglang_answers())]
    for engine in late:
        engine.port = free_port()
    try:
        with caplog.at_level(logging.INFO):
            async with watching([up, *late]) as (_, heard, registry):
                await until(lambda: heard.of(up) == ["joined"])
                await until(lambda: sum(record.message == "waiting for engine" for record in caplog.records) == 2)
                assert [info.id for info in registry.members] == [up.url]
                for engine in late:
                    await engine.start()
                await until(lambda: len(registry) == 3)
                assert all(heard.of(engine) == ["joined"] for engine in (up, *late))
    finally:
        for engine in late:
            await engine.stop()


async def test_each_reason_to_wait_is_said_once(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    engine = await start({})
    with caplog.at_level(logging.INFO):
        async with watching([engine], period_s=0.02):
            await until(lambda: engine.hits["/version"] >= 5)
            engine.answers["/version"] = Answer(b"loading", 503)
            seen = engine.hits["/version"]
            await until(lambda: engine.hits["/version"] >= seen + 5)
    reasons = [record.fields["reason"] for record in caplog.records if record.message == "waiting for engine"]  # type: ignore[attr-defined]
    assert len(reasons) == 2
    assert "404 at /version" in reasons[0]
    assert "503 at /version" in reasons[1]


async def test_reasons_that_never_repeat_do_not_fill_the_log(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    engine = await start({})
    with caplog.at_level(logging.INFO):
        async with watching([engine], period_s=0.01):
            for _ in range(30):
                seen = engine.hits["/version"]
                engine.answers["/version"] = Answer(f"request {seen} failed".encode(), 404)
                await until(lambda seen=seen: engine.hits["/version"] > seen + 1)
    assert 2 <= sum(record.message == "waiting for engine" for record in caplog.records) <= 16


async def test_a_refused_connection_ends_membership_at_once(start: Start) -> None:
    engine = await start()
    async with watching([engine]) as (_, heard, registry):
        await until(lambda: engine.hits["/health"] >= 2)
        heard.streaming.add(engine.url)  # nobody listens there: no stream can come from it
        await engine.stop()
        await until(lambda: len(registry) == 0)
        assert heard.reasons == ["connection refused"]
        await engine.start()
        await until(lambda: heard.of(engine) == ["joined", "left", "joined"])


async def test_H1_an_engine_that_vanished_has_left_within_two_periods(start: Start) -> None:
    engine = await start()
    period_s = 0.6
    async with watching([engine], period_s=period_s, timeout_s=0.2) as (_, heard, registry):
        checks = engine.hits["/health"]
        await until(lambda: engine.hits["/health"] > checks + 1)
        gone_at = asyncio.get_running_loop().time()
        engine.stalled.add("*")
        await until(lambda: len(registry) == 0)
        assert "timed out" in heard.reasons[0]
        # 0.2 s for a machine that other tests are running on; the schedule itself needs no more than two periods.
        assert heard.left_at - gone_at <= 2 * period_s + 0.2


async def test_H1_an_engine_that_says_it_does_not_serve_leaves_after_two_checks(start: Start) -> None:
    engine = await start()
    async with watching([engine]) as (_, heard, registry):
        await until(lambda: len(registry) == 1)
        seen = engine.hits["/health"]
        engine.answers["/health"] = Answer(b"", 503)
        await until(lambda: heard.of(engine) == ["joined", "left"])
        assert engine.hits["/health"] >= seen + 2
        assert "does not serve" in heard.reasons[0]
        engine.answers["/health"] = Answer()
        await until(lambda: heard.of(engine) == ["joined", "left", "joined"])


async def test_one_failed_check_is_forgiven(start: Start) -> None:
    engine = await start()
    async with watching([engine], period_s=0.05) as (_, heard, registry):
        await until(lambda: len(registry) == 1)
        for _ in range(3):
            engine.answers["/health"] = Answer(b"", 503)
            seen = engine.hits["/health"]
            await until(lambda seen=seen: engine.hits["/health"] == seen + 1)
            engine.answers["/health"] = Answer()
            await until(lambda seen=seen: engine.hits["/health"] > seen + 2)
        assert heard.of(engine) == ["joined"]


async def test_an_engine_that_is_streaming_is_never_ejected_for_being_slow(start: Start) -> None:
    engine = await start()
    async with watching([engine], period_s=0.05, timeout_s=0.05) as (_, heard, registry):
        await until(lambda: len(registry) == 1)
        heard.streaming.add(engine.url)
        engine.stalled.add("/health")
        seen = engine.hits["/health"]
        await until(lambda: engine.hits["/health"] >= seen + 5)
        assert heard.of(engine) == ["joined"]
        heard.streaming.clear()
        await until(lambda: heard.of(engine) == ["joined", "left"])


async def test_C4_adapters_come_and_go_within_a_refresh(start: Start) -> None:
    engine = await start()
    listed = msgspec.json.decode(engine.answers["/v1/models"].body)
    both = {**listed, "data": [*listed["data"], {**listed["data"][0], "id": "ad1", "root": "/lora/ad1", "parent": "tiny"}]}
    async with watching([engine], period_s=0.05) as (_, heard, registry):
        await until(lambda: len(registry) == 1)
        engine.answers["/v1/models"] = Answer(msgspec.json.encode(both))
        await until(lambda: heard.of(engine) == ["joined", "changed"])
        assert [model.id for model in registry.members[0].models] == ["tiny", "ad1"]
        engine.answers["/v1/models"] = Answer(msgspec.json.encode(listed))
        await until(lambda: heard.of(engine) == ["joined", "changed", "changed"])
        assert [model.id for model in registry.members[0].models] == ["tiny"]


async def test_a_models_answer_that_differs_only_in_its_card_changes_nothing(start: Start) -> None:
    engine = await start()
    async with watching([engine], period_s=0.05) as (_, heard, registry):
        await until(lambda: len(registry) == 1)
        engine.answers["/v1/models"] = Answer(engine.answers["/v1/models"].body.replace(b"modelperm-", b"modelperm-x"))
        seen = engine.hits["/v1/models"]
        await until(lambda: engine.hits["/v1/models"] >= seen + 3)
        assert heard.of(engine) == ["joined"]


async def test_R7_an_engine_restarted_in_place_leaves_and_joins_anew(start: Start) -> None:
    engine = await start()
    async with watching([engine], period_s=0.05) as (_, heard, registry):
        await until(lambda: len(registry) == 1)
        engine.answers["/metrics"] = booted(1795954999.0)
        await until(lambda: heard.of(engine) == ["joined", "left", "joined"])
        assert heard.reasons == ["it was restarted"]
        assert registry.members[0].boot == 1795954999.0


async def test_R7_a_simulated_engine_restarted_in_place_leaves_and_joins_anew() -> None:
    async with (
        SimulatedEngine(SimulateSettings(port=0)) as engine,
        watching([EngineSpec(engine.url)], period_s=0.05, timeout_s=1.0) as (_, heard, registry),
    ):
        await until(lambda: len(registry) == 1)
        await engine.restart()
        await until(lambda: [what for what, _ in heard.events] == ["joined", "left", "joined"])


async def test_C4_adapters_of_a_simulated_engine_come_and_go() -> None:
    async with (
        SimulatedEngine(SimulateSettings(port=0)) as engine,
        watching([EngineSpec(engine.url)], period_s=0.05, timeout_s=1.0) as (_, heard, registry),
    ):
        await until(lambda: len(registry) == 1)
        engine.adapters["ad1"] = "/lora/ad1"
        await until(lambda: [model.id for model in registry.members[0].models] == ["sim", "ad1"])
        del engine.adapters["ad1"]
        await until(lambda: [model.id for model in registry.members[0].models] == ["sim"])
        assert [what for what, _ in heard.events] == ["joined", "changed", "changed"]


async def test_H9_another_model_at_the_same_url_replaces_the_old_one(start: Start) -> None:
    engine = await start()
    async with watching([engine], period_s=0.05) as (_, heard, registry):
        await until(lambda: len(registry) == 1)
        engine.answers["/v1/models"] = Answer(engine.answers["/v1/models"].body.replace(b'"id":"tiny"', b'"id":"other"'))
        await until(lambda: heard.of(engine) == ["joined", "left", "joined"])
        assert heard.reasons == ["it serves another model"]
        assert [model.id for model in registry.members[0].models] == ["other"]


async def test_another_kind_of_engine_at_the_same_url_replaces_the_old_one(start: Start) -> None:
    engine = await start()
    async with watching([engine], period_s=0.05) as (_, heard, registry):
        await until(lambda: len(registry) == 1)
        engine.answers = sglang_answers()
        await until(lambda: heard.of(engine) == ["joined", "left", "joined"])
        assert registry.members[0].version == "0.5.23"


async def test_load_is_told_each_period_and_told_unknown_when_it_is_not_there(start: Start) -> None:
    engine = await start(sglang_answers())
    async with watching([engine], period_s=0.05) as (_, heard, _registry):
        await until(lambda: len(heard.loads.get(engine.url, [])) >= 2)
        assert heard.loads[engine.url][-1] == {0: EngineLoad(2, 1, 0.5)}
        del engine.answers["/v1/loads"]
        await until(lambda: heard.loads[engine.url][-1] == {0: EngineLoad()})
        engine.answers["/v1/loads"] = sglang_answers()["/v1/loads"]
        await until(lambda: heard.loads[engine.url][-1] == {0: EngineLoad(2, 1, 0.5)})
        engine.stalled.add("/v1/loads")
        await until(lambda: heard.loads[engine.url][-1] == {0: EngineLoad()})
        assert heard.of(engine) == ["joined"]


async def test_a_suspicion_is_checked_now_and_not_at_the_end_of_the_period(start: Start) -> None:
    engine = await start()
    async with watching([engine], period_s=FAR_S) as (monitor, heard, registry):
        await until(lambda: len(registry) == 1 and engine.url in heard.loads)
        monitor.suspect(engine.url)
        await until(lambda: len(heard.loads[engine.url]) == 2)
        await engine.stop()
        monitor.suspect(engine.url)
        await until(lambda: len(registry) == 0)
        monitor.suspect("http://nobody:1")


async def test_many_suspicions_do_not_make_many_checks(start: Start) -> None:
    engine = await start()
    async with watching([engine], period_s=FAR_S) as (monitor, heard, _):
        await until(lambda: engine.url in heard.loads)
        loop = asyncio.get_running_loop()
        began, before = loop.time(), engine.hits["/health"]
        while engine.hits["/health"] < before + 4:
            monitor.suspect(engine.url)
            await asyncio.sleep(0)
        assert loop.time() - began >= 3 * MIN_APART_S


class TakingTurns(dict[str, Answer]):
    """A URL behind which two processes answer alternately."""

    def get(self, path: str, default: Any = None) -> Any:  # noqa: ANN401 - dict's own signature
        self["/metrics"], self["/other"] = self["/other"], self["/metrics"]
        return super().get(path, default) if path != "/metrics" else self["/metrics"]


async def test_two_processes_taking_turns_at_one_url_are_not_probed_without_a_pause(start: Start) -> None:
    engine = await start(TakingTurns({**vllm_answers(), "/other": booted(1795954999.0)}))
    async with watching([engine], period_s=0.3) as (_, heard, _registry):
        began = asyncio.get_running_loop().time()
        await until(lambda: heard.of(engine).count("joined") == 3)
        assert asyncio.get_running_loop().time() - began >= 2 * 0.3


async def test_engines_are_added_and_removed_while_it_runs(start: Start) -> None:
    first, second = await start(), await start()
    async with watching([first], period_s=0.05) as (monitor, heard, registry):
        await until(lambda: len(registry) == 1)
        assert monitor.add(EngineSpec(second.url + "/")) == second.url
        await until(lambda: len(registry) == 2)
        with pytest.raises(ValueError, match=f"engine {second.url} is given twice"):
            monitor.add(EngineSpec(second.url))
        monitor.remove(first.url)
        assert [info.id for info in registry.members] == [second.url]
        assert (heard.of(first), heard.reasons, monitor.watched) == (["joined", "left"], ["removed"], (second.url,))
        monitor.remove(first.url)
        asked = sum(first.hits.values())
        seen = second.hits["/health"]
        await until(lambda: second.hits["/health"] >= seen + 3)
        assert sum(first.hits.values()) - asked <= 1  # one question may have been on its way
        monitor.add(EngineSpec(first.url))
        await until(lambda: heard.of(first) == ["joined", "left", "joined"])


async def test_H16_tasks_do_not_add_up_when_engines_come_and_go(start: Start) -> None:
    engine = await start()
    async with watching([engine], period_s=0.05) as (monitor, _, registry):
        await until(lambda: len(registry) == 1)

        def watches() -> int:
            return sum(task.get_name().startswith("watch ") for task in asyncio.all_tasks())

        assert watches() == 1
        for _ in range(10):
            monitor.remove(engine.url)
            monitor.add(EngineSpec(engine.url))
        await until(lambda: watches() == 1)
        await until(lambda: len(registry) == 1)


async def test_an_engine_given_twice_is_an_error_before_anything_runs() -> None:
    async with aiohttp.ClientSession() as session:
        with pytest.raises(ValueError, match="http://h:1 is given twice"):
            Monitor([EngineSpec("http://h:1"), EngineSpec("http://H:1/")], Registry(), session, Heard())


async def test_an_engine_with_garbage_answers_never_ends_the_monitor(start: Start) -> None:
    engine, good = await start(), await start()
    async with watching([engine, good], period_s=0.02) as (_, heard, registry):
        await until(lambda: len(registry) == 2)
        for body in (
            b"",
            b"\xff\xfe",
            b"[" * 100_000,
            b"null",
            b'{"data":null}',
            b'{"data":[[]]}',
            b'vllm:num_requests_running{engine="9999999999999999999999"} 1',
        ):
            for path in ("/version", "/v1/models", "/metrics", "/kv_event_sources"):
                engine.answers = {**vllm_answers(), path: Answer(body)}
                seen = engine.hits[path] if path in {"/v1/models", "/metrics"} else engine.hits["/health"]
                asked = path if path in {"/v1/models", "/metrics"} else "/health"
                await until(lambda asked=asked, seen=seen: engine.hits[asked] > seen or engine.url not in heard.infos)
        engine.answers = vllm_answers()
        await until(lambda: len(registry) == 2)
        assert heard.of(good) == ["joined"]
