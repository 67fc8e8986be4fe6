"""Clients that know nothing of the router: they are given another base URL, and nothing else changes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.e2e.serving import Served, serve
from tests.engines import environments
from tests.engines.launch import RealEngine
from tests.engines.programs import MODEL_NAME

pytestmark = pytest.mark.real_engine

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tell the weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
BENCH_PROMPTS = 48


@pytest.fixture
async def router(real_vllm: RealEngine, tmp_path: Path) -> AsyncIterator[Served]:
    """In front of one engine, so that its answer and the engine's own are of the same cache."""
    async with serve([real_vllm], tmp_path / "router.log") as router:
        yield router


def asked(what: str, **fields: Any) -> dict[str, Any]:  # noqa: ANN401  arguments of the client
    content = f"{what}: " + "please explain how a prefix cache works " * 12
    return {"model": MODEL_NAME, "messages": [{"role": "user", "content": content}], "max_tokens": 12, "temperature": 0, "seed": 1} | fields


def client_of(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0)


async def test_openai_sync_client_gets_what_the_engine_says(router: Served, real_vllm: RealEngine) -> None:
    with client_of(router.url) as ours, client_of(real_vllm.url) as engines:
        assert [model.id for model in ours.models.list()] == [MODEL_NAME]
        ours.chat.completions.create(**asked("sync"))  # both below then find it cached, and compute alike
        through, direct = (client.chat.completions.create(**asked("sync")) for client in (ours, engines))
    assert through.choices == direct.choices
    assert through.usage == direct.usage
    assert through.usage is not None
    assert through.usage.completion_tokens == 12


async def test_openai_sync_stream_is_the_engines_stream(router: Served, real_vllm: RealEngine) -> None:
    fields = asked("stream", stream=True, stream_options={"include_usage": True})
    with client_of(router.url) as ours, client_of(real_vllm.url) as engines:
        list(ours.chat.completions.create(**fields))
        through, direct = (list(client.chat.completions.create(**fields)) for client in (ours, engines))
    assert [chunk.choices for chunk in through] == [chunk.choices for chunk in direct]
    assert len(through) > 4
    assert through[-1].usage == direct[-1].usage
    assert through[-1].usage is not None


async def test_openai_async_clients_at_once(router: Served) -> None:
    async with openai.AsyncOpenAI(base_url=f"{router.url}/v1", api_key="unused", max_retries=0) as client:

        async def streamed(number: int) -> str:
            chunks = await client.chat.completions.create(**asked(f"async {number}", stream=True))
            return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

        async def whole(number: int) -> str:
            answer = await client.completions.create(model=MODEL_NAME, prompt=f"async {number}", max_tokens=8, temperature=0)
            return str(answer.choices[0].text)

        texts = await asyncio.gather(*(ask(number) for number in range(8) for ask in (streamed, whole)))
    assert len(texts) == 16
    assert all(texts)


async def test_openai_tools_reach_the_engine(router: Served, real_vllm: RealEngine) -> None:
    fields = asked("tools", tools=[WEATHER], tool_choice="none")
    with client_of(router.url) as ours, client_of(real_vllm.url) as engines:
        plain = ours.chat.completions.create(**asked("tools"))
        ours.chat.completions.create(**fields)
        through, direct = (client.chat.completions.create(**fields) for client in (ours, engines))
    assert through.choices == direct.choices
    assert through.usage == direct.usage
    assert through.usage is not None
    assert plain.usage is not None
    assert through.usage.prompt_tokens > plain.usage.prompt_tokens + 20


async def test_openai_client_sees_the_engines_own_error(router: Served) -> None:
    with client_of(router.url) as client:
        with pytest.raises(openai.BadRequestError, match="8192"):
            client.completions.create(model=MODEL_NAME, prompt=[400] * 9000, max_tokens=1)
        with pytest.raises(openai.NotFoundError, match="no-such-model"):
            client.chat.completions.create(**asked("error") | {"model": "no-such-model"})


async def bench(url: str, folder: Path, seed: int) -> dict[str, Any]:
    """The summary of vLLM's own load generator."""
    python = environments.ensure("vllm") / "bin" / "python"
    result = folder / f"bench-{seed}.json"
    process = await asyncio.create_subprocess_exec(
        python, python.with_name("vllm"), "bench", "serve", "--backend", "openai-chat", "--base-url", url,
        "--endpoint", "/v1/chat/completions", "--model", MODEL_NAME, "--tokenizer", environments.ensure_model(),
        "--dataset-name", "random", "--random-input-len", "300", "--random-output-len", "8", "--random-prefix-len", "64",
        "--num-prompts", str(BENCH_PROMPTS), "--max-concurrency", "8", "--seed", str(seed),
        "--save-result", "--result-dir", folder, "--result-filename", result.name, "--disable-tqdm",
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        env=environments.clean_environment() | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"},
    )  # fmt: skip
    told, _ = await process.communicate()
    assert process.returncode == 0, told.decode()[-4000:]
    summary: dict[str, Any] = json.loads(result.read_text())
    return summary


async def test_vllm_bench_serve_succeeds_as_often_through_the_router(real_vllm_pair: Sequence[RealEngine], tmp_path: Path) -> None:
    async with serve(real_vllm_pair, tmp_path / "router.log") as router:
        through, direct = await asyncio.gather(bench(router.url, tmp_path, 1), bench(real_vllm_pair[0].url, tmp_path, 2))
        sent = await router.metric("router_requests_total", route="/v1/chat/completions", status="200")
        assert await router.metric("router_active_requests") == 0
    assert through["completed"] == direct["completed"] == BENCH_PROMPTS
    assert through.get("failed", 0) == direct.get("failed", 0) == 0
    assert through["total_output_tokens"] == direct["total_output_tokens"]
    assert sent >= BENCH_PROMPTS
