from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from engines.errors import EngineAnswered, EngineUnreachable
from engines.types import EngineKind
from router.prompts import parity
from router.prompts.asking import chat_body, text_body
from router.prompts.chat import ChatFields
from router.prompts.encoder import PromptEncoder, PromptModel
from router.prompts.errors import NotRenderable, PromptRejected
from router.prompts.files import ModelFiles, find_model_files
from router.prompts.memo import Memo
from router.prompts.tokenizer import unpack

MODEL = Path(__file__).parents[2] / "engines" / "simulator" / "model"
FILES = find_model_files(str(MODEL))
ALTERNATING = (Path(__file__).parents[1] / "data" / "templates" / "alternating.jinja").read_text(encoding="utf-8")


@pytest.fixture(scope="module", params=list(EngineKind))
def encoder(request: pytest.FixtureRequest) -> PromptEncoder:
    return PromptEncoder(PromptModel(FILES), request.param)


class Engine:
    """Answers `/tokenize` with an encoder's ids, but for what `spoil` makes of them."""

    def __init__(self, encoder: PromptEncoder) -> None:
        self.encoder = encoder
        self.asked: list[dict[str, Any]] = []

    async def ids(self, body: dict[str, Any]) -> list[int]:
        self.asked.append(body)
        try:
            return self.spoil(body, self.encode(body))
        except (NotRenderable, PromptRejected) as problem:
            raise EngineAnswered(400, "/tokenize", excerpt=str(problem)) from problem

    def encode(self, body: dict[str, Any]) -> list[int]:
        if "prompt" in body:
            return unpack(self.encoder.encode_text(body["prompt"], add_special_tokens=body["add_special_tokens"]))
        fields = msgspec.convert({name: msgspec.Raw(msgspec.json.encode(value)) for name, value in body.items()}, ChatFields)
        return unpack(self.encoder.encode_chat(fields))

    def spoil(self, body: dict[str, Any], ids: list[int]) -> list[int]:
        return ids


async def test_R17_an_engine_that_agrees_on_every_prompt_is_in_parity(encoder: PromptEncoder) -> None:
    engine = Engine(encoder)
    report = await parity.check(encoder, engine.ids, model="m")
    assert report.ok
    assert report.prompts == len(engine.asked) == len(parity.TEXTS) + len(parity.CHATS)
    assert {body["model"] for body in engine.asked} == {"m"}


async def test_R17_the_first_chat_that_differs_is_named_with_where_it_does(encoder: PromptEncoder) -> None:
    class Other(Engine):
        def spoil(self, body: dict[str, Any], ids: list[int]) -> list[int]:
            return [*ids[:5], 0, *ids[5:]] if "tools" in body else ids

    report = await parity.check(encoder, Other(encoder).ids, model="m")
    assert not report.ok
    assert report.text == ""
    assert report.chat.startswith("“tools”: ")
    assert report.chat.endswith("differing from id 5 on")


async def test_R17_a_text_that_differs_is_told_apart_from_the_chats(encoder: PromptEncoder) -> None:
    class Beginning(Engine):
        def spoil(self, body: dict[str, Any], ids: list[int]) -> list[int]:
            return [0, *ids] if body.get("add_special_tokens") and "prompt" in body else ids

    report = await parity.check(encoder, Beginning(encoder).ids, model="m")
    assert report.text.startswith("“text”")
    assert report.chat == ""


async def test_R17_a_prompt_that_both_refuse_is_parity_and_one_that_either_refuses_is_not(encoder: PromptEncoder) -> None:
    strict = PromptEncoder(PromptModel(msgspec.structs.replace(FILES, templates={"default": ALTERNATING})), encoder.kind)
    assert (await parity.check(strict, Engine(strict).ids, model="m")).ok
    report = await parity.check(encoder, Engine(strict).ids, model="m")
    assert report.chat
    reverse = await parity.check(strict, Engine(encoder).ids, model="m")
    assert reverse.chat


async def test_R17_an_engine_that_does_not_tokenize_leaves_parity_unchecked(encoder: PromptEncoder) -> None:
    async def gone(body: dict[str, Any]) -> list[int]:
        raise EngineAnswered(404, "/tokenize")

    async def unreachable(body: dict[str, Any]) -> list[int]:
        raise EngineUnreachable("connection refused")

    for ask, why in ((gone, "404"), (unreachable, "connection refused")):
        report = await parity.check(encoder, ask, model="m")
        assert (report.prompts, report.chat, report.text) == (0, "", "")
        assert why in report.unchecked
        assert not report.ok


USER = {"role": "user", "content": "x"}


def asked(kind: EngineKind, **body: object) -> dict[str, Any]:
    fields = msgspec.json.decode(msgspec.json.encode({"messages": [USER]} | body), type=ChatFields)
    return chat_body(kind, "m", fields)


