"""What an engine answers over HTTP: the shapes a router reads, and the ones it passes on."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
import pytest

from tests.conformance.wire import Client, Engine
from tests.waiting import until

HELLO = [{"role": "user", "content": "hello world"}]


async def test_it_is_healthy(client: Client, engine: Engine) -> None:
    assert (await client.get("/health")).status == 200
    if engine.kind == "vllm":
        assert (await client.get("/version")).json["version"]
    else:
        assert (await client.get("/server_info")).json["version"]


async def test_models_say_their_id_their_folder_and_their_length(client: Client) -> None:
    listed = (await client.get("/v1/models")).json
    assert listed["object"] == "list"
    (model,) = listed["data"]
    assert model["object"] == "model"
    assert model["max_model_len"] > 0
    assert model["parent"] is None
    if model["owned_by"] == "vllm":
        assert (Path(model["root"]) / "tokenizer.json").is_file()


async def test_the_block_size_is_told(client: Client, engine: Engine) -> None:
    if engine.kind == "vllm":
        page = (await client.get("/metrics")).body.decode()
        (line,) = [line for line in page.splitlines() if line.startswith("vllm:cache_config_info{")]
        assert f'block_size="{engine.block_size}"' in line
        assert "num_gpu_blocks=" in line
        assert "process_start_time_seconds " in page
    else:
        assert (await client.get("/server_info")).json["page_size"] == engine.block_size


async def test_tokenize_and_detokenize_undo_each_other(client: Client, engine: Engine) -> None:
    text = "def answer(self): return 42"
    told = (await client.post("/tokenize", {"model": client.model, "prompt": text})).json
    assert told["count"] == len(told["tokens"]) > 0
    back = (await client.post("/detokenize", {"model": client.model, "tokens": told["tokens"]})).json
    assert back["prompt" if engine.kind == "vllm" else "text"] == text


@pytest.mark.parametrize(
    ("prompt", "choices"),
    [("hello", 1), ([400, 401, 402], 1), (["hello", "world"], 2), ([[400, 401], [402, 403]], 2)],
    ids=["string", "ids", "strings", "lists"],
)
async def test_a_completion_takes_every_form_of_prompt(client: Client, prompt: object, choices: int) -> None:
    answer = await client.complete(prompt, max_tokens=3)
    assert answer.status == 200
    body = answer.json
    assert body["object"] == "text_completion"
    assert [choice["index"] for choice in body["choices"]] == list(range(choices))
    assert body["usage"]["completion_tokens"] == 3 * choices


async def test_n_answers_are_n_choices(client: Client) -> None:
    answer = await client.chat(HELLO, n=2, temperature=1, max_tokens=2)
    assert [choice["index"] for choice in answer.json["choices"]] == [0, 1]
    assert answer.json["usage"]["completion_tokens"] == 4


async def test_a_chat_answers_as_the_assistant_and_counts_what_tokenize_counts(client: Client) -> None:
    answer = (await client.chat(HELLO, max_tokens=3)).json
    assert answer["object"] == "chat.completion"
    (choice,) = answer["choices"]
    assert choice["message"]["role"] == "assistant"
    assert isinstance(choice["message"]["content"], str)
    assert choice["finish_reason"] == "length"
    ids = await client.tokens_of_chat(HELLO)
    assert answer["usage"]["prompt_tokens"] == len(ids)
    assert answer["usage"]["total_tokens"] == len(ids) + 3


async def test_a_chat_stream_opens_with_the_role_and_ends_with_usage_and_done(client: Client) -> None:
    answer = await client.chat(HELLO, max_tokens=3, stream=True, stream_options={"include_usage": True})
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    *events, done = answer.events
    assert done == b"[DONE]"
    first, *middle, last = [msgspec.json.decode(event) for event in events]
    assert first["object"] == "chat.completion.chunk"
    assert first["choices"][0]["delta"]["role"] == "assistant"
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in middle]
    assert set(reasons[:-1]) <= {None}
    assert reasons[-1] == "length"
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 3


async def test_a_stream_that_was_not_asked_for_usage_has_none(client: Client) -> None:
    answer = await client.complete("hello", max_tokens=2, stream=True)
    assert answer.events[-1] == b"[DONE]"
    assert all(msgspec.json.decode(event)["choices"] for event in answer.events[:-1])


async def test_token_ids_are_returned_on_request(client: Client, engine: Engine) -> None:
    prompt = client.ids(0.5)
    (choice,) = (await client.complete(prompt, max_tokens=3, return_token_ids=True)).json["choices"]
    assert len(choice["token_ids"]) == 3
    if engine.kind == "vllm":
        assert choice["prompt_token_ids"] == prompt
        chat = (await client.chat(HELLO, return_token_ids=True)).json
        assert chat["prompt_token_ids"] == await client.tokens_of_chat(HELLO)


@pytest.mark.parametrize("told", [True, False])
async def test_a_completions_stream_tells_the_ids_behind_its_text_on_request(client: Client, engine: Engine, told: bool) -> None:
    prompt = client.ids(0.5)
    answer = await client.complete(prompt, max_tokens=4, stream=True, return_token_ids=told)
    choices = [msgspec.json.decode(event)["choices"][0] for event in answer.events[:-1]]
    assert [choice.get("prompt_token_ids") for choice in choices] == [prompt if told else None] + [None] * (len(choices) - 1)
    assert all(("token_ids" in choice) == (told or engine.kind == "vllm") for choice in choices)
    ids = [token for choice in choices for token in choice.get("token_ids") or ()]
    again = await client.complete(prompt + ids[:2], max_tokens=2, return_token_ids=True) if told else None
    assert len(ids) == 4 * told
    assert again is None or again.json["choices"][0]["token_ids"] == ids[2:]


async def test_a_chat_stream_tells_the_ids_behind_its_text_if_it_can(client: Client, engine: Engine) -> None:
    answer = await client.chat(HELLO, max_tokens=4, stream=True, return_token_ids=True)
    if engine.kind == "sglang":
        assert answer.status == 400
        return
    first, *chunks = [msgspec.json.decode(event) for event in answer.events[:-1]]
    assert first["prompt_token_ids"] == await client.tokens_of_chat(HELLO)
    assert len([token for chunk in chunks for token in chunk["choices"][0]["token_ids"]]) == 4


async def test_a_chat_takes_ids_that_were_made_elsewhere(client: Client, engine: Engine) -> None:
    ids = client.ids(2.5)
    given = {"kv_transfer_params": {"prompt_token_ids": ids}} if engine.kind == "vllm" else {"input_ids": ids}
    answer = (await client.chat(HELLO, **given)).json
    assert answer["object"] == "chat.completion"
    assert answer["usage"]["prompt_tokens"] == len(ids)
    again = (await client.complete(ids)).json
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 2 * engine.block_size


async def test_a_request_id_becomes_part_of_the_answers_id(client: Client, engine: Engine) -> None:
    wanted = f"conformance-{client.ids(1)[0]}"
    if engine.kind == "vllm":
        answer = await client.post(
            "/v1/chat/completions", {"model": client.model, "messages": HELLO, "max_tokens": 1}, {"X-Request-Id": wanted}
        )
        assert answer.json["id"] == f"chatcmpl-{wanted}"
    else:
        assert (await client.chat(HELLO, rid=wanted)).json["id"] == wanted


async def test_clients_that_leave_end_their_requests(client: Client) -> None:
    """Long ones, so that they are not over before the engine has counted them, which SGLang does every 40 steps."""
    before = await client.generated()
    async with AsyncExitStack() as streams:
        for _ in range(3):
            response = await streams.enter_async_context(client.stream(client.ids(1), max_tokens=4000))
            await response.content.readline()
        await until(client.unfinished, what="the engine to count a request")
    await until(lambda: _idle(client), deadline_s=15, what="the engine to give up the requests")
    assert await client.generated() - before < 3 * 4000


async def _idle(client: Client) -> bool:
    return await client.unfinished() == 0


async def test_an_unknown_model_is_refused_by_vllm_and_served_by_sglang(client: Client, engine: Engine) -> None:
    answer = await client.chat(HELLO, model="no-such-model")
    if engine.kind == "vllm":
        assert answer.status == 404
        assert answer.json["error"]["code"] == 404
        assert "no-such-model" in answer.json["error"]["message"]
    else:
        assert answer.status == 200


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_a_body_that_is_not_json_is_refused(client: Client, path: str) -> None:
    assert (await client.post(path, b"{not json")).status == 400


async def test_a_prompt_over_the_models_length_is_refused(client: Client, engine: Engine) -> None:
    length = (await client.get("/v1/models")).json["data"][0]["max_model_len"]
    answer = await client.complete([400] * (length + 1))
    assert answer.status == 400
    told = answer.json
    assert str(length) in (told["error"]["message"] if engine.kind == "vllm" else told["message"])


async def test_a_rank_it_has_not_is_refused(client: Client) -> None:
    body = {"model": client.model, "prompt": "hello", "max_tokens": 1}
    assert (await client.post("/v1/completions", body, {"X-data-parallel-rank": "7"})).status == 400
    assert (await client.post("/v1/completions", body, {"X-data-parallel-rank": "0"})).status == 200


async def test_a_path_it_does_not_know_is_404(client: Client) -> None:
    assert (await client.get("/v1/no-such-route")).status == 404
