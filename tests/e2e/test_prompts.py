"""R17: are the router's token ids of a prompt the ones that the engine itself uses?

Three answers are compared: the router's own encoder, the ids that the engine says it computed with, and its `/tokenize`. What one of router
and engine refuses to render, the other has to refuse too.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec
import pytest

from engines.types import EngineKind
from router.prompts.chat import ChatFields
from router.prompts.encoder import PromptEncoder, PromptModel
from router.prompts.errors import NotRenderable, PromptRejected
from router.prompts.files import find_model_files
from tests.engines import environments
from tests.engines.launch import RealEngine
from tests.engines.programs import MODEL_NAME

pytestmark = pytest.mark.real_engine

USER = {"role": "user", "content": "What is the weather in Oslo?"}
SYSTEM = {"role": "system", "content": "You are brief."}
SAID = {"role": "assistant", "content": "It is raining"}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tell the weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "größte Stadt – 北京"}},
            "required": ["city"],
        },
    },
}
UNUSUAL_TOOL = {"function": {"parameters": {"type": "object", "properties": {}}, "name": "now", "x-ours": 1}, "type": "function"}
BARE_TOOL = {"type": "function", "function": {"name": "ping"}}
STRICT_TOOL = {"type": "function", "function": {"name": "strict", "strict": True, "parameters": {"type": "object", "properties": {}}}}


def call(arguments: str, **more: object) -> dict[str, Any]:
    return {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": arguments}} | more


def calling(arguments: str, content: str | None = None) -> list[dict[str, Any]]:
    result = {"role": "tool", "tool_call_id": "call_1", "content": "rain, 4 °C"}
    return [USER, {"role": "assistant", "content": content, "tool_calls": [call(arguments)]}, result]


CHATS: dict[str, dict[str, Any]] = {
    "one message": {"messages": [USER]},
    "system first": {"messages": [SYSTEM, USER]},
    "system later": {"messages": [USER, SAID, SYSTEM, USER]},
    "two systems": {"messages": [SYSTEM, SYSTEM, USER]},
    "developer": {"messages": [{"role": "developer", "content": "Be kind."}, USER]},
    "developer and system": {"messages": [SYSTEM, {"role": "developer", "content": "Be kind."}, USER]},
    "turns": {"messages": [SYSTEM, USER, SAID, USER]},
    "ends with the assistant": {"messages": [USER, SAID]},
    "unicode": {"messages": [{"role": "user", "content": "Grüße, 世界! 👩‍👩‍👧 e\u0301 \u200b ﬁ \U0001f600"}]},
    "white space": {"messages": [{"role": "user", "content": "  two  spaces\n\n\ttab \r\n end  "}]},
    "empty content": {"messages": [{"role": "user", "content": ""}]},
    "special tokens as text": {"messages": [{"role": "user", "content": "<|im_end|>\n<|im_start|>system\nx<|endoftext|>"}]},
    "text parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}]},
    "one text part": {"messages": [{"role": "user", "content": [{"type": "text", "text": "one"}]}]},
    "empty text part": {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}, {"type": "text", "text": "two"}]}]},
    "names": {"messages": [{"role": "user", "name": "ann", "content": "hi"}]},
    "tools": {"messages": [SYSTEM, USER], "tools": [TOOL]},
    "tools without system": {"messages": [USER], "tools": [TOOL, BARE_TOOL]},
    "tools of unusual form": {"messages": [USER], "tools": [UNUSUAL_TOOL]},
    "strict tool": {"messages": [USER], "tools": [STRICT_TOOL]},
    "tools, none to be called": {"messages": [USER], "tools": [TOOL], "tool_choice": "none"},
    "tool call": {"messages": calling('{"city": "Oslo", "days": 3}'), "tools": [TOOL], "tool_choice": "none"},
    "tool call with text": {"messages": calling('{"city":"北京"}', "Let me see."), "tools": [TOOL], "tool_choice": "none"},
    "tool call without tools": {"messages": calling("{}")},
    "tool call with no arguments": {"messages": calling("")},
    "tool call with broken arguments": {"messages": calling('{"city": ')},
    "tool call with a list of arguments": {"messages": calling("[1, 2]")},
    "template kwargs": {"messages": [USER], "chat_template_kwargs": {"enable_thinking": False}},
    "template kwargs that think": {"messages": [USER], "chat_template_kwargs": {"enable_thinking": True}},
    "template kwargs unknown": {"messages": [USER], "chat_template_kwargs": {"no_such_thing": "x"}},
    "reasoning effort": {"messages": [USER], "reasoning_effort": "low"},
    "no reasoning": {"messages": [USER], "reasoning_effort": "none"},
    "continued": {"messages": [USER, SAID], "continue_final_message": True, "add_generation_prompt": False},
    "continued, generation prompt not named": {"messages": [USER, SAID], "continue_final_message": True},
    "no generation prompt": {"messages": [USER], "add_generation_prompt": False},
    "special tokens added": {"messages": [USER], "add_special_tokens": True},
    "reasoning content": {"messages": [USER, SAID | {"reasoning_content": "clouds"}, USER]},
}
TEXTS = ["plain words", "", "  white\n\nspace\t", "Grüße, 世界 👩‍👩‍👧", "<|im_start|>user\nhi<|im_end|>", "def f(x):\n    return x\n" * 40]
NOT_IN_TOKENIZE = {"vllm": {"reasoning_effort"}, "sglang": {"reasoning_effort", "add_generation_prompt"}}
"""Fields that a chat and `/tokenize` treat differently: the chat is right."""


class Asked:
    """An engine, asked what ids it makes."""

    def __init__(self, engine: RealEngine, session: aiohttp.ClientSession) -> None:
        self.engine = engine
        self._session = session

    async def used(self, body: dict[str, Any]) -> list[int] | None:
        """The ids it computes with; None when it refuses."""
        field = "return_token_ids" if self.engine.kind == "vllm" else "return_prompt_token_ids"
        told = await self._post("/v1/chat/completions", body | {field: True, "max_tokens": 1})
        return None if told is None else _prompt_ids(told)

    async def tokenized(self, body: dict[str, Any]) -> list[int] | None:
        """The ids of its `/tokenize`; None when it refuses."""
        told = await self._post("/tokenize", body)
        return None if told is None else list(told["tokens"])

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any] | None:
        async with self._session.post(self.engine.url + path, json={"model": MODEL_NAME} | body) as response:
            if response.status == 200:
                told: dict[str, Any] = await response.json()
                return told
            assert response.status in (400, 422), await response.text()
            return None


def _prompt_ids(told: dict[str, Any]) -> list[int]:
    ids = told.get("prompt_token_ids") or told["choices"][0].get("prompt_token_ids") or told["sglext"]["prompt_token_ids"]
    return list(ids)


@pytest.fixture(params=["real_vllm", "real_sglang"])
async def asked(request: pytest.FixtureRequest) -> AsyncIterator[Asked]:
    async with aiohttp.ClientSession() as session:
        yield Asked(request.getfixturevalue(request.param), session)


@pytest.fixture(scope="module")
def prompts() -> PromptModel:
    return PromptModel(find_model_files(str(environments.ensure_model())))


def unpacked(ids: bytes) -> list[int]:
    return list(memoryview(ids).cast("I"))


@pytest.mark.parametrize("name", CHATS)
async def test_R17_a_chats_ids_are_the_engines_own(asked: Asked, prompts: PromptModel, name: str) -> None:
    body = CHATS[name]
    used = await asked.used(body)
    encoder = PromptEncoder(prompts, EngineKind(asked.engine.kind))
    try:
        ours = unpacked(encoder.encode_chat(msgspec.json.decode(msgspec.json.encode(body), type=ChatFields)))
    except (NotRenderable, PromptRejected):
        assert used is None
        return
    assert ours == used
    if not NOT_IN_TOKENIZE[asked.engine.kind] & body.keys():
        assert ours == await asked.tokenized(body)


@pytest.mark.parametrize("text", TEXTS)
async def test_R17_a_texts_ids_are_the_engines_own(asked: Asked, prompts: PromptModel, text: str) -> None:
    encoder = PromptEncoder(prompts, EngineKind(asked.engine.kind))
    assert unpacked(encoder.encode_text(text)) == await asked.tokenized({"prompt": text})
