"""Does the book tokenize for engines as they would themselves, and does it say so when it cannot?"""

from __future__ import annotations

import asyncio
import functools
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from engines.client import EngineClient
from engines.errors import EngineAnswered, EngineUnreachable
from engines.simulator.engine import SimulatedEngine
from engines.simulator.settings import SimulateSettings
from engines.types import EngineInfo, EngineKind, EngineSpec, Model
from router.prompts.asker import REST_S, Asker
from router.prompts.book import Prompt, PromptBook, pack
from router.prompts.chat import ChatFields
from router.prompts.encoder import PromptEncoder, PromptModel
from router.prompts.errors import NotRenderable, PromptRejected
from router.prompts.files import find_model_files
from router.prompts.tokenizer import LONG_CHARS, unpack

MODEL = Path(__file__).parents[2] / "engines" / "simulator" / "model"
ALTERNATING = (Path(__file__).parents[1] / "data" / "templates" / "alternating.jinja").read_text(encoding="utf-8")
USER = {"role": "user", "content": "What is a prefix cache good for?"}


@functools.cache
def load(folder: Path) -> PromptModel:
    return PromptModel(find_model_files(str(folder)))


class FakeEngine:
    """Answers `/tokenize` as an engine of its kind with this model would."""

    def __init__(self, kind: EngineKind = EngineKind.VLLM, *, folder: Path = MODEL, name: str = "a", root: str | None = None) -> None:
        self.info = EngineInfo(
            id=f"http://{name}:1",
            spec=EngineSpec(f"http://{name}:1"),
            kind=kind,
            version="1",
            models=(Model("m", root=str(folder) if root is None else root or None),),
        )
        self.folder = folder
        self.encoder: PromptEncoder | None = None
        self.asked: list[dict[str, Any]] = []

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        assert path == "/tokenize"
        if self.encoder is None:
            self.encoder = await asyncio.to_thread(lambda: PromptEncoder(load(self.folder), self.info.kind))
        self.asked.append(body)
        try:
            return {"tokens": self.encode(body)}
        except (NotRenderable, PromptRejected) as problem:
            raise EngineAnswered(400, path, excerpt=str(problem)) from problem

    def encode(self, body: dict[str, Any]) -> list[int]:
        assert self.encoder is not None
        if "prompt" in body:
            return unpack(self.encoder.encode_text(body["prompt"], add_special_tokens=body["add_special_tokens"]))
        return unpack(self.encoder.encode_chat(fields_of(body)))


class OwnTemplate(FakeEngine):
    """Started with `--chat-template`: its chats are not what its files say."""

    def encode(self, body: dict[str, Any]) -> list[int]:
        ids = super().encode(body)
        return [1, 2, 3, *ids] if "messages" in body else ids


def fields_of(body: dict[str, Any]) -> ChatFields:
    return msgspec.json.decode(msgspec.json.encode(body), type=ChatFields)


async def chat(book: PromptBook, *engines: FakeEngine, **body: object) -> Prompt:
    told = {"messages": [USER]} | body
    return await book.tokens_chat([engine.info.id for engine in engines], fields_of(told), msgspec.json.encode(told))


async def joined(book: PromptBook, *engines: FakeEngine) -> list[str]:
    return [(await book.join(engine.info, engine.post)).line for engine in engines]


def copy_of_model(folder: Path, *, template: str | None = None, **config: object) -> Path:
    shutil.copytree(MODEL, folder)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    if config:
        path = folder / "config.json"
        path.write_bytes(msgspec.json.encode(msgspec.json.decode(path.read_bytes()) | config))
    return folder


async def test_R17_an_engine_in_parity_is_tokenized_for_here() -> None:
    book, engine = PromptBook(), FakeEngine()
    assert await joined(book, engine) == ["fastokens, parity ok (16 prompts)"]
    checked = len(engine.asked)
    tokens = (await chat(book, engine)).tokens[engine.info.id]
    assert (tokens.source, len(engine.asked)) == ("local", checked)
    assert tokens.ids == engine.encode({"messages": [USER]})
    assert tokens.packed == pack(tokens.ids)
    assert tokens.count == len(tokens.ids)


