"""Simulated engines that hand KV over: what of it cannot be shown on real ones, or not in a test's time."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from engines.simulator import connectors
from engines.simulator.engine import SimulatedEngine
from engines.simulator.settings import Connector, LoadFailurePolicy, SimulateSettings
from engines.simulator.transfer import Link
from engines.types import EngineKind, Role
from tests.waiting import alongside, until

PROMPT = [400 + number for number in range(40)]
Fields = dict[str, Any]
KEEP: Fields = {"kv_transfer_params": {"do_remote_decode": True}}


def settings(role: Role, **fields: Any) -> SimulateSettings:  # noqa: ANN401  any setting
    chosen: Fields = {"port": 0, "speedup": 0.0, "role": role}
    return SimulateSettings(**(chosen | fields))


@contextlib.asynccontextmanager
async def pair(**fields: Any) -> AsyncIterator[tuple[SimulatedEngine, SimulatedEngine]]:  # noqa: ANN401
    """A prefill and a decode engine; `fields` are both engines' settings."""
    prefill, decode = settings(Role.PREFILL, **fields), settings(Role.DECODE, **({"hash_seed": 1} | fields))
    async with SimulatedEngine(prefill) as first, SimulatedEngine(decode) as second:
        yield first, second


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as session:
        yield session


async def complete(http: aiohttp.ClientSession, url: str, prompt: list[int] = PROMPT, **fields: object) -> Fields:
    """The answer's body, which must not be an error."""
    status, body = await answer(http, url, prompt, **fields)
    assert status == 200, body
    return body


async def answer(http: aiohttp.ClientSession, url: str, prompt: list[int] = PROMPT, **fields: object) -> tuple[int, Fields]:
    asked = {"model": "sim", "prompt": prompt, "max_tokens": 8, "return_token_ids": True} | fields
    async with http.post(f"{url}/v1/completions", json=asked) as response:
        return response.status, await response.json()


async def handle(http: aiohttp.ClientSession, engine: SimulatedEngine, prompt: list[int] = PROMPT) -> Fields:
    return {"kv_transfer_params": (await complete(http, engine.url, prompt, max_tokens=1, **KEEP))["kv_transfer_params"]}


def ids(body: Fields) -> list[int]:
    found: list[int] = body["choices"][0]["token_ids"]
    return found


# ------------------------------------------------------------------------------------------------------------------------- the link


async def test_a_link_is_shared_by_what_is_on_it() -> None:
    """Two transfers of equal size and one of half of it, all at once: the short one leaves first, the others end together."""
    link, ended, loop = Link(1_000_000), {}, asyncio.get_running_loop()
    started = loop.time()

    async def carry(name: str, size: int) -> None:
        await link.carry(size)
        ended[name] = loop.time() - started

    await asyncio.gather(carry("first", 100_000), carry("second", 100_000), carry("short", 50_000))
    assert link.active == 0
    assert ended["short"] < min(ended["first"], ended["second"])
    # a busy machine can only make them later
    assert ended["short"] > 0.14
    assert min(ended["first"], ended["second"]) > 0.24


async def test_who_leaves_a_link_leaves_it_to_the_others() -> None:
    link = Link(1_000_000)
    async with alongside(link.carry(1_000_000_000)):
        await until(lambda: link.active == 1)
    assert link.active == 0
    await link.carry(10)


async def test_a_transfer_takes_its_bytes_by_the_links_speed(http: aiohttp.ClientSession) -> None:
    async with pair(speedup=1.0, kv_bytes_per_token=1_000, link_bytes_per_s=400_000, block_size=10) as (prefill, decode):
        given = await handle(http, prefill)
        await complete(http, decode.url, **given)
        counts = decode.exchange.counts
        assert (counts.transfers, counts.bytes) == (1, 40_000)
        assert counts.seconds > 0.09


# ---------------------------------------------------------------------------------------------------------------------------- NIXL


async def test_a_lease_is_kept_running_by_a_decode_engine_that_has_no_room_yet(http: aiohttp.ClientSession) -> None:
    async with pair(speedup=1.0, kv_lease_s=0.5, max_num_seqs=1) as (prefill, decode):
        async with http.post(
            f"{decode.url}/v1/completions", json={"model": "sim", "prompt": [5], "max_tokens": 400, "stream": True}
        ) as running:
            await running.content.readline()
            given = await handle(http, prefill)
            async with asyncio.TaskGroup() as asked:
                waiting = asked.create_task(complete(http, decode.url, **given))
                # another handle that nobody asks for shows that the lease would have been over
                await handle(http, prefill, [7, 8, 9])
                await until(lambda: prefill.exchange.counts.expired == 1)
                assert not waiting.done()
                running.close()
        assert ids(waiting.result()) == ids(await complete(http, prefill.url))
        assert prefill.exchange.counts.late == 0


