"""The planner on a real bus, with real routers: what it hears, what it says, and engines that come and go by it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web

from discovery.bus import Bus
from discovery.observations import Acknowledgement, PlanMessage, RouterReport
from discovery.subjects import Subjects
from engines.launch.plan import EngineName
from engines.launch.plan import Pool as LaunchPool
from engines.types import Role
from planner.actuators.types import ActuatorError
from planner.actuators.virtual import Virtual
from planner.app import planning
from planner.capacity import Profile
from planner.settings import ActuatorName, PlanSettings, PoolSettings
from planner.types import Decision, PoolDecision, ReplicaState
from planner.types import Pool as PlannedPool
from router.settings import AdmissionSettings
from tests.integration.nats_servers import nats_server
from tests.planning.orchestrators import served
from tests.rig import Router, fleet, routing
from tests.waiting import until

TOKEN = "operator"
OPERATOR = {"authorization": f"Bearer {TOKEN}"}


@contextlib.asynccontextmanager
async def bus_of(url: str) -> AsyncIterator[Bus]:
    bus = Bus()
    await bus.connect(url, name="test")
    try:
        yield bus
    finally:
        await bus.close()


class Page:
    """A planner's page."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url, self._session = url, session

    async def get(self, path: str = "/decisions") -> str:
        async with self._session.get(self.url + path) as answer:
            assert answer.status == 200
            return await answer.text()

    async def last(self) -> dict[str, Any]:
        """The latest tick; empty before the first."""
        recent = json.loads(await self.get())["recent"]
        return dict(recent[0]) if recent else {}

    async def states(self, pool: str) -> dict[str, int]:
        return dict((await self.last()).get("replicas", {}).get(pool, {}))


@contextlib.asynccontextmanager
async def planned(nats: str, **changed: Any) -> AsyncIterator[Page]:  # noqa: ANN401
    settings = msgspec.structs.replace(PlanSettings(nats=nats, port=0, load_interval_s=0.25, stabilise_s=1.0), **changed)
    assert not list(settings.check(frozenset(changed)))
    async with planning(settings) as url, aiohttp.ClientSession() as session:
        yield Page(url, session)


async def test_what_clients_ask_for_and_see_reaches_the_planner_from_every_router(tmp_path: Path) -> None:
    async with (
        nats_server(tmp_path) as nats,
        fleet(2) as engines,
        routing(engines, nats=nats.url) as one,
        routing(engines, nats=nats.url) as other,
        planned(nats.url) as page,
    ):
        arrived = 0.0

        async def both_are_counted() -> bool:
            nonlocal arrived
            await asyncio.gather(
                one.chat("hello " * 50, stream=True, max_tokens=5, stream_options={"include_usage": True}), other.chat("hello")
            )
            last = await page.last()
            arrived = max(arrived, last.get("requests_per_second") or 0.0)
            return arrived > 0 and last["replicas"]["aggregated"]["ready"] == 2

        await until(both_are_counted, what="requests of both routers are seen")
        metrics = await page.get("/metrics")
        assert 'planner_replicas{pool="aggregated",state="ready"} 2.0' in metrics
        assert "planner_ticks_total" in metrics
        assert "aggregated" in await page.get("/")


async def test_L2_routers_that_fall_silent_are_no_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("planner.sightings.SILENT_S", 1.0)
    async with nats_server(tmp_path) as nats, fleet(1) as engines, planned(nats.url) as page:
        async with routing(engines, nats=nats.url):
            await until(lambda: _told(page, held=False), what="the router is heard")
        await until(lambda: _told(page, held=True), what="its silence is no data")


async def _told(page: Page, *, held: bool) -> bool:
    last = await page.last()
    return bool(last) and bool(last["held"]) is held