async def test_R17_an_engine_out_of_parity_is_asked_and_the_status_names_the_prompt() -> None:
    book, engine = PromptBook(), OwnTemplate()
    (line,) = await joined(book, engine)
    assert line.startswith("texts: fastokens, parity ok; chats: engine's own /tokenize: “system and user”")
    status = book.status(engine.info.id)
    assert status is not None
    assert (status.chat_local, status.text_local, status.local) == (False, True, False)
    tokens = (await chat(book, engine)).tokens[engine.info.id]
    assert tokens.source == "engine"
    assert tokens.ids[:3] == [1, 2, 3]
    text = await book.tokens_text([engine.info.id], "once")
    assert text.tokens[engine.info.id].source == "local"


async def test_R17_an_engine_without_files_is_asked_and_the_status_says_what_to_do(tmp_path: Path) -> None:
    book, engine = PromptBook(hub_cache=tmp_path), FakeEngine(root="org/elsewhere")
    (line,) = await joined(book, engine)
    assert line.startswith("engine's own /tokenize: no tokenizer.json for 'org/elsewhere'")
    assert "--tokenizer" in line
    assert (await chat(book, engine)).tokens[engine.info.id].source == "engine"
    assert (await book.tokens_text([engine.info.id], "once")).tokens[engine.info.id].source == "engine"


async def test_the_setting_says_where_files_are_when_the_engines_own_word_is_no_use(tmp_path: Path) -> None:
    book, engine = PromptBook(tokenizer=str(MODEL), hub_cache=tmp_path), FakeEngine(root="/models/in/a/container")
    assert await joined(book, engine) == ["fastokens, parity ok (16 prompts)"]


async def test_files_that_are_not_the_engines_do_not_keep_it_from_its_own(tmp_path: Path) -> None:
    other = copy_of_model(tmp_path / "other", template="{{ messages[0].content }}")
    book, engine = PromptBook(tokenizer=str(other)), FakeEngine()
    assert await joined(book, engine) == ["fastokens, parity ok (16 prompts)"]


async def test_an_engine_that_does_not_tokenize_is_believed_with_a_word_about_it() -> None:
    class Mute(FakeEngine):
        async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
            raise EngineAnswered(404, path)

    book, engine = PromptBook(), Mute()
    (line,) = await joined(book, engine)
    assert line.startswith("fastokens, parity not checked: ")
    assert (await chat(book, engine)).tokens[engine.info.id].source == "local"


async def test_engines_of_one_model_share_one_encoder_and_one_list_of_ids(tmp_path: Path) -> None:
    book = PromptBook()
    engines = [FakeEngine(name="a"), FakeEngine(name="b"), FakeEngine(name="c", folder=copy_of_model(tmp_path / "copy"))]
    await asyncio.gather(*(book.join(engine.info, engine.post) for engine in engines))
    tokens = (await chat(book, *engines)).tokens
    assert len(tokens) == 3
    assert len({id(one) for one in tokens.values()}) == 1


async def test_a_mixed_fleet_shares_ids_where_the_dialects_agree_and_only_there() -> None:
    book, vllm, sglang = PromptBook(), FakeEngine(EngineKind.VLLM, name="v"), FakeEngine(EngineKind.SGLANG, name="s")
    await joined(book, vllm, sglang)
    same = (await chat(book, vllm, sglang)).tokens
    assert same[vllm.info.id] is same[sglang.info.id]
    parts = {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]}
    apart = (await chat(book, vllm, sglang, **parts)).tokens
    assert apart[vllm.info.id].ids == vllm.encode(parts)
    assert apart[sglang.info.id].ids == sglang.encode(parts)
    assert apart[vllm.info.id].ids != apart[sglang.info.id].ids


async def test_a_conversation_the_template_refuses_is_rejected_in_its_words(tmp_path: Path) -> None:
    book, engine = PromptBook(), FakeEngine(folder=copy_of_model(tmp_path / "strict", template=ALTERNATING))
    await joined(book, engine)
    with pytest.raises(PromptRejected, match="must alternate"):
        await chat(book, engine, messages=[USER, USER])