async def test_one_handle_serves_one_of_several_samples(http: aiohttp.ClientSession) -> None:
    async with pair() as (prefill, decode):
        given = await handle(http, prefill)
        body = await complete(http, decode.url, n=3, seed=4, **given)
        right = await complete(http, prefill.url, n=3, seed=4)
        same = [one["token_ids"] == other["token_ids"] for one, other in zip(body["choices"], right["choices"], strict=True)]
        assert same.count(True) == 1
        assert prefill.exchange.counts.late == 2


async def test_blocks_of_another_size_are_wrong(http: aiohttp.ClientSession) -> None:
    async with (
        SimulatedEngine(settings(Role.PREFILL, block_size=16)) as prefill,
        SimulatedEngine(settings(Role.DECODE, block_size=32)) as decode,
    ):
        given = await handle(http, prefill)
        assert ids(await complete(http, decode.url, **given)) != ids(await complete(http, prefill.url))


async def test_a_handle_without_blocks_ends_the_engine_at_once(http: aiohttp.ClientSession) -> None:
    async with pair() as (prefill, decode):
        given = await handle(http, prefill)
        given["kv_transfer_params"]["remote_block_ids"] = []
        with pytest.raises(aiohttp.ClientConnectionError):
            await complete(http, decode.url, **given)
        with pytest.raises(aiohttp.ClientConnectionError):
            await complete(http, decode.url)
        await decode.restart()
        await complete(http, decode.url)


@pytest.mark.parametrize("policy", list(LoadFailurePolicy))
async def test_an_engine_that_dies_while_it_sends_fails_the_request_or_has_it_computed(
    http: aiohttp.ClientSession, policy: LoadFailurePolicy
) -> None:
    async with pair(speedup=1.0, kv_bytes_per_token=1_000_000, link_bytes_per_s=1_000_000, kv_load_failure_policy=policy) as (
        prefill,
        decode,
    ):
        right = ids(await complete(http, prefill.url))
        assert isinstance(decode.exchange, connectors.Nixl)
        decode.exchange._met.add(prefill.exchange.engine_id)  # else it would wait for 5 s
        given = await handle(http, prefill)
        async with asyncio.TaskGroup() as asked:
            waiting = asked.create_task(answer(http, decode.url, **given))
            await until(lambda: prefill.exchange._link.active == 1)
            assert decode.waiting == 1
            await prefill.die()
        status, body = waiting.result()
        if policy is LoadFailurePolicy.FAIL:
            assert (status, body["error"]["message"]) == (500, "Internal server error")
        else:
            assert (status, ids(body)) == (200, right)
        assert (decode.exchange.counts.failed, decode.cache.used, decode.waiting) == (1, 0, 0)


@pytest.mark.parametrize(("host", "port"), [("x" * 300, 1), ("no.such.host.invalid", 1), ("127.0.0.1", 99_999), ("a b", "c")])
async def test_an_address_that_is_none_is_an_engine_that_is_not_there(
    http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch, host: str, port: object
) -> None:
    monkeypatch.setattr(connectors, "HANDSHAKE_S", 0.0)
    async with pair() as (prefill, decode):
        given = (await handle(http, prefill))["kv_transfer_params"] | {"remote_host": host, "remote_port": port}
        assert (await answer(http, decode.url, kv_transfer_params=given))[0] == 500
        assert (await answer(http, decode.url))[0] == 200


async def test_an_engine_that_nobody_has_met_is_waited_for(http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connectors, "HANDSHAKE_S", 0.3)
    async with pair() as (prefill, decode):
        given = await handle(http, prefill)
        await prefill.die()
        started = time.monotonic()
        status, _ = await answer(http, decode.url, **given)
        assert status == 500
        assert time.monotonic() - started > 0.28


async def test_a_restarted_engine_is_another_one_at_the_same_port(http: aiohttp.ClientSession) -> None:
    async with pair() as (prefill, decode):
        given, place = await handle(http, prefill), prefill.bootstrap
        await prefill.restart()
        assert prefill.bootstrap == place
        assert (await answer(http, decode.url, **given))[0] == 500
        again = await handle(http, prefill)
        assert again["kv_transfer_params"]["remote_engine_id"] != given["kv_transfer_params"]["remote_engine_id"]
        assert (await answer(http, decode.url, **again))[0] == 200


# ----------------------------------------------------------------------------------------------------------------- Mooncake, SGLang


async def test_mooncakes_decode_engine_that_is_told_to_keep_ends(http: aiohttp.ClientSession) -> None:
    async with pair(connector=Connector.MOONCAKE) as (_, decode):
        with pytest.raises(aiohttp.ClientConnectionError):
            await complete(http, decode.url, kv_transfer_params={"do_remote_decode": True, "transfer_id": "t"})
        with pytest.raises(aiohttp.ClientConnectionError):
            await complete(http, decode.url)