async def test_L10_a_request_for_an_emptied_pool_is_held_until_its_engine_serves(tmp_path: Path) -> None:
    async with (
        nats_server(tmp_path) as nats,
        fleet(1) as engines,
        routing([], nats=nats.url, admin_token=TOKEN) as router,
        bus_of(nats.url) as bus,
    ):
        assert (await router.chat("hello")).status in (404, 503), "nobody says that one will come"
        held = await _held(bus, PlanMessage("p", 1, 0.0, "sim", (), comes_within_s=60.0), router)
        assert await _waiting(bus) >= 1, "the planner hears of those who wait"
        body = msgspec.json.encode({"url": engines[0].url})
        async with router.session.post(f"{router.admin}/admin/engines", data=body, headers=OPERATOR) as added:
            assert added.status == 201
        assert (await held).status == 200


async def test_L10_a_held_request_whose_engine_does_not_come_is_503_with_retry_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.holding.SLACK_S", 0.0)
    async with nats_server(tmp_path) as nats, routing([], nats=nats.url, admin_token=TOKEN) as router, bus_of(nats.url) as bus:
        answer = await (await _held(bus, PlanMessage("p", 1, 0.0, "sim", (), comes_within_s=1.0), router))
        assert answer.status == 503
        assert int(answer.headers["retry-after"]) >= 1


async def _held(bus: Bus, plan: PlanMessage, router: Router) -> asyncio.Task[Any]:
    """A chat that waits, once the router has heard the plan."""
    bus.publish(Subjects("commutator").plans, msgspec.msgpack.encode(plan))
    await bus.flush()
    while True:
        chat = asyncio.create_task(router.chat("hello"))  # noqa: TID251  awaited by the caller
        done, _ = await asyncio.wait([chat], timeout=0.3)
        if not done:
            return chat


async def _waiting(bus: Bus) -> int:
    found: list[int] = []

    def heard(subject: str, payload: bytes, reply: str) -> None:
        report = msgspec.msgpack.decode(payload, type=RouterReport)
        found.append(sum(traffic.waiting for traffic in report.traffic))

    bus.subscribe(Subjects("commutator").observations, heard)
    await until(lambda: any(found), what="a router tells of those who wait")
    return max(found)


async def test_a_plan_is_told_on_the_bus_and_what_it_promised_counts_once_acknowledged(tmp_path: Path) -> None:
    told: list[PlanMessage] = []

    def heard(subject: str, payload: bytes, reply: str) -> None:
        told.append(msgspec.msgpack.decode(payload, type=PlanMessage))

    async with nats_server(tmp_path) as nats, bus_of(nats.url) as bus, fleet(1) as engines, routing(engines, nats=nats.url):
        bus.subscribe(Subjects("commutator").plans, heard)
        state = str(tmp_path / "state.json")
        async with planned(nats.url, actuator=ActuatorName.VIRTUAL, state_file=state) as page:
            await until(lambda: _told(page, held=False), what="it is told that one is enough, and there is one")
        async with planned(nats.url, actuator=ActuatorName.VIRTUAL, state_file=state, aggregated=PoolSettings(min=3)) as page:
            await until(lambda: any(plan.pools[0].replicas == 3 for plan in told), what="the plan is told")
            plan = next(plan for plan in reversed(told) if plan.pools[0].replicas == 3)
            assert plan.pools[0].reasons
            assert plan.number == 2, "the one before told of nothing to do, and counts"
            done = Acknowledgement(plan.planner, plan.number)
            bus.publish(Subjects("commutator").acknowledgements, msgspec.msgpack.encode(done))

            async def promised() -> bool:
                states = await page.states("aggregated")
                return (states.get("ready"), states.get("starting")) == (1, 2)

            await until(promised, what="the two that were promised count as starting")
            assert {plan.number for plan in told if plan.pools[0].replicas == 3} == {plan.number}


