"""`--forward-tokens`, before simulated engines: the engine gets the ids that it would have made, and answers as it would have."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from engines.simulator.engine import SimulatedEngine
from engines.simulator.faults import Answer as Fault
from engines.simulator.faults import Break
from engines.types import EngineKind
from tests.integration.test_resuming import FirstThatLooksAtCaches
from tests.rig import Router, asked, fleet, prompt, routing

MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": prompt("ids")}]
TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
PATHS = {"chat": "/v1/chat/completions", "completion": "/v1/completions"}
BODIES: dict[str, dict[str, Any]] = {"chat": {"messages": MESSAGES, "tools": [TOOL]}, "completion": {"prompt": prompt("text")}}


async def own_ids(router: Router, engine: SimulatedEngine, body: dict[str, Any]) -> list[int]:
    """The ids that the engine makes of a prompt."""
    async with router.session.post(engine.url + "/tokenize", json={"model": "sim"} | body) as response:
        return list((await response.json())["tokens"])


def ids_in(body: bytes, kind: EngineKind) -> list[int] | None:
    """The ids that an engine was given."""
    read = msgspec.json.decode(body)
    if isinstance(read.get("prompt"), list):
        return list(read["prompt"])
    return (read.get("kv_transfer_params") or {}).get("prompt_token_ids") if kind is EngineKind.VLLM else read.get("input_ids")


@pytest.mark.parametrize("api", BODIES)
@pytest.mark.parametrize("kind", list(EngineKind))
async def test_an_engine_gets_its_own_ids_and_answers_as_without_them(kind: EngineKind, api: str) -> None:
    async with fleet(1, kind=kind) as (engine,):
        answers = []
        for forward in (False, True):
            async with routing([engine], forward_tokens=forward) as router:
                answers.append(await router.post(PATHS[api], {"model": "sim", "max_tokens": 8, "temperature": 0} | BODIES[api]))
                own = await own_ids(router, engine, BODIES[api])
                forwarded = await router.metric("router_token_ids_total", outcome="forwarded")
            assert answers[-1].status == 200
            assert ids_in(asked(engine, PATHS[api])[-1].body, kind) == (own if forward else None)
            assert forwarded == forward
        first, second = (answer.json["choices"][0] for answer in answers)
        assert first == second
        assert answers[0].json["usage"]["prompt_tokens"] == answers[1].json["usage"]["prompt_tokens"]


async def test_fields_of_the_clients_own_are_never_joined_with_ours() -> None:
    async with fleet(1) as (engine,), routing([engine], forward_tokens=True) as router:
        answer = await router.chat("hello", kv_transfer_params={"do_remote_prefill": True, "prompt_token_ids": [400]})
        assert answer.status == 200
        assert "kv_transfer_params" not in msgspec.json.decode(asked(engine)[-1].body)
        await router.chat("hello", input_ids=[400, 401])
        assert msgspec.json.decode(asked(engine)[-1].body)["input_ids"] == [400, 401]
        assert await router.metric("router_token_ids_total", outcome="handshake") == 2
        assert await router.metric("router_token_ids_total") == 2


async def test_media_stay_with_the_engine() -> None:
    async with fleet(1) as (engine,), routing([engine], forward_tokens=True) as router:
        content = [{"type": "text", "text": "what is this?"}, {"type": "image_url", "image_url": {"url": "data:,"}}]
        await router.post("/v1/chat/completions", {"model": "sim", "max_tokens": 1, "messages": [{"role": "user", "content": content}]})
        assert "kv_transfer_params" not in msgspec.json.decode(asked(engine)[-1].body)
        assert await router.metric("router_token_ids_total", outcome="untokenized") == 1


async def test_a_retry_on_another_kind_of_engine_brings_ids_in_that_ones_way() -> None:
    async with fleet(1, kind=EngineKind.VLLM) as (vllm,), fleet(1, kind=EngineKind.SGLANG) as (sglang,):
        async with routing([vllm, sglang], forward_tokens=True) as router:
            home = (await router.chat(prompt("warm"))).engine
            gone, other = (vllm, sglang) if home == vllm.url else (sglang, vllm)
            gone.faults.add(Fault(status=503))
            answer = await router.chat(prompt("warm") + " again")
        assert (answer.status, answer.engine) == (200, other.url)
        (body,) = (request.body for request in asked(other))
        assert ids_in(body, other.kind)
        assert ("input_ids" in msgspec.json.decode(body)) is (other.kind is EngineKind.SGLANG)


async def test_a_stream_that_has_to_go_on_elsewhere_still_does() -> None:
    """The engine that goes on is given the answer's ids too, and nothing twice."""
    policy = "tests.integration.test_resuming:FirstThatLooksAtCaches"
    async with fleet(2) as (first, second), routing([first, second], forward_tokens=True, resume=1, policy=policy) as router:
        FirstThatLooksAtCaches.order = [first.url, second.url]
        first.faults.add(Break(after_chunks=4))
        answer = await router.chat(prompt("goes on"), stream=True, temperature=0, max_tokens=12)
        assert answer.body.endswith(b"data: [DONE]\n\n")
        assert await router.metric("router_resumes_total", outcome="resumed") == 1
        begun, resumed = (ids_in(asked(engine)[-1].body, engine.kind) for engine in (first, second))
        assert begun
        assert resumed is not None
        assert resumed[: len(begun)] == begun
        assert len(begun) < len(resumed) < len(begun) + 12
        assert await router.metric("router_token_ids_total", outcome="forwarded") == 1
        assert await router.metric("router_token_ids_total", outcome="given_as_ids") == 1