async def test_mooncake_keeps_nothing_of_an_answer_that_ended_by_itself(http: aiohttp.ClientSession) -> None:
    async with pair(connector=Connector.MOONCAKE, output_tokens=1, kv_lease_s=0.2) as (prefill, decode):
        async with http.get(f"{prefill.bootstrap}/query") as response:
            engine = (await response.json())["0"]["engine_id"]
        asked = {"model": "sim", "messages": [{"role": "user", "content": "hi"}]}
        keep: Fields = {"kv_transfer_params": {"do_remote_decode": True, "transfer_id": "t"}}
        async with http.post(f"{prefill.url}/v1/chat/completions", json=asked | keep) as response:
            assert (await response.json())["choices"][0]["finish_reason"] == "stop"
        assert prefill.cache.used == 0
        fetch = {"do_remote_prefill": True, "transfer_id": "t", "remote_engine_id": engine, "remote_bootstrap_addr": prefill.bootstrap}
        assert (await answer(http, decode.url, kv_transfer_params=fetch))[0] == 500


def room(engine: SimulatedEngine, number: int = 5) -> Fields:
    assert engine.bootstrap is not None
    return {"bootstrap_host": "127.0.0.1", "bootstrap_port": int(engine.bootstrap.rpartition(":")[2]), "bootstrap_room": number}


async def test_a_room_in_which_nobody_comes_is_a_500_on_either_side(http: aiohttp.ClientSession) -> None:
    async with pair(kind=EngineKind.SGLANG, kv_lease_s=0.2) as (prefill, decode):
        alone = await asyncio.gather(answer(http, prefill.url, **room(prefill, 5)), answer(http, decode.url, **room(prefill, 6)))
        assert [status for status, _ in alone] == [500, 500]
        assert (prefill.cache.used, decode.cache.used) == (0, 0)


async def test_a_bootstrap_server_that_comes_late_is_found(http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connectors, "ROUTE_PAUSE_S", 0.05)
    async with pair(kind=EngineKind.SGLANG) as (prefill, decode):
        told = room(prefill)
        await prefill.die()
        async with asyncio.TaskGroup() as asked:
            waiting = asked.create_task(answer(http, decode.url, **told))
            await until(lambda: decode.waiting == 1)
            await prefill.restart()
            asked.create_task(answer(http, prefill.url, **told))
        assert waiting.result()[0] == 200


async def test_a_batch_has_a_room_for_each_prompt(http: aiohttp.ClientSession) -> None:
    async with pair(kind=EngineKind.SGLANG) as (prefill, decode):
        prompts, told = [PROMPT, PROMPT[:20]], room(prefill)
        lists = {name: [value] * 2 for name, value in told.items()} | {"bootstrap_room": [7, 9]}
        for fields in (told, lists):
            both = await asyncio.gather(*(answer(http, engine.url, prompts, **fields) for engine in (prefill, decode)))  # type: ignore[arg-type]
            assert [status for status, _ in both] == [200, 200]
        status, _ = await answer(http, decode.url, prompts, **(lists | {"bootstrap_room": [7]}))  # type: ignore[arg-type]
        assert status == 400


# ---------------------------------------------------------------------------------------------------------------------- the command


async def simulate(*arguments: str) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(sys.executable, "-m", "commutator", "simulate", *arguments, stdout=pipe, stderr=pipe)


async def test_engines_of_two_processes_hand_over(http: aiohttp.ClientSession) -> None:
    processes = [await simulate("--port", "0", "--role", role) for role in ("prefill", "decode")]
    try:
        urls = []
        for process, role in zip(processes, ("prefill", "decode"), strict=True):
            assert process.stdout is not None
            (described,) = json.loads(await process.stdout.readline())["engines"]
            assert described["role"] == role
            assert described["bootstrap"].startswith("http://127.0.0.1:")
            urls.append(described["url"])
        given = (await complete(http, urls[0], max_tokens=1, **KEEP))["kv_transfer_params"]
        assert ids(await complete(http, urls[1], kv_transfer_params=given)) == ids(await complete(http, urls[0]))
    finally:
        for process in processes:
            process.terminate()
            await process.communicate()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--connector", "mooncake"], b"connector would have no effect without role"),
        (["--kind", "sglang", "--role", "decode", "--kv-load-failure-policy", "recompute"], b"kv_load_failure_policy would have no effect"),
        (["--role", "prefill", "--engines", "3", "--kv-transfer-port", "65534"], b"would need port 65536"),
    ],
)
async def test_what_would_have_no_effect_is_refused(arguments: list[str], complaint: bytes) -> None:
    process = await simulate("--port", "0", *arguments)
    _, said = await process.communicate()
    assert process.returncode == 1
    assert complaint in said
