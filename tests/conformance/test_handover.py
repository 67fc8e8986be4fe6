"""What does a router rely on when one engine computes a prompt and another one goes on from it? Seen from outside, engine by engine.

Real engines serve one test after the other (see `tests.engines.fixtures`), so what a test leaves behind is its own prompts' affair only.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple

import pytest
from aiohttp import ClientConnectionError, ClientSession, ClientTimeout

from engines.simulator.engine import SimulatedEngine
from engines.simulator.settings import Connector, SimulateSettings
from engines.types import EngineKind, Role
from tests.conformance.handing import Fields, Hands, PairedEngines, failure_of, ids_of, metric, wrapped
from tests.conformance.wire import Answer, Client, Engine, EventFeed
from tests.engines.fixtures import HAND_OVER
from tests.engines.pairs import Pair
from tests.waiting import alongside, until

LEASE_S = 1.5
"""Of simulated engines: nobody has to wait for the real ones' 30 s."""


class SimulatedPair(NamedTuple):
    prefill: SimulatedEngine
    decode: SimulatedEngine

    @property
    def bootstrap(self) -> str:
        assert self.prefill.bootstrap is not None
        return self.prefill.bootstrap


@contextlib.asynccontextmanager
async def simulated(way: str) -> AsyncIterator[SimulatedPair]:
    kind = EngineKind.SGLANG if way == "sglang" else EngineKind.VLLM
    connector = Connector.MOONCAKE if way == "mooncake" else Connector.NIXL
    lease_s = 0.0 if way == "sglang" else LEASE_S
    prefill, decode = (
        SimulateSettings(
            port=0, kind=kind, role=role, connector=connector, kv_lease_s=lease_s, hash_seed=seed, prefill_tokens_per_s=200_000
        )
        for seed, role in enumerate((Role.PREFILL, Role.DECODE))
    )
    async with SimulatedEngine(prefill) as first, SimulatedEngine(decode) as second:
        yield SimulatedPair(first, second)


def ways(*names: str) -> pytest.MarkDecorator:
    """A test of pairs that hand over in these ways, simulated and real."""
    return pytest.mark.parametrize(
        "pair", [*names, *(pytest.param(f"{name}_pair", marks=pytest.mark.real_engine) for name in names)], indirect=True
    )


ALL = ways("nixl", "mooncake", "sglang")
VLLM = ways("nixl", "mooncake")
AT_ONCE = ways("mooncake", "sglang")


@pytest.fixture
async def pair(request: pytest.FixtureRequest) -> AsyncIterator[tuple[str, PairedEngines]]:
    if request.param == "sglang_pair":
        request.getfixturevalue("launched").launch(["real_sglang"])  # see `alone`: on its way while the pair starts
    if request.param in HAND_OVER:
        real: Pair = request.getfixturevalue(request.param)
        yield real.kind.name, real
        return
    async with simulated(request.param) as found:
        yield request.param, found


@pytest.fixture
async def session() -> AsyncIterator[ClientSession]:
    async with ClientSession(timeout=ClientTimeout(total=60)) as session:
        yield session


@pytest.fixture
async def hands(pair: tuple[str, PairedEngines], session: ClientSession) -> Hands:
    way, engines = pair

    async def kill() -> None:
        if isinstance(engines, Pair):
            await asyncio.to_thread(engines.prefill.kill)
        elif isinstance(engines.prefill, SimulatedEngine):
            await engines.prefill.die()

    return Hands(way, engines, await Client.of(engines.prefill, session), await Client.of(engines.decode, session), kill)


@pytest.fixture
async def alone(hands: Hands, request: pytest.FixtureRequest, session: ClientSession) -> AsyncIterator[Client]:
    """An engine that computes prompts and answers by itself: vLLM's prefill engine is one, if it is told nothing."""
    if hands.way != "sglang":
        yield hands.prefill
    elif isinstance(hands.pair, Pair):
        yield await Client.of(request.getfixturevalue("real_sglang"), session)
    else:
        async with SimulatedEngine(SimulateSettings(port=0, kind=EngineKind.SGLANG)) as engine:
            yield await Client.of(engine, session)