def test_what_vllms_tokenize_ignores_is_put_where_it_does_not() -> None:
    body = asked(
        EngineKind.VLLM, reasoning_effort="none", documents=[{"title": "t"}], chat_template_kwargs={"a": 1}, add_generation_prompt=False
    )
    assert body == {
        "model": "m",
        "messages": [USER],
        "add_generation_prompt": False,
        "chat_template_kwargs": {"a": 1, "reasoning_effort": "none", "documents": [{"title": "t"}], "enable_thinking": False},
    }


def test_vllms_tokenize_is_told_of_reasoning_by_the_name_it_knows() -> None:
    told = asked(EngineKind.VLLM, messages=[{"role": "assistant", "content": "x", "reasoning_content": "why"}])
    assert told["messages"] == [{"role": "assistant", "content": "x", "reasoning": "why"}]


def test_sglangs_tokenize_is_asked_as_a_chat_would_be() -> None:
    body = asked(EngineKind.SGLANG, add_generation_prompt=False, add_special_tokens=True, tool_choice="none", reasoning_effort="low")
    assert body == {"model": "m", "messages": [USER], "tool_choice": "none", "reasoning_effort": "low"}


@pytest.mark.parametrize("field", [{"truncate_prompt_tokens": 5}, {"chat_template": "x"}])
@pytest.mark.parametrize("kind", list(EngineKind))
def test_what_tokenize_cannot_apply_is_not_asked(kind: EngineKind, field: dict[str, object]) -> None:
    with pytest.raises(NotRenderable):
        asked(kind, **field)


def test_a_text_is_asked_as_it_is() -> None:
    assert text_body("m", "x", add_special_tokens=False) == {"model": "m", "prompt": "x", "add_special_tokens": False}


def test_a_memo_forgets_what_was_not_used_for_longest_and_never_holds_more_than_it_may() -> None:
    memo = Memo(max_bytes=10)
    memo.put(b"a", b"1234")
    memo.put(b"b", b"1234")
    assert memo.get(b"a") == b"1234"
    memo.put(b"c", b"1234")
    assert (memo.get(b"a"), memo.get(b"b"), memo.get(b"c")) == (b"1234", None, b"1234")
    memo.put(b"c", b"12")
    memo.put(b"d", b"1234")
    assert len(memo) == 3
    memo.put(b"huge", bytes(11))
    assert memo.get(b"huge") is None
    assert len(memo) == 3


def test_a_chat_template_for_tools_is_used_for_tools() -> None:
    model = PromptModel(msgspec.structs.replace(FILES, templates={"default": "plain", "tool_use": "with tools"}))
    assert model.template(with_tools=True).source == "with tools"
    assert model.template(with_tools=False).source == "plain"


@pytest.mark.parametrize(
    ("changed", "why", "asks"),
    [
        ({"templates": {}}, "no chat template", True),
        ({"templates": {"default": "{% if %}"}}, "does not compile", True),
        ({"templates": {"rag": "x"}}, "none is the default", True),
        ({"model_type": "gpt_oss"}, "built in the engine's code", False),
    ],
)
def test_a_model_whose_chats_cannot_be_rendered_here_says_why(changed: dict[str, Any], why: str, asks: bool) -> None:
    model = PromptModel(msgspec.structs.replace(FILES, **changed))
    with pytest.raises(NotRenderable, match=why) as problem:
        model.template(with_tools=False)
    assert problem.value.ask_engine is asks
    assert model.engine_can_chat is asks


def files_with_beginning() -> ModelFiles:
    """A tokenizer that begins every text with a special token of its own."""
    whole = msgspec.json.decode(FILES.tokenizer)
    token = whole["added_tokens"][0]["content"]
    whole["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": token, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {token: {"id": token, "ids": [0], "tokens": [token]}},
    }
    return msgspec.structs.replace(FILES, tokenizer=msgspec.json.encode(whole), special_tokens={"bos_token": token})


def test_what_sglang_appends_to_a_prompt_does_not_begin_it_again() -> None:
    encoder = PromptEncoder(PromptModel(files_with_beginning()), EngineKind.SGLANG)
    body = {"messages": [USER, {"role": "assistant", "content": "It is"}], "continue_final_message": True}
    ids = unpack(encoder.encode_chat(msgspec.json.decode(msgspec.json.encode(body), type=ChatFields)))
    alone = unpack(encoder.encode_text("It is"))
    assert alone[0] == 0
    assert ids[-len(alone) + 1 :] == alone[1:]
    assert 0 not in ids


@pytest.mark.parametrize("special", [False, True])
def test_a_chat_to_vllm_begins_with_special_tokens_only_when_asked_to(special: bool) -> None:
    encoder = PromptEncoder(PromptModel(files_with_beginning()), EngineKind.VLLM)
    fields = msgspec.json.decode(msgspec.json.encode({"messages": [USER], "add_special_tokens": special}), type=ChatFields)
    assert (unpack(encoder.encode_chat(fields))[0] == 0) is special
    assert unpack(encoder.encode_text("x"))[0] == 0