async def test_a_prompt_one_dialect_refuses_still_has_ids_for_the_other(tmp_path: Path) -> None:
    folder = copy_of_model(tmp_path / "picky", template="{% if messages[-1].role == 'assistant' %}{{ raise_exception('no') }}{% endif %}x")
    book, vllm, sglang = (
        PromptBook(),
        FakeEngine(EngineKind.VLLM, name="v", folder=folder),
        FakeEngine(EngineKind.SGLANG, name="s", folder=folder),
    )
    await joined(book, vllm, sglang)
    prompt = await chat(book, vllm, sglang, messages=[USER, {"role": "assistant", "content": "so"}])
    assert list(prompt.tokens) == [sglang.info.id]
    assert prompt.reasons == {vllm.info.id: "the chat template refuses the prompt: no"}


async def test_what_cannot_be_rendered_here_is_asked_of_the_engine_once() -> None:
    class Tolerant(FakeEngine):
        def encode(self, body: dict[str, Any]) -> list[int]:
            return [7, 8] if "hologram" in str(body) else super().encode(body)

    book, engines = PromptBook(), [Tolerant(name="a"), Tolerant(name="b")]
    await joined(book, *engines)
    before = sum(len(engine.asked) for engine in engines)
    for _ in range(2):
        prompt = await chat(book, *engines, messages=[{"role": "user", "content": [{"type": "hologram", "text": "x"}]}])
        assert {(tokens.source, tuple(tokens.ids)) for tokens in prompt.tokens.values()} == {("engine", (7, 8))}
    assert sum(len(engine.asked) for engine in engines) == before + 1


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://example.org/a.png"}}]}]},
            "image_url",
        ),
        ({"chat_template": "mine"}, "its own chat template"),
        ({"truncate_prompt_tokens": 3}, "truncate_prompt_tokens"),
    ],
)
async def test_what_even_the_engine_would_tell_wrong_is_not_asked(body: dict[str, Any], why: str) -> None:
    book, engine = PromptBook(), FakeEngine()
    await joined(book, engine)
    before = len(engine.asked)
    with pytest.raises(NotRenderable, match=why):
        await chat(book, engine, **body)
    assert len(engine.asked) == before


async def test_chats_of_a_model_whose_prompts_are_built_in_code_have_no_ids_and_texts_do(tmp_path: Path) -> None:
    book, engine = PromptBook(), OwnTemplate(folder=copy_of_model(tmp_path / "oss", model_type="gpt_oss"))
    (line,) = await joined(book, engine)
    assert "chats: no ids: " in line
    before = len(engine.asked)
    with pytest.raises(NotRenderable, match="gpt_oss"):
        await chat(book, engine)
    assert (await book.tokens_text([engine.info.id], "once")).tokens
    assert len(engine.asked) == before


class Silent(FakeEngine):
    """In parity for texts, then never answers."""

    def __init__(self) -> None:
        super().__init__(root="org/elsewhere")

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        self.asked.append(body)
        await asyncio.Event().wait()
        raise AssertionError("unreachable")


async def test_an_engine_that_does_not_answer_costs_one_time_limit_and_is_then_left_alone(tmp_path: Path) -> None:
    book, engine = PromptBook(hub_cache=tmp_path, ask_timeout_s=0.05), Silent()
    await joined(book, engine)
    with pytest.raises(NotRenderable, match=r"no answer within 0\.05 s"):
        await chat(book, engine)
    with pytest.raises(NotRenderable, match="left alone for a while"):
        await chat(book, engine, messages=[USER, USER])
    assert len(engine.asked) == 1


async def test_an_engine_left_alone_is_asked_again_later() -> None:
    now = 0.0
    answers: list[object] = [EngineUnreachable("refused"), {"tokens": [1]}]

    async def post(path: str, body: object) -> object:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    asker = Asker(post, "m", timeout_s=1, clock=lambda: now)
    with pytest.raises(NotRenderable, match="refused"):
        await asker.packed({})
    with pytest.raises(NotRenderable, match="left alone"):
        await asker.packed({})
    now = REST_S
    assert await asker.packed({}) == pack([1])


