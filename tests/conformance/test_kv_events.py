"""What an engine says of its KV cache: numbered frames, full blocks, chained parents, and a second hearing on request."""

from __future__ import annotations

import pytest

from tests.conformance.wire import Client, Engine, EventFeed, blocks_of
from tests.waiting import until


async def test_a_message_is_a_topic_a_number_and_a_batch_of_typed_maps(client: Client, feed: EventFeed) -> None:
    await client.complete(client.ids(2))
    await until(lambda: len(feed.messages) >= 2)
    for message in feed.messages:
        assert message.topic == b"kv-events"
        ts, events, rank = message.batch
        assert isinstance(ts, float)
        assert rank == 0
        assert events
        assert {event["type"] for event in events} <= {"BlockStored", "BlockRemoved", "AllBlocksCleared"}


async def test_messages_are_numbered_without_gaps(client: Client, feed: EventFeed) -> None:
    for _ in range(4):
        await client.complete(client.ids(1))
    await until(lambda: len(feed.messages) >= 4)
    numbers = [message.seq for message in feed.messages]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))


async def test_a_replay_from_0_starts_at_0_and_repeats_what_was_live_byte_for_byte(client: Client, feed: EventFeed) -> None:
    await client.complete(client.ids(3))
    await until(lambda: len(feed.messages) >= 2)
    live = {message.seq: message for message in feed.messages}
    again = await feed.replay(0)
    assert [message.seq for message in again] == list(range(len(again)))
    assert {seq: again[seq] for seq in live} == live


async def test_a_replay_begins_where_it_is_asked_to(client: Client, feed: EventFeed) -> None:
    for _ in range(3):
        await client.complete(client.ids(1))
    await until(lambda: len(feed.messages) >= 3)
    middle = feed.messages[1].seq
    assert (await feed.replay(middle))[0].seq == middle
    assert await feed.replay(feed.messages[-1].seq + 1000) == []


async def test_only_full_blocks_are_announced(client: Client, engine: Engine, feed: EventFeed) -> None:
    short, long = client.ids(0.5), client.ids(2.5)
    await client.complete(short)
    await client.complete(long)
    blocks = await feed.blocks(long, 2)
    assert [block.tokens for block in blocks] == [tuple(long[: engine.block_size]), tuple(long[engine.block_size : 2 * engine.block_size])]
    assert not [block for block in blocks_of(feed.messages) if block.tokens[: len(short)] == tuple(short)]


async def test_parents_chain_from_the_root_and_across_requests(client: Client, feed: EventFeed) -> None:
    start = client.ids(2.5)
    further = start + client.ids(2)
    await client.complete(start)
    first = await feed.blocks(start, 2)
    await client.complete(further)
    blocks = await feed.blocks(further, 4)
    assert first[0].parent is None
    assert [block.parent for block in blocks[1:]] == [block.name for block in blocks[:-1]]


async def test_events_carry_the_ids_that_tokenize_gives_for_a_chat(client: Client, engine: Engine, feed: EventFeed) -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": client.text(4 * engine.block_size)}]
    ids = await client.tokens_of_chat(messages)
    await client.chat(messages)
    blocks = await feed.blocks(ids, len(ids) // engine.block_size)
    told = [token for block in blocks for token in block.tokens]
    assert told == ids[: len(told)]


async def test_generated_blocks_are_announced_with_the_tokens_that_were_returned(client: Client, engine: Engine, feed: EventFeed) -> None:
    prompt = client.ids(1)
    answer = await client.complete(prompt, max_tokens=2 * engine.block_size + 1, return_token_ids=True)
    whole = prompt + answer.json["choices"][0]["token_ids"]
    blocks = await feed.blocks(whole, 3)
    assert [token for block in blocks for token in block.tokens] == whole[: 3 * engine.block_size]


async def test_different_salts_share_no_name_and_are_told(client: Client, engine: Engine, feed: EventFeed) -> None:
    prompt = client.ids(2.5)
    await client.complete(prompt, cache_salt="s1")
    await client.complete(prompt, cache_salt="s2")
    names = {block.name for block in await feed.blocks(prompt, 4)}
    assert len(names) == 4
    stored = [event for message in feed.messages for event in message.events if event["type"] == "BlockStored"]
    if engine.kind == "vllm":
        told = [event["extra_keys"][0] for event in stored if event["extra_keys"] and event["extra_keys"][0]]
        assert told == [["s1"], ["s2"]]
    else:
        assert [event["cache_salt"] for event in stored if "cache_salt" in event] == ["s1", "s2"]


@pytest.mark.parametrize(("blocks", "found"), [(2.5, 2), (3, 2)])
async def test_a_repeated_prompt_is_a_hit_by_the_engines_own_count(client: Client, engine: Engine, blocks: float, found: int) -> None:
    prompt = client.ids(blocks)
    await client.complete(prompt)
    _, before = await client.counters()
    answer = await client.complete(prompt)
    _, after = await client.counters()
    # The last token is always computed again, so a prompt of whole blocks finds one less.
    assert after - before == found * engine.block_size
    details = answer.json["usage"]["prompt_tokens_details"]
    assert details["cached_tokens"] == found * engine.block_size


async def test_vllm_announces_the_recomputed_last_block_of_whole_blocks_again(client: Client, engine: Engine, feed: EventFeed) -> None:
    prompt, later = client.ids(2), client.ids(1)
    for asked in (prompt, prompt, later):
        await client.complete(asked)
    await feed.blocks(later, 1)
    announced = [block.tokens for block in blocks_of(feed.messages)]
    assert announced.count(tuple(prompt[engine.block_size :])) == (2 if engine.kind == "vllm" else 1)


async def test_the_announced_ports_are_the_ones_that_speak(client: Client, engine: Engine) -> None:
    assert engine.kv_events is not None
    assert engine.kv_replay is not None
    ports = int(engine.kv_events.rpartition(":")[2]), int(engine.kv_replay.rpartition(":")[2])
    if engine.kind == "vllm":
        source = (await client.get("/kv_event_sources")).json["0"]
        assert source["enable_kv_cache_events"] is True
        assert (source["endpoint"], source["replay_endpoint"]) == (f"tcp://*:{ports[0]}", f"tcp://*:{ports[1]}")
    else:
        source = (await client.get("/server_info")).json["kv_events"]
        assert (source["endpoint_port_base"], source["replay_endpoint_port_base"]) == ports
        assert source["block_size"] == engine.block_size