# --------------------------------------------------------------------------------------------------------- however it is handed over


@ALL
async def test_a_pair_answers_token_for_token_as_one_engine_does(hands: Hands, alone: Client) -> None:
    size = hands.size
    for length in (1, size - 1, size, size + 1, 3 * size + 5):
        prompt = hands.decode.ids(4)[:length]
        answered = await hands.ids(prompt, 12)
        assert answered == ids_of(await alone.complete(prompt, max_tokens=12, return_token_ids=True)), f"{length} tokens"


@ALL
async def test_prefill_answers_with_the_first_token_and_decode_with_that_one_too(hands: Hands) -> None:
    first, second = await hands.legs(hands.decode.ids(2.5), max_tokens=4)
    assert first.json["usage"]["completion_tokens"] == 1
    assert second.json["choices"][0]["text"].startswith(first.json["choices"][0]["text"])
    assert second.json["usage"]["completion_tokens"] == 4


@VLLM
async def test_by_its_own_count_vllms_decode_engine_computes_nothing_of_the_prompt(hands: Hands) -> None:
    before, prompt = await hands.sources(), hands.decode.ids(2.5)
    await hands.legs(prompt)
    assert await hands.sources() - before == (0, 0, len(prompt))


@ALL
async def test_decode_tells_what_prefill_had_cached(hands: Hands) -> None:
    prompt = hands.decode.ids(4)
    await hands.legs(prompt)
    first, second = await hands.legs(prompt + hands.decode.ids(0.5))
    cached = [answer.json["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in (first, second)]
    # Mooncake tells nothing to the other engine, which counts what it was sent
    assert cached == [len(prompt), len(prompt) + hands.size // 2 if hands.way == "mooncake" else len(prompt)]


@VLLM
async def test_only_blocks_that_vllms_decode_engine_has_not_are_sent(hands: Hands) -> None:
    prompt = hands.decode.ids(4)
    await hands.legs(prompt)
    before = await hands.sources()
    await hands.legs(prompt + hands.decode.ids(0.5))
    assert await hands.sources() - before == (0, len(prompt), hands.size // 2)


@ALL
async def test_a_chat_takes_ids_together_with_a_hand_over(hands: Hands, alone: Client) -> None:
    prompt = hands.decode.ids(2.5)
    message = [{"role": "user", "content": "of no account"}]
    if hands.way == "nixl":
        here = wrapped(await hands.handle(prompt) | {"prompt_token_ids": prompt})
        answer = await hands.decode.chat(message, max_tokens=8, **here)
    else:
        there, here = await hands.told()
        given = {"input_ids": prompt} if hands.way == "sglang" else wrapped(here["kv_transfer_params"] | {"prompt_token_ids": prompt})
        _, answer = await asyncio.gather(
            hands.prefill.complete(prompt, **there), hands.decode.chat(message, max_tokens=8, **(here | given))
        )
    itself = {"input_ids": prompt} if hands.way == "sglang" else wrapped({"prompt_token_ids": prompt})
    right = await alone.chat(message, max_tokens=8, **itself)
    assert answer.json["choices"][0]["message"]["content"] == right.json["choices"][0]["message"]["content"]


@ALL
async def test_a_decode_engine_that_is_told_nothing_computes_itself_or_refuses(hands: Hands, alone: Client) -> None:
    prompt = hands.decode.ids(2.5)
    answer = await hands.decode.complete(prompt, max_tokens=8, return_token_ids=True)
    if hands.way == "sglang":
        assert answer.status == 400
        # where a stream has been opened by then, the refusal comes in it
        assert failure_of(await hands.decode.complete(prompt, stream=True))["code"] == 400
    else:
        assert ids_of(answer) == ids_of(await alone.complete(prompt, max_tokens=8, return_token_ids=True))


@ALL
async def test_another_prompts_kv_is_a_wrong_answer_and_no_error(hands: Hands, alone: Client) -> None:
    """Of several prompts: the real ones' tiny model says of some of them the same whatever came before."""
    prompts = [hands.decode.ids(2.5) for _ in range(4)]
    answered = []
    for prompt in prompts:
        if hands.way == "nixl":
            here = wrapped(await hands.handle(hands.decode.ids(2.5)))
            answer = await hands.decode.complete(prompt, max_tokens=12, return_token_ids=True, **here)
        else:
            there, here = await hands.told()
            asked = hands.decode.complete(prompt, max_tokens=12, return_token_ids=True, **here)
            _, answer = await asyncio.gather(hands.prefill.complete(hands.decode.ids(2.5), **there), asked)
        answered.append(ids_of(answer))
    right = await answers(alone, prompts)
    assert answered != right
    if hands.way != "sglang":  # and what has once been taken for a prompt's stays in the cache
        assert await answers(hands.decode, prompts) != right


@ALL
async def test_engines_tell_their_role_where_they_tell_anything(hands: Hands) -> None:
    for client, role in ((hands.prefill, "prefill"), (hands.decode, "decode")):
        if hands.way == "sglang":
            told = (await client.get("/server_info")).json
            assert told["disaggregation_mode"] == role
            assert told["disaggregation_transfer_backend"] == "mooncake"
            (load,) = (await client.get("/v1/loads?include=core,disagg")).json["loads"]
            assert load["disaggregation"]["mode"] == role
            assert load["disaggregation"]["prefill_bootstrap_queue_reqs"] >= 0
        else:
            told = (await client.get("/server_info?config_format=json")).json["vllm_config"]["kv_transfer_config"]
            assert told["kv_connector"] == {"nixl": "NixlConnector", "mooncake": "MooncakeConnector"}[hands.way]
            assert told["kv_role"] == {"prefill": "kv_producer", "decode": "kv_consumer"}[role]


@ALL
async def test_both_vllm_engines_announce_the_prompts_blocks_and_sglangs_decode_engine_none(hands: Hands) -> None:
    prompt = hands.decode.ids(2.5)
    async with EventFeed(hands.pair.prefill) as there, EventFeed(hands.pair.decode) as here:
        await hands.legs(prompt)
        for feed, announces in ((there, True), (here, hands.way != "sglang")):

            async def announced(feed: EventFeed = feed) -> bool:
                events = [event for message in await feed.replay(0) for event in message.events if event["type"] == "BlockStored"]
                return prompt[: hands.size] in [list(event["token_ids"][: hands.size]) for event in events]

            if announces:
                await until(announced, what="the prompt's blocks")
            else:
                assert await feed.replay(0) == []


@ALL
async def test_a_client_that_leaves_decode_leaves_nothing_behind(hands: Hands) -> None:
    prompt = hands.decode.ids(2.5)
    async with asyncio.TaskGroup() as legs:
        if hands.way == "nixl":
            here = wrapped(await hands.handle(prompt))
        else:
            there, here = await hands.told()
            legs.create_task(hands.prefill.complete(prompt, **there))
        async with hands.decode.stream(prompt, max_tokens=4000, **here) as response:
            await response.content.readline()
    await until(lambda: idle(hands.decode), deadline_s=15, what="the decode engine to give up the request")
    if hands.way != "sglang":
        await until(lambda: free(hands), what="the prefill engine to free the blocks")


# --------------------------------------------------------------------------------------------------------- NIXL: a handle

NIXL = ways("nixl")


@NIXL
async def test_blocks_are_kept_until_they_are_pulled(hands: Hands) -> None:
    await until(lambda: free(hands), what="what others left to be freed")
    prompt = hands.decode.ids(2.5)
    handle = await hands.handle(prompt)
    await until(hands.used, what="the engine to say that it keeps blocks")
    await hands.decode.complete(prompt, **wrapped(handle))
    await until(lambda: free(hands), what="the blocks to be freed")


@NIXL
async def test_the_handle_names_blocks_a_request_and_where_to_ask(hands: Hands) -> None:
    prompt = hands.decode.ids(2.5)
    handle = await hands.handle(prompt)
    host, _, port = hands.pair.bootstrap.removeprefix("http://").rpartition(":")
    assert {
        name: handle[name] for name in ("do_remote_prefill", "do_remote_decode", "remote_host", "remote_port", "remote_num_tokens")
    } == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_host": host,
        "remote_port": int(port),
        "remote_num_tokens": len(prompt),
    }
    (blocks,) = handle["remote_block_ids"]
    assert len(set(blocks)) == 3
    assert handle["remote_request_id"].startswith("cmpl-")
    assert (handle["tp_size"], handle["transfer_mode"], handle["remote_prefill_cached_tokens"]) == (1, "pull", 0)
    another = await hands.handle(hands.decode.ids(1))
    assert another["remote_engine_id"] == handle["remote_engine_id"]
    assert another["remote_request_id"] != handle["remote_request_id"]


@NIXL
async def test_nobody_gets_a_handle_who_has_not_asked_or_streams(hands: Hands) -> None:
    assert (await hands.prefill.complete(hands.decode.ids(1))).json["kv_transfer_params"] is None
    streamed = await hands.prefill.complete(hands.decode.ids(1), stream=True, **wrapped({"do_remote_decode": True}))
    assert b"remote_block_ids" not in streamed.body


@NIXL
async def test_pulls_are_timed_and_counted_by_the_decode_engine(hands: Hands) -> None:
    names = [f"vllm:nixl_{name}" for name in ("xfer_time_seconds_count", "bytes_transferred_count", "bytes_transferred_sum")]

    async def counted() -> list[float]:
        return [await metric(hands.decode, name) for name in names]

    before = await counted()
    await hands.legs(hands.decode.ids(2.5))
    gained = [now - then for now, then in zip(await counted(), before, strict=True)]
    assert gained[:2] == [1, 1]
    assert gained[2] > 0


@NIXL
async def test_another_engines_id_is_a_500_or_the_streams_last_event(hands: Hands) -> None:
    prompt = hands.decode.ids(2.5)
    before = await metric(hands.decode, "vllm:nixl_num_failed_transfers_total")
    wrong = wrapped(await hands.handle(prompt) | {"remote_engine_id": "no such engine"})
    answer = await hands.decode.complete(prompt, **wrong)
    assert (answer.status, answer.json["error"]["type"]) == (500, "InternalServerError")
    assert failure_of(await hands.decode.complete(prompt, stream=True, **wrong))["code"] == 500
    chat = await hands.decode.chat([{"role": "user", "content": "hi"}], stream=True, **wrong)
    assert failure_of(chat)["code"] == 500
    assert b'"role"' in chat.events[0]  # whose turn it is has been told by then
    assert await metric(hands.decode, "vllm:nixl_num_failed_transfers_total") > before


@NIXL
async def test_after_the_lease_or_a_pull_the_same_handle_is_a_wrong_answer_and_no_error(hands: Hands, alone: Client) -> None:
    unfetched, fetched = ([hands.decode.ids(2.5) for _ in range(3)] for _ in range(2))
    expired, late = "vllm:nixl_num_kv_expired_reqs_total", "vllm:nixl_num_notifications_after_expiry_total"
    before = await metric(hands.prefill, expired), await metric(hands.prefill, late)
    right = await answers(alone, unfetched), await answers(alone, fetched)
    handles = [await hands.handle(prompt) for prompt in unfetched]
    for prompt, said in zip(fetched, right[1], strict=True):
        handles.append(await hands.handle(prompt))
        assert await answers(hands.decode, [prompt], handles[-1:]) == [said]
    assert (await hands.decode.post("/reset_prefix_cache", {})).status == 200

    async def over() -> bool:
        return await metric(hands.prefill, expired) >= before[0] + len(unfetched) and await free(hands)

    await until(over, deadline_s=60, what="the lease to run out")
    for _ in range(5):  # whoever needs the blocks takes them
        assert (await hands.prefill.complete(hands.decode.ids(room(hands.pair.prefill) / 4.5))).status == 200
    for prompts, given, wanted in ((unfetched, handles[:3], right[0]), (fetched, handles[3:], right[1])):
        late_answers: list[list[int]] = []
        for prompt, handle in zip(prompts, given, strict=True):
            await hands.handle(hands.decode.ids(1))  # while it keeps something, this build of NIXL looks after other engines
            late_answers += await answers(hands.decode, [prompt], [handle])
        assert late_answers != wanted
        assert await answers(hands.decode, prompts) != wanted, "nothing wrong is in the cache"

    async def noticed() -> bool:
        return await metric(hands.prefill, late) == before[1] + len(handles)

    await until(noticed, what="the prefill engine to count what came late")


@NIXL
@pytest.mark.ends_engines
async def test_a_prefill_engine_that_is_gone_is_a_500_and_a_handle_without_its_host_the_end_of_decode(hands: Hands) -> None:
    await hands.legs(hands.decode.ids(1))
    prompt = hands.decode.ids(2.5)
    handle = await hands.handle(prompt)
    await hands.kill_prefill()
    assert (await hands.decode.complete(prompt, **wrapped(handle))).status == 500
    assert (await hands.decode.complete(prompt)).status == 200
    del handle["remote_host"]
    async with alongside(hands.decode.complete(hands.decode.ids(2.5), **wrapped(handle))) as asked:
        await until(hands.decode.unfinished, what="the engine to count the request")
        assert (await hands.decode.complete(hands.decode.ids(1))).status == 200
        assert not asked.done()
    # its client has left
    await until(lambda: gone(hands.decode), what="the decode engine to end")


# ------------------------------------------------------------------------------------------- Mooncake and SGLang: both at once


@AT_ONCE
async def test_either_leg_may_come_first(hands: Hands, alone: Client) -> None:
    await hands.legs(hands.decode.ids(1))  # the first transfer of engines that have just started may take longer than one leg waits
    for decode_first in (True, False):
        prompt = hands.decode.ids(2.5)
        there, here = await hands.told()
        decode = hands.decode.complete(prompt, max_tokens=8, return_token_ids=True, **here)
        first, last = (
            (decode, hands.prefill.complete(prompt, **there)) if decode_first else (hands.prefill.complete(prompt, **there), decode)
        )
        async with asyncio.TaskGroup() as legs:
            legs_done = [legs.create_task(first)]
            # whoever comes first has been there for as long as it takes the others to answer somebody else
            await hands.legs(hands.decode.ids(1))
            legs_done.append(legs.create_task(last))
        assert ids_of(legs_done[0 if decode_first else 1].result()) == ids_of(
            await alone.complete(prompt, max_tokens=8, return_token_ids=True)
        )


@AT_ONCE
async def test_decode_waits_for_a_prefill_that_does_not_come_and_is_free_when_its_client_leaves(hands: Hands) -> None:
    _, here = await hands.told()
    async with alongside(hands.decode.complete(hands.decode.ids(2.5), **here)) as asked:
        if hands.way == "mooncake":
            await until(hands.decode.unfinished, what="the engine to count the request")
        assert (await hands.legs(hands.decode.ids(1)))[1].status == 200
        assert not asked.done()
    await until(lambda: idle(hands.decode), deadline_s=15, what="the decode engine to give up the request")


@AT_ONCE
async def test_a_stream_is_opened_before_the_kv_has_come_by_vllm_and_not_by_sglang(hands: Hands) -> None:
    _, here = await hands.told()

    async def opened() -> int:
        async with hands.decode.stream(hands.decode.ids(1), **here) as response:
            return response.status

    async with alongside(opened()) as asked:
        if hands.way == "mooncake":
            assert await asked == 200
        else:
            assert (await hands.legs(hands.decode.ids(1)))[1].status == 200
            assert not asked.done()


MOONCAKE = ways("mooncake")


@MOONCAKE
async def test_the_bootstrap_server_tells_the_engines_id(hands: Hands, session: ClientSession) -> None:
    async with session.get(f"{hands.pair.bootstrap}/query") as response:
        told = await response.json()
    assert list(told) == ["0"]
    assert told["0"]["engine_id"]
    assert told["0"]["worker_addr"]["0"]["0"].startswith("tcp://")


@MOONCAKE
async def test_prefill_tells_nothing(hands: Hands) -> None:
    there, _ = await hands.told()
    assert (await hands.prefill.complete(hands.decode.ids(1), **there)).json["kv_transfer_params"] is None


@MOONCAKE
async def test_an_engine_that_the_bootstrap_server_does_not_know_is_a_500_or_the_streams_last_event(hands: Hands) -> None:
    _, here = await hands.told()
    wrong = wrapped(here["kv_transfer_params"] | {"remote_engine_id": "no such engine"})
    assert (await hands.decode.complete(hands.decode.ids(1), **wrong)).status == 500
    assert failure_of(await hands.decode.complete(hands.decode.ids(1), stream=True, **wrong))["code"] == 500


@MOONCAKE
async def test_without_a_transfer_id_decode_waits_for_ever(hands: Hands) -> None:
    _, here = await hands.told()
    del here["kv_transfer_params"]["transfer_id"]
    async with alongside(hands.decode.complete(hands.decode.ids(1), **here)) as asked:
        await until(hands.decode.unfinished, what="the engine to count the request")
        assert (await hands.legs(hands.decode.ids(1)))[1].status == 200
        assert not asked.done()
    await until(lambda: idle(hands.decode), what="the decode engine to give up the request")


@MOONCAKE
async def test_what_nobody_fetches_is_kept_for_a_while_only_and_what_nobody_computes_fails_after_as_long(hands: Hands) -> None:
    (there, _), (_, here) = await hands.told(), await hands.told()
    async with asyncio.TaskGroup() as asked:
        never_sent = asked.create_task(hands.decode.complete(hands.decode.ids(2.5), **here))
        await hands.prefill.complete(hands.decode.ids(2.5), **there)
        await until(hands.used, what="the engine to say that it keeps blocks")
        await until(lambda: free(hands), deadline_s=60, what="the blocks to be freed")
    assert never_sent.result().status == 500


@MOONCAKE
@pytest.mark.ends_engines
async def test_a_prefill_engine_that_is_told_to_fetch_ends(hands: Hands) -> None:
    _, here = await hands.told()
    with contextlib.suppress(ClientConnectionError):
        assert (await hands.prefill.complete(hands.decode.ids(1), **here)).status == 500
    await until(lambda: gone(hands.prefill), what="the prefill engine to end")


SGLANG = ways("sglang")


@SGLANG
async def test_the_bootstrap_server_is_told_and_tells_about_its_engine(hands: Hands, session: ClientSession) -> None:
    told = (await hands.prefill.get("/server_info")).json
    assert told["disaggregation_bootstrap_port"] == int(hands.pair.bootstrap.rpartition(":")[2])
    assert (await hands.decode.get("/server_info")).json["disaggregation_bootstrap_port"] == 8998  # where there is none
    async with session.get(f"{hands.pair.bootstrap}/health") as response:
        assert response.status == 200
    anyone = "prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1"
    async with session.get(f"{hands.pair.bootstrap}/route?{anyone}") as response:
        about = await response.json(content_type=None)
    assert (about["dp_size"], about["page_size"], about["follow_bootstrap_room"]) == (1, hands.size, True)


@SGLANG
async def test_prefill_answers_with_one_token_however_many_are_asked_for(hands: Hands) -> None:
    prompt = hands.decode.ids(2.5)
    there, here = await hands.told()
    first, second = await asyncio.gather(
        hands.prefill.complete(prompt, max_tokens=8, **there), hands.decode.complete(prompt, max_tokens=8, **here)
    )
    assert [answer.json["usage"]["completion_tokens"] for answer in (first, second)] == [1, 8]


@SGLANG
async def test_prefill_computes_nothing_before_decode_comes_and_forgets_it_when_its_client_leaves(hands: Hands) -> None:
    there, _ = await hands.told()
    before = await hands.prefill.counters()
    async with alongside(hands.prefill.complete(hands.decode.ids(2.5), **there)) as asked:
        assert (await hands.legs([5]))[1].status == 200
        assert not asked.done()
        assert (await hands.prefill.counters())[0] - before[0] <= 1

    async def forgotten() -> bool:
        return await metric(hands.prefill, "sglang:num_prefill_bootstrap_queue_reqs") == 0

    await until(forgotten, what="the prefill engine to forget the room")


@pytest.mark.parametrize("pair", ["sglang"], indirect=True)
async def test_two_requests_in_one_room_and_two_samples_of_one_prompt_are_not_both_served(hands: Hands) -> None:
    """Of a simulated pair only: the real decode engine (0.5.23) also lets one wait, until in some runs all of it ends ("Unexpected poll case")."""
    prompt = hands.decode.ids(2.5)
    there, here = await hands.told()
    first = hands.decode.complete(prompt, **here)
    async with alongside(first) as one, alongside(hands.decode.complete(prompt, **here)) as other, alongside(samples(hands)) as both:
        assert (await hands.prefill.complete(prompt, **there)).status == 200
        await until(lambda: one.done() or other.done(), what="one of the two to be served")
        assert (await hands.legs(hands.decode.ids(1)))[1].status == 200
        assert not (one.done() and other.done())
        assert not both.done()
    await until(lambda: idle(hands.decode), what="the decode engine to give up the requests")


@SGLANG
@pytest.mark.ends_engines
async def test_a_prefill_engine_that_is_not_there_or_goes_away_is_a_500_or_the_streams_last_event(hands: Hands) -> None:
    rooms = [(await hands.told())[1] for _ in range(3)]
    nowhere = [room | {"bootstrap_port": 9} for room in rooms[:2]]
    async with asyncio.TaskGroup() as asked:
        whole = asked.create_task(hands.decode.complete(hands.decode.ids(1), **nowhere[0]))
        streamed = asked.create_task(hands.decode.complete(hands.decode.ids(1), stream=True, **nowhere[1]))
        waiting = asked.create_task(hands.decode.complete(hands.decode.ids(1), **rooms[2]))
        await hands.legs(hands.decode.ids(1))
        await hands.kill_prefill()
    assert whole.result().status == waiting.result().status == 500
    assert failure_of(streamed.result())["code"] == 500


# -------------------------------------------------------------------------------------------------------------------------- all of them


async def answers(client: Client, prompts: list[list[int]], handles: Sequence[Fields | None] = ()) -> list[list[int]]:
    """The tokens an engine says to each prompt, one after the other."""
    told = [{} if handle is None else wrapped(handle) for handle in handles or [None] * len(prompts)]
    return [
        ids_of(await client.complete(prompt, max_tokens=12, return_token_ids=True, **fields))
        for prompt, fields in zip(prompts, told, strict=True)
    ]


async def idle(client: Client) -> bool:
    return await client.unfinished() == 0


async def free(hands: Hands) -> bool:
    return await hands.used() == 0


async def gone(client: Client) -> bool:
    try:
        await client.get("/health")
    except ClientConnectionError:
        return True
    return False


async def samples(hands: Hands) -> Answer:
    """Two answers to one prompt, of both legs."""
    prompt, fields = hands.decode.ids(1), {"n": 2, "temperature": 1}
    there, here = await hands.told()
    _, answer = await asyncio.gather(hands.prefill.complete(prompt, **(there | fields)), hands.decode.complete(prompt, **(here | fields)))
    return answer


def room(engine: Engine) -> int:
    """Blocks that an engine has."""
    return engine.settings.kv_blocks if isinstance(engine, SimulatedEngine) else engine.blocks  # type: ignore[attr-defined]