@pytest.mark.parametrize("answer", [{}, {"tokens": None}, {"tokens": ["x"]}, {"tokens": [-1]}, [], None, {"tokens": [2**40]}])
async def test_an_answer_without_ids_is_no_answer(answer: object) -> None:
    async def post(path: str, body: object) -> object:
        return answer

    with pytest.raises(NotRenderable):
        await Asker(post, "m", timeout_s=1).packed({})


async def test_an_engine_that_left_or_never_joined_has_no_ids() -> None:
    book, engine, other = PromptBook(), FakeEngine(name="a"), FakeEngine(name="b")
    await joined(book, engine)
    prompt = await chat(book, engine, other)
    assert prompt.reasons == {other.info.id: "the engine has not joined yet"}
    book.leave(engine.info.id)
    book.leave(engine.info.id)
    assert book.status(engine.info.id) is None
    with pytest.raises(NotRenderable, match="not joined"):
        await chat(book, engine)
    with pytest.raises(NotRenderable, match="no engine"):
        await book.tokens_chat([], fields_of({"messages": [USER]}), b"")


async def test_texts_get_special_tokens_unless_told_otherwise() -> None:
    book, engine = PromptBook(), FakeEngine()
    await joined(book, engine)
    for special in (True, False):
        prompt = await book.tokens_text([engine.info.id], "<|im_start|>once", add_special_tokens=special)
        assert prompt.tokens[engine.info.id].ids == engine.encode({"prompt": "<|im_start|>once", "add_special_tokens": special})


async def test_a_long_prompt_leaves_the_loop_free_and_comes_out_the_same() -> None:
    book, engine = PromptBook(), FakeEngine()
    await joined(book, engine)
    long = "word " * LONG_CHARS["fastokens"]
    turns = 0
    task = asyncio.create_task(chat(book, engine, messages=[{"role": "user", "content": long}]))  # noqa: TID251  owned by the test
    while not task.done():
        turns += 1
        await asyncio.sleep(0)
    assert turns > 2  # encoded on the loop, it would be done at the first turn
    assert (await task).tokens[engine.info.id].ids == engine.encode({"messages": [{"role": "user", "content": long}]})


async def test_half_a_surrogate_pair_is_a_reason_not_an_error() -> None:
    book, engine = PromptBook(), FakeEngine()
    await joined(book, engine)
    with pytest.raises(NotRenderable, match="surrogate"):
        await book.tokens_text([engine.info.id], "\ud800")


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


async def test_R17_a_simulated_engine_is_in_parity(session: aiohttp.ClientSession) -> None:
    async with SimulatedEngine(SimulateSettings(port=0)) as engine:
        info = EngineInfo(engine.url, EngineSpec(engine.url), EngineKind.VLLM, "1", (Model("sim", root=str(MODEL)),))
        status = await PromptBook().join(info, EngineClient(session, engine.url).post_json)
    assert status.line == "fastokens, parity ok (16 prompts)"


@pytest.mark.real_engine
@pytest.mark.parametrize(("fixture", "kind"), [("real_vllm", EngineKind.VLLM), ("real_sglang", EngineKind.SGLANG)])
async def test_R17_a_real_engine_is_in_parity(
    fixture: str, kind: EngineKind, request: pytest.FixtureRequest, session: aiohttp.ClientSession
) -> None:
    client = EngineClient(session, request.getfixturevalue(fixture).url, timeout_s=30)
    card = (await client.get_json("/v1/models"))["data"][0]
    root = card["root"] if kind is EngineKind.VLLM else (await client.get_json("/model_info"))["tokenizer_path"]
    info = EngineInfo(client.url, EngineSpec(client.url), kind, "1", (Model(card["id"], root=root),))
    assert (await PromptBook().join(info, client.post_json)).line == "fastokens, parity ok (16 prompts)"
