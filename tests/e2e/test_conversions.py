"""R18: are the ids of a prompt in another API's form the ones that the engine computes with? Its render endpoints tell."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from engines.types import EngineKind
from router import openai
from router.prompts import conversion
from router.prompts.encoder import PromptEncoder, PromptModel
from router.prompts.files import find_model_files
from router.routes import PromptForm
from tests.e2e.serving import serve
from tests.engines import environments, prefixes
from tests.engines.launch import RealEngine
from tests.engines.programs import MODEL_NAME
from tests.waiting import until

pytestmark = pytest.mark.real_engine

USER = {"role": "user", "content": "What is the weather in Oslo?"}
SAID = {"role": "assistant", "content": "It is raining"}
SCHEMA = {"properties": {"city": {"type": "string", "description": "größte Stadt"}}, "required": ["city"]}
TOOL = {"name": "get_weather", "description": "Tell the weather.", "input_schema": SCHEMA}
STRICT = {"name": "now", "input_schema": {"type": "object", "properties": {}}, "strict": True, "x-ours": 1}
USED = {"type": "tool_use", "id": "call_1", "name": "get_weather", "input": {"city": "北京", "days": 3}}


def blocks(*texts: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text, "cache_control": {"type": "ephemeral"}} for text in texts]


def result(content: object) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call_1", "content": content}, *blocks("And now?")]}


MESSAGES: dict[str, dict[str, Any]] = {
    "one message": {"messages": [USER]},
    "turns": {"messages": [USER, SAID, USER], "system": "You are brief."},
    "blocks": {"messages": [{"role": "user", "content": blocks("one", "", "two")}, SAID, {"role": "user", "content": blocks("three")}]},
    "system blocks": {"messages": [USER], "system": blocks("You are ", "brief.")},
    "a billing header": {"messages": [USER], "system": blocks("x-anthropic-billing-header: 1", "You are brief.")},
    "a billing header in a string": {"messages": [USER], "system": "x-anthropic-billing-header: 1\nYou are brief."},
    "tools": {"messages": [USER], "tools": [TOOL, STRICT], "tool_choice": {"type": "auto"}},
    "a tool used": {"messages": [USER, {"role": "assistant", "content": [*blocks("Let me see."), USED]}, result("rain")], "tools": [TOOL]},
    "a tool used without a word": {"messages": [USER, {"role": "assistant", "content": [USED]}, result(blocks("rain", "4 °C"))]},
    "a result of nothing": {"messages": [USER, {"role": "assistant", "content": [USED]}, result(None)]},
    "thinking": {
        "messages": [
            USER,
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm.", "signature": "x"}, *blocks("Rain.")]},
            USER,
        ],
        "thinking": {"type": "adaptive"},
    },
    "redacted thinking": {"messages": [USER, {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}, USER]},
    "effort": {"messages": [USER], "output_config": {"effort": "low"}},
    "template kwargs": {"messages": [USER], "chat_template_kwargs": {"enable_thinking": False}},
    "ends with the assistant": {"messages": [USER, SAID]},
    "no blocks": {"messages": [USER, {"role": "assistant", "content": []}, USER]},
}

FUNCTION = {"type": "function", "name": "get_weather", "description": "Tell the weather.", "parameters": {"type": "object"} | SCHEMA}
CALLED = {"type": "function_call", "call_id": "call_1", "name": "get_weather", "arguments": '{"city": "北京"}'}
OUTPUT = {"type": "function_call_output", "call_id": "call_1", "output": "rain"}


def said(*texts: str, **more: object) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text} for text in texts]} | more


RESPONSES: dict[str, dict[str, Any]] = {
    "a string": {"input": "What is the weather in Oslo?"},
    "instructions": {"input": "Hi", "instructions": "You are brief."},
    "turns": {"input": [USER, SAID, USER]},
    "typed messages": {"input": [{"type": "message"} | USER, said("It rains."), USER], "instructions": "You are brief."},
    "parts": {"input": [{"role": "user", "content": [{"type": "input_text", "text": "one"}, {"type": "input_text", "text": "two"}]}]},
    "two parts said": {"input": [USER, said("One.", "Two."), USER]},
    "a developer": {"input": [{"role": "developer", "content": "Be kind."}, USER]},
    "a system message": {"input": [{"role": "system", "content": "Be kind."}, USER], "instructions": "You are brief."},
    "tools": {"input": "Hi", "tools": [FUNCTION | {"strict": True}, FUNCTION | {"name": "other", "strict": None}]},
    "a tool called": {"input": [USER, CALLED, OUTPUT], "tools": [FUNCTION | {"strict": False}]},
    "called with words before": {"input": [USER, said("Let me see."), CALLED, CALLED | {"call_id": "call_2"}, OUTPUT, USER]},
    "called with words behind": {"input": [USER, CALLED, said("So."), OUTPUT, USER]},
    "reasoning": {
        "input": [USER, {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}, said("So."), USER]
    },
    "a summary": {"input": [USER, {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "Hm."}]}, said("So."), USER]},
    "effort": {"input": "Hi", "reasoning": {"effort": "low"}},
    "unfinished": {"input": [USER, said("It is", status="incomplete", id="m")]},
    "template kwargs": {"input": "Hi", "chat_template_kwargs": {"enable_thinking": False}},
    "ends with the assistant": {"input": [USER, SAID]},
}  # fmt: skip

FORMS: dict[str, Callable[[str], dict[str, Any]]] = {
    "/v1/chat/completions": lambda text: {"messages": [{"role": "user", "content": text}], "max_tokens": 1},
    "/v1/completions": lambda text: {"prompt": text, "max_tokens": 1},
    "/v1/responses": lambda text: {"input": [{"role": "user", "content": text}], "max_output_tokens": 1, "instructions": "Be brief."},
    "/v1/messages": lambda text: {"messages": [{"role": "user", "content": text}], "max_tokens": 1, "system": "Be brief."},
}
CASES = [(PromptForm.MESSAGES, name, body | {"max_tokens": 1}) for name, body in MESSAGES.items()]
CASES += [(PromptForm.RESPONSES, name, body) for name, body in RESPONSES.items()]


@pytest.fixture(scope="module")
def encoder() -> PromptEncoder:
    return PromptEncoder(PromptModel(find_model_files(str(environments.ensure_model()))), EngineKind.VLLM)


@pytest.mark.parametrize(("form", "name", "body"), CASES, ids=[f"{form.value}: {name}" for form, name, _ in CASES])
async def test_R18_converted_ids_are_the_engines_own(
    real_vllm: RealEngine, encoder: PromptEncoder, form: PromptForm, name: str, body: dict[str, Any]
) -> None:
    del name
    raw = msgspec.json.encode({"model": MODEL_NAME} | body)
    url = f"{real_vllm.url}/v1/{form.value}/render"
    async with aiohttp.ClientSession() as session, session.post(url, data=raw, headers={"content-type": "application/json"}) as response:
        told = await response.json()
        assert response.status == 200, told
    ours = encoder.encode_chat(conversion.chat_of(form, openai.parse(raw), raw))
    assert list(memoryview(ours).cast("I")) == (told[0] if isinstance(told, list) else told)["token_ids"]


async def test_R18_a_conversation_is_a_hit_on_its_repeat_in_each_form(real_vllm: RealEngine, tmp_path: Path) -> None:
    async with serve([real_vllm], tmp_path / "router.log") as router:
        for path, form in FORMS.items():
            text = prefixes.prefix(path, 0)
            asked = {"model": MODEL_NAME} | form(text)
            first = await router.post(path, asked)
            assert (first.status, first.reason) == (200, "no_shared_prefix"), first.body

            async def known(path: str = path, asked: dict[str, Any] = asked) -> bool:
                return int((await router.post(f"/route?path={path}", asked)).json["overlap_tokens"]) > 0

            await until(known, what=f"the prompt of {path} is in the index")
            before = real_vllm.counters()
            again = await router.post(path, asked)
            assert (again.status, again.reason) == (200, "kv")
            assert (real_vllm.counters() - before).hits == again.overlap_tokens > 0.9 * prefixes.tokens_of(text)
            counted = await router.metric("router_cached_tokens_error_total")
            assert counted == 0, f"the usage of {path} is read as its engine means it"
        assert await router.metric("router_cached_tokens_total", source="reported") > 4 * 0.9 * 1500