async def test_a_webhook_is_called_until_it_has_taken_a_plan_and_what_it_took_counts(tmp_path: Path) -> None:
    hook = Webhook(503, 302)
    async with (
        nats_server(tmp_path) as nats,
        fleet(1) as engines,
        routing(engines, nats=nats.url),
        served(hook.application()) as url,
        planned(nats.url, actuator=ActuatorName.VIRTUAL, webhook=url + "/scale", aggregated=PoolSettings(min=3)) as page,
    ):

        async def promised() -> bool:
            states = await page.states("aggregated")
            return (states.get("ready"), states.get("starting")) == (1, 2)

        await until(promised, what="two count as starting, beside the one that is there")
        decisions = json.loads(await page.get())
        assert (decisions["failures"], decisions["last_failure"]) == (2, "the webhook answers 302: as told")
    assert hook.elsewhere == 0, "a plan is not carried elsewhere"
    assert len(hook.bodies) == 3
    assert {(body["number"], body["pools"][0]["target"]) for body in hook.bodies} == {(1, 3)}
    assert len({body["planner"] for body in hook.bodies}) == 1
    assert hook.bodies[-1]["pools"][0]["reasons"]


async def test_what_a_webhook_has_not_taken_is_not_counted_on(tmp_path: Path) -> None:
    wanted = Decision(0.0, (PoolDecision("aggregated", Role.AGGREGATED, 0, 2, reasons=("two are needed",)),), number=7)
    hook = Webhook(500)
    async with nats_server(tmp_path) as nats, bus_of(nats.url) as bus, aiohttp.ClientSession() as session:
        pools = (PlannedPool("aggregated"),)
        away = Virtual(pools, "p", bus, "commutator", webhook="http://127.0.0.1:9", session=session)
        with pytest.raises(ActuatorError, match="the webhook could not be called"):
            await away.carry_out(wanted)
        assert await away.replicas({}, 0.0) == {"aggregated": ()}
        await away.close()
        async with served(hook.application()) as url:
            actuator = Virtual(pools, "p", bus, "commutator", webhook=url + "/scale", session=session)
            with pytest.raises(ActuatorError, match="the webhook answers 500: as told"):
                await actuator.carry_out(wanted)
            assert await actuator.replicas({}, 0.0) == {"aggregated": ()}
            for _ in range(2):
                await actuator.carry_out(wanted)
            there = (await actuator.replicas({}, 0.0))["aggregated"]
            assert [one.state for one in there] == [ReplicaState.STARTING] * 2
            await actuator.close()
    assert [(body["planner"], body["number"]) for body in hook.bodies] == [("p", 7)] * 2, "what has been taken is not posted again"


class Webhook:
    """Whoever carries out what is posted: answers with these statuses first, then well."""

    def __init__(self, *statuses: int) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.elsewhere = 0
        self._statuses = list(statuses)

    def application(self) -> web.Application:
        made = web.Application()
        made.add_routes([web.post("/scale", self._take), web.route("*", "/elsewhere", self._elsewhere)])
        return made

    async def _take(self, request: web.Request) -> web.Response:
        assert request.content_type == "application/json"
        self.bodies.append(await request.json())
        status = self._statuses.pop(0) if self._statuses else 204
        headers = {"location": "/elsewhere"} if status == 302 else {}
        return web.Response(status=status, headers=headers, text=None if status == 204 else "as told")

    async def _elsewhere(self, request: web.Request) -> web.Response:
        self.elsewhere += 1
        return web.Response()


async def test_a_planner_that_starts_again_goes_on_with_its_state_file(tmp_path: Path) -> None:
    state = tmp_path / "state.json"
    async with nats_server(tmp_path) as nats, fleet(1) as engines, routing(engines, nats=nats.url) as router:
        async with planned(nats.url, state_file=str(state), predictor="daily") as page:
            await router.chat("hello")
            await until(lambda: _told(page, held=False), what="it has decided")
        before = json.loads(state.read_bytes())
        async with planned(nats.url, state_file=str(state), predictor="daily") as page:
            await until(page.last, what="it decides again")
        after = json.loads(state.read_bytes())
        assert (after["planner"], after["told"]) == (before["planner"], before["told"])
        assert after["memory"]["watching_since"] == before["memory"]["watching_since"]


