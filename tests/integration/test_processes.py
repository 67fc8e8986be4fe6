"""Several processes on one port: they serve as one router would, and no death of one is more than its own requests'."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import ssl
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
import pytest
import trustme

from engines.simulator.engine import SimulatedEngine
from tests.integration.commands import COMMAND, DEADLINE_S
from tests.integration.processes import Group, alive, descendants, group
from tests.rig import Router, asked, fleet, prompt, settings_of
from tests.waiting import alongside, until

REFERENCE = (Path(__file__).parents[2] / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8")


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


async def everywhere(known: Callable[[], Awaitable[bool]]) -> bool:
    """Whether it is known to whoever is asked, a dozen times in a row: one of two processes is missed in 1 of 2,048 runs."""
    for _ in range(12):
        if not await known():
            return False
    return True


async def test_a_prefix_seen_by_one_process_is_a_hit_through_every_other(log: Path) -> None:
    async with fleet(2) as engines, group(engines, log) as router:
        first = await router.chat(prompt("a"))
        assert first.cached_tokens == 0

        async def known() -> bool:
            return await router.overlap_at(first.engine, prompt("a")) > 0

        await until(lambda: everywhere(known), what="the events have arrived in every process")
        answers = await router.through_all(2, prompt("a"))
        assert {answer.engine for answer in answers} == {first.engine}
        assert min(answer.cached_tokens for answer in answers) > 0.9 * answers[0].json["usage"]["prompt_tokens"]


async def test_each_engine_s_events_are_relayed_by_one_process_and_engines_are_shared_out(log: Path) -> None:
    async with fleet(4) as engines, group(engines, log) as router:

        def shared_out() -> bool:
            relayed = owners(router)
            each_has_one = relayed.keys() == {engine.url for engine in engines} and all(len(by) == 1 for by in relayed.values())
            return each_has_one and set().union(*relayed.values()) == {0, 1}

        await until(shared_out, what="each engine has one relay, and both processes have engines")


def owners(router: Group) -> dict[str, set[int]]:
    """Engine → the processes that relay it, by what they have logged."""
    found: dict[str, set[int]] = {}
    events = [(line, True) for line in router.lines("relaying KV events")]
    events += [(line, False) for line in router.lines("another router relays KV events")]
    for line, takes in sorted(events, key=lambda event: event[0]["time"]):
        (found.setdefault(line["engine"], set()).add if takes else found.setdefault(line["engine"], set()).discard)(line["process"])
    return found


@pytest.mark.parametrize("policy", ["kv", "least-loaded", "round-robin"])
async def test_R22_requests_in_flight_are_spread_over_engines_whichever_processes_they_came_to(log: Path, policy: str) -> None:
    async with fleet(2, speedup=1, decode_step_ms=100) as engines, group(engines, log, "--policy", policy) as router:
        streams: list[aiohttp.ClientResponse] = []
        try:
            for number in range(20):
                streams.append(await router.begin(prompt(f"p{number}", 40), stream=True, max_tokens=1000))  # noqa: PERF401  see finally
            running = [engine.running + engine.waiting for engine in engines]
            assert sum(running) == 20
            assert max(running) <= 12, running
            total = await router.metric("router_active_requests")
            assert total == 20, "the page adds up what processes have in flight"
        finally:
            for stream in streams:
                stream.close()

        async def none_in_flight() -> bool:
            return await router.metric("router_active_requests") == 0

        await until(none_in_flight, what="all are given back")
        assert len(router.served()) <= 2


async def test_R22_a_burst_over_four_processes_is_spread_over_four_engines(log: Path) -> None:
    async with fleet(4, speedup=1, decode_step_ms=100) as engines, group(engines, log, processes=4) as router:
        streams = await asyncio.gather(*(router.begin(prompt(f"p{number}", 40), stream=True, max_tokens=1000) for number in range(64)))
        running = [engine.running + engine.waiting for engine in engines]
        for stream in streams:
            stream.close()
        assert sum(running) == 64
        assert max(running) <= 1.5 * 16, running


async def test_load_that_another_process_has_put_on_an_engine_is_seen(log: Path) -> None:
    async with fleet(2, speedup=1, decode_step_ms=100) as engines, group(engines, log, "--policy", "least-loaded") as router:
        streams = [await router.begin(f"x{number}", stream=True, max_tokens=1000) for number in range(6)]

        async def told() -> bool:
            loads = [c["load"]["active_requests"] for c in (await router.route("y"))["candidates"]]
            return sum(map(int, loads)) == 6

        await until(lambda: everywhere(told), what="every process knows of all six")
        for stream in streams:
            stream.close()


async def test_metrics_and_readiness_do_not_depend_on_the_process_that_is_asked(log: Path) -> None:
    async with fleet(1) as engines, group(engines, log) as router:
        answers = await router.through_all(2, "hello")
        pages = [await router.metric("router_requests_total", route="/v1/chat/completions") for _ in range(8)]
        assert pages == [len(answers)] * 8
        assert await router.metric("router_processes") == 2
        shown = re.findall(r"^# TYPE (\S+) (\S+)$", (await router.get("/metrics")).body.decode(), re.MULTILINE)
        assert set(shown) <= set(re.findall(r"^\| `(\S+)` \| (\S+) \|", REFERENCE, re.MULTILINE))
        ready = [(await router.get("/ready")).json for _ in range(8)]
        assert ready == [{"ready": True, "models": {"sim": 1}, "joining": []}] * 8
        assert (await router.get("/ready?model=none")).status == 503


async def test_an_operator_s_change_reaches_every_process_and_those_started_later(log: Path) -> None:
    async with fleet(2) as engines, group(engines[:1], log) as router:
        status, added = await router.admin_call("POST", "/admin/engines", {"url": engines[1].url})
        assert (status, added["outcome"]) == (201, "added")

        async def both_serve() -> bool:
            return await router.serving() == 2

        await until(both_serve, what="the engine that was added serves in every process")
        assert (await router.admin_call("POST", f"/admin/engines/{engines[0].url}/drain"))[1]["draining"] is True
        assert {answer.engine for answer in await router.through_all(2, "hello")} == {engines[1].url}

        victim = router.workers()[0]
        os.kill(victim, signal.SIGKILL)

        async def back() -> bool:
            return victim not in router.workers() and await router.metric("router_processes") == 2

        await until(back, deadline_s=DEADLINE_S, what="the process was started again")
        answers = await router.through_all(2, "hello again")
        assert {answer.engine for answer in answers} == {engines[1].url}
        status, engine = await router.admin_call("DELETE", f"/admin/engines/{engines[0].url}")
        assert (status, engine["state"]) == (200, "removed")
        assert (await router.admin_call("GET", f"/admin/engines/{engines[0].url}"))[0] == 404
        status, told = await router.admin_call("GET", "/admin/engines")
        assert [one["id"] for one in told["engines"]] == [engines[1].url]


async def test_an_admin_call_that_is_refused_is_refused_once(log: Path) -> None:
    async with fleet(1) as engines, group(engines, log) as router:
        status, told = await router.admin_call("POST", "/admin/engines", {"url": "http://169.254.169.254"})
        assert status == 400
        assert "169.254.169.254" in told["error"]["message"]
        assert (await router.admin_call("POST", "/admin/engines/http://127.0.0.1:9/drain"))[0] == 404
        assert (await router.admin_call("PUT", "/admin/engines"))[0] == 405
        async with router.session.get(router.admin + "/admin/engines") as answer:
            assert answer.status == 401


async def test_killing_one_process_under_load_breaks_only_its_own_requests(log: Path) -> None:
    async with fleet(2, speedup=1, decode_step_ms=20) as engines, group(engines, log) as router:
        assert (await router.chat(prompt("warm"))).status == 200
        outcomes: list[tuple[str, str]] = []
        stop = asyncio.Event()

        async def client(number: int) -> None:
            """Streams one after the other; says how each ended."""
            turn = 0
            while not stop.is_set():
                turn += 1
                try:
                    response = await router.begin(f"client {number} {turn}", stream=True, max_tokens=20)
                    body = await response.read()
                    outcomes.append((f"{response.status}", "whole" if body.rstrip().endswith(b"[DONE]") else "broken"))
                except aiohttp.ClientError as error:
                    outcomes.append((type(error).__name__, "broken"))

        async with asyncio.TaskGroup() as clients:
            for number in range(8):
                clients.create_task(client(number))
            await until(lambda: len(outcomes) >= 16, deadline_s=DEADLINE_S, what="requests end")
            counted = [await router.metric("router_requests_total", route="/v1/chat/completions")]
            victim = router.workers()[0]
            in_flight = 8
            os.kill(victim, signal.SIGKILL)
            killed_at = len(outcomes)

            async def whole_again() -> bool:
                counted.append(await router.metric("router_requests_total", route="/v1/chat/completions"))
                return victim not in router.workers() and await router.metric("router_processes") == 2 and await router.serving() == 2

            await until(whole_again, deadline_s=DEADLINE_S, what="the group is whole again")
            recovered_at = len(outcomes)
            await until(lambda: len(outcomes) >= recovered_at + 24, deadline_s=DEADLINE_S, what="requests go on")
            stop.set()
        broken = [outcome for outcome in outcomes if outcome != ("200", "whole")]
        assert len(broken) <= in_flight, "no more than what was in flight when it was killed"
        assert all(outcome == ("200", "whole") for outcome in outcomes[recovered_at + in_flight :])
        assert killed_at >= 16
        assert counted == sorted(counted), "a counter went back"
        assert await router.metric("router_process_restarts_total") == 1

        async def relayed() -> bool:
            states = await router.metric("router_signal_state", state="live")
            return states == len(engines)

        await until(relayed, deadline_s=DEADLINE_S, what="every engine's events are relayed again, and every copy is complete")
        assert min(answer.cached_tokens for answer in await router.through_all(2, prompt("warm"))) > 0

        async def none_in_flight() -> bool:
            return await router.metric("router_active_requests") == 0

        await until(none_in_flight, what="nothing of the dead process counts any more")
        await until(lambda: not any(engine.running for engine in engines), what="engines have ended what it had asked")


@pytest.mark.parametrize("victim", ["parent", "parent, while it starts"])
async def test_nothing_outlives_a_parent_that_is_killed(log: Path, victim: str) -> None:
    async with fleet(1) as engines:
        process = await asyncio.create_subprocess_exec(
            COMMAND,
            *("serve", "--processes", "3", "--engine", engines[0].url, "--host", "127.0.0.1", "--port", "0"),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        assert process.stdout is not None
        if victim == "parent":
            assert await asyncio.wait_for(process.stdout.readline(), DEADLINE_S)
        await until(lambda: len(descendants(process.pid)) >= 4, deadline_s=DEADLINE_S, what="workers and broker are there")
        below = descendants(process.pid)
        process.kill()
        await process.wait()
        await until(lambda: not any(map(alive, below)), deadline_s=DEADLINE_S, what="workers and broker have ended")


async def test_a_port_in_use_is_said_once(log: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        code, said = await refused("--engine", "http://127.0.0.1:9", "--port", str(taken.getsockname()[1]))
    assert code == 1
    assert said.count("address already in use") == 1


async def test_a_second_group_is_refused_the_port_of_the_first(log: Path) -> None:
    async with fleet(1) as engines, group(engines, log) as router:
        code, said = await refused("--engine", engines[0].url, "--port", router.url.rpartition(":")[2])
        assert (code, said.count("address already in use")) == (1, 1)


@pytest.mark.parametrize(
    ("flags", "code", "says"),
    [
        (("--policy", "nothing_here:Policy"), 2, "nothing_here"),
        (("--nats", "nats://127.0.0.1:9"), 1, "no NATS at nats://127.0.0.1:9"),
        (("--api-keys-file", "/nowhere/keys"), 2, "/nowhere/keys"),
    ],
)
async def test_what_keeps_workers_from_starting_is_said_once(flags: tuple[str, ...], code: int, says: str) -> None:
    got, said = await refused("--engine", "http://127.0.0.1:9", "--port", "0", *flags)
    errors = [line for line in said.splitlines() if "error: " in line]
    assert (got, len(errors)) == (code, 1), said
    assert says in errors[0]


async def refused(*flags: str) -> tuple[int | None, str]:
    """The exit code and what was said, of a command that does not come to serve."""
    process = await asyncio.create_subprocess_exec(
        COMMAND,
        *("serve", "--processes", "3", "--host", "127.0.0.1", "--log-level", "error", *flags),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    below: list[int] = []

    async def watch() -> None:
        while process.returncode is None:
            below.extend(pid for pid in descendants(process.pid) if pid not in below)
            await asyncio.sleep(0.02)

    watching = asyncio.create_task(watch())  # noqa: TID251  ended below
    out, err = await asyncio.wait_for(process.communicate(), DEADLINE_S)
    watching.cancel()
    assert out == b""
    await until(lambda: not any(map(alive, below)), what="nothing is left behind")
    return process.returncode, err.decode()


async def test_requests_in_progress_finish_before_the_group_ends(log: Path) -> None:
    async with fleet(1, speedup=1, decode_step_ms=20) as engines, group(engines, log) as router:
        streams = [await router.begin(f"x{number}", stream=True, max_tokens=60) for number in range(6)]
        router.stop()

        await until(router.refuses, deadline_s=DEADLINE_S, what="no new connection is accepted")
        for stream in streams:
            assert (await stream.read()).rstrip().endswith(b"[DONE]")


async def test_a_second_interrupt_ends_the_group_at_once(log: Path) -> None:
    async with (
        SimulatedEngine(settings_of(speedup=1, decode_step_ms=200)) as engine,
        group([engine], log, "--grace-period-s", "600", code=130) as router,
    ):
        stream = await router.begin("x", stream=True, max_tokens=10_000)
        below = descendants(router.process.pid)
        router.stop(signal.SIGINT)

        await until(router.refuses, deadline_s=DEADLINE_S, what="no new connection is accepted")
        assert engine.running == 1
        router.process.send_signal(signal.SIGINT)
        await until(lambda: not any(map(alive, below)), deadline_s=DEADLINE_S, what="all processes have ended")
        await asyncio.wait_for(router.process.wait(), DEADLINE_S)
        stream.close()
        await until(lambda: engine.running == 0, what="the engine sees the stream end")


async def test_a_hangup_reaches_every_process(log: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("alice:sk-1\n")
    async with fleet(1) as engines, group(engines, log, "--api-keys-file", str(keys)) as router:
        stat = keys.stat()
        keys.write_text("alice:sk-2\n")
        os.utime(keys, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # it does not look changed
        router.process.send_signal(signal.SIGHUP)
        await until(
            lambda: len({line.get("process") for line in router.lines("files read again")}) == 3, what="parent and workers read again"
        )
        for _ in range(8):
            assert (await router.request("GET", "/v1/models", headers={"x-api-key": "sk-1"})).status == 401
            assert (await router.request("GET", "/v1/models", headers={"x-api-key": "sk-2"})).status == 200
    assert "sk-1" not in log.read_text()


async def test_R36_equal_prompts_to_different_processes_do_not_scatter(log: Path) -> None:
    """The engine takes longer for the prompt than any machine does for the rest."""
    async with fleet(2, speedup=1, prefill_tokens_per_s=10) as engines, group(engines, log) as router, asyncio.TaskGroup() as clients:
        text = prompt("same", 400)
        asking = [clients.create_task(router.chat(text, stream=True))]

        def at_engines() -> list[int]:
            return sorted(engine.running + engine.waiting for engine in engines)

        await until(lambda: at_engines() == [0, 1], what="the first is being computed")

        async def known() -> bool:
            return str((await router.route(text))["reason"]) == "in_flight"

        await until(lambda: everywhere(known), what="every process knows of it")
        asking += [clients.create_task(router.chat(text, stream=True)) for _ in range(6)]
        await until(lambda: sum(at_engines()) == 7, what="the others are there")
        assert at_engines() == [0, 7]
        for task in asking:
            task.cancel()


async def test_the_bound_on_waiting_requests_is_the_group_s(log: Path) -> None:
    flags = ("--admission-max-active-requests", "2", "--admission-max-waiting", "4", "--admission-max-wait-s", "30")
    async with fleet(1, speedup=1, decode_step_ms=50) as engines, group(engines, log, *flags) as router, asyncio.TaskGroup() as clients:
        tried = [clients.create_task(router.chat(f"y{number}", max_tokens=4000)) for number in range(30)]
        await until(lambda: sum(task.done() for task in tried) >= 24, deadline_s=DEADLINE_S, what="those beyond the bound are told so")
        assert {task.result().status for task in tried if task.done()} == {429}
        assert len(asked(engines[0])) <= 2
        for task in tried:
            task.cancel()


async def test_processes_do_not_starve_each_other_where_engines_are_full(log: Path) -> None:
    flags = ("--admission-max-active-requests", "2", "--admission-max-wait-s", "5")
    answers: Counter[int] = Counter()
    async with fleet(1, speedup=1, decode_step_ms=10) as engines, group(engines, log, *flags) as router:

        async def ask(client: int) -> None:
            async with aiohttp.ClientSession() as session:  # a connection of its own, and so always the same process
                while True:
                    answer = await Router(router.url, session).chat(f"client {client} asks {answers[client]}")
                    assert answer.status == 200, answer
                    answers[client] += 1

        async with contextlib.AsyncExitStack() as stack:
            for client in range(12):
                await stack.enter_async_context(alongside(ask(client)))
            await until(lambda: len(answers) == 12 and min(answers.values()) >= 5, deadline_s=DEADLINE_S, what="each client has its turns")


async def test_every_process_serves_https_with_the_certificate_and_takes_a_new_one_in(log: Path, tmp_path: Path) -> None:
    authority = trustme.CA()
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"

    def issue(name: str) -> None:
        made = authority.issue_cert("127.0.0.1", common_name=name)
        made.private_key_pem.write_to_path(str(key))
        made.cert_chain_pems[0].write_to_path(str(cert))

    issue("first")
    context = ssl.create_default_context()
    authority.configure_trust(context)
    flags = ("--tls-cert", str(cert), "--tls-key", str(key))
    async with fleet(1) as engines, group(engines, log, *flags, trust=context) as router:
        assert router.url.startswith("https://")
        assert router.admin.startswith("https://")
        assert (await router.admin_call("GET", "/admin/engines"))[0] == 200
        issue("second")
        router.process.send_signal(signal.SIGHUP)

        async def shown() -> str:
            reader, writer = await asyncio.open_connection(*router.url.removeprefix("https://").split(":"), ssl=context)
            subject = dict(field for part in writer.get_extra_info("peercert")["subject"] for field in part)
            writer.close()
            del reader
            return str(subject["commonName"])

        async def all_second() -> bool:
            return {await shown() for _ in range(8)} == {"second"}

        await until(all_second, deadline_s=DEADLINE_S, what="every process has the new certificate")
