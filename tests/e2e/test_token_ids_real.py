"""`--forward-tokens` before real engines: the ids they say they computed with are the router's, and they answer as without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.serving import serve
from tests.e2e.test_prompts import CHATS, TEXTS
from tests.engines.launch import RealEngine
from tests.engines.programs import MODEL_NAME

pytestmark = pytest.mark.real_engine

# what a chat's template makes much of; with tools, white space, unicode and a message that is gone on with
CHOSEN = ["turns", "unicode", "white space", "text parts", "tools", "tool call", "no reasoning", "continued", "special tokens as text"]
ASKS: list[tuple[str, dict[str, Any]]] = [
    *(("/v1/chat/completions", CHATS[name]) for name in CHOSEN),
    *(("/v1/completions", {"prompt": text}) for text in TEXTS if text),
]


@pytest.fixture(params=["real_vllm", "real_sglang"])
def engine(request: pytest.FixtureRequest) -> RealEngine:
    found: RealEngine = request.getfixturevalue(request.param)
    return found


def prompt_ids(told: dict[str, Any]) -> list[int]:
    """What the engine says that it computed with."""
    ids = told.get("prompt_token_ids") or told["choices"][0].get("prompt_token_ids") or told["sglext"]["prompt_token_ids"]
    return list(ids)


def said(told: dict[str, Any]) -> tuple[object, ...]:
    """What an answer comes to."""
    choice, usage = told["choices"][0], told["usage"]
    text = choice.get("text") or (choice["message"]["content"], choice["message"].get("tool_calls"))
    return text, choice["finish_reason"], usage["prompt_tokens"], usage["completion_tokens"]


async def test_the_engine_computes_with_the_ids_it_is_given_and_answers_the_same(engine: RealEngine, tmp_path: Path) -> None:
    field = "return_token_ids" if engine.kind == "vllm" else "return_prompt_token_ids"
    own = []
    async with httpx.AsyncClient(timeout=60) as direct:
        for path, fields in ASKS:
            told_field = field if "chat" in path else "return_token_ids"
            body = {"model": MODEL_NAME, "max_tokens": 8, "temperature": 0, told_field: True} | fields
            own.append((path, body, (await direct.post(engine.url + path, json=body)).raise_for_status().json()))
    async with serve([engine], tmp_path / "router.log", "--forward-tokens") as router:
        for path, body, without in own:
            answer = await router.post(path, body)
            assert answer.status == 200, (body, answer.body)
            assert prompt_ids(answer.json) == prompt_ids(without), body
            assert said(answer.json) == said(without), body
        assert await router.metric("router_token_ids_total", outcome="forwarded") == len(ASKS)
        assert await router.metric("router_token_ids_total") == len(ASKS)