async def test_L3_H18_simulated_engines_go_from_one_to_six_to_two_and_no_stream_is_broken(tmp_path: Path) -> None:
    """Processes of this host, started and ended by plans, while clients stream through a router.

    A step takes 5 ms and 10 ms for each stream, so that a replica carries four streams within 50 ms a token.
    """
    arguments = ("--decode-step-ms", "5", "--decode-sequence-ms", "10", "--prefill-tokens-per-s", "1000000")
    pool = LaunchPool(name="sims", engine=EngineName.SIMULATED, model="sim", arguments=arguments)
    profile = tmp_path / "profile.json"
    profile.write_bytes(msgspec.json.encode(Profile(((1, 0.02), (1000, 0.02)), ((1, 0.015), (10, 0.105)))))
    async with (
        nats_server(tmp_path) as nats,
        routing([], nats=nats.url, admin_token=TOKEN, admission=AdmissionSettings(max_active_requests=6, max_wait_s=90.0)) as router,
        planned(
            nats.url,
            actuator=ActuatorName.PROCESS,
            loops="load",
            load_interval_s=0.5,
            stabilise_s=4.0,
            ttft_ms=None,
            profile=str(profile),
            pool=(pool,),
            aggregated=PoolSettings(min=1, max=6, startup_s=5.0),
            router=(router.admin,),
            router_token=TOKEN,
            log_folder=str(tmp_path),
            drain_s=60.0,
        ) as page,
    ):

        async def there(count: int) -> bool:
            states = await page.states("sims")
            return (states.get("ready"), states.get("draining")) == (count, 0)

        await until(lambda: there(1), what="the first engine is ready")
        streams: list[str] = []
        async with _clients(router, 7.0, streams) as clients:
            await until(lambda: there(6), deadline_s=60.0, what="six engines are ready")
            clients.rate = 1.3
            await until(lambda: there(2), deadline_s=60.0, what="two are left")
        assert len(streams) > 24
        assert {stream for stream in streams if stream != "whole"} == set(), "every stream has all its tokens and its end"
        changes = json.loads(await page.get())["changes"]
        assert any(change["pools"][0]["victims"] for change in changes)


class _Clients:
    """Clients that come at a rate, however they are served."""

    def __init__(self, rate: float) -> None:
        self.rate = rate


@contextlib.asynccontextmanager
async def _clients(router: Router, rate: float, streams: list[str]) -> AsyncIterator[_Clients]:
    """They come until the block ends; each stream is then let end."""
    clients = _Clients(rate)
    left = asyncio.Event()

    async def asks(number: int) -> None:
        streams.append(await _stream(router, f"client {number} asks"))

    async def come(group: asyncio.TaskGroup) -> None:
        loop = asyncio.get_running_loop()
        number, at = 0, loop.time()
        while not left.is_set():
            number, at = number + 1, at + 1 / clients.rate
            group.create_task(asks(number))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(left.wait(), max(0.0, at - loop.time()))

    async with asyncio.TaskGroup() as group:
        group.create_task(come(group))
        try:
            yield clients
        finally:
            left.set()


async def _stream(router: Router, text: str, tokens: int = 60) -> str:
    """How a stream went: "whole", or what was wrong with it."""
    try:
        answer = await router.chat(text, max_tokens=tokens, stream=True, stream_options={"include_usage": True})
    except aiohttp.ClientError as error:
        return repr(error)
    if answer.status != 200:
        return f"{answer.status} {answer.body[:200]!r}"
    whole = answer.body.rstrip().endswith(b"data: [DONE]") and f'"completion_tokens":{tokens}'.encode() in answer.body.replace(b" ", b"")
    return "whole" if whole and b'"error"' not in answer.body else f"broken: {answer.body[-300:]!r}"
