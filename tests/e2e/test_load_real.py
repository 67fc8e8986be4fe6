"""What real engines say of their load and of their health, and what asking costs them: no token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.e2e.serving import Served, serve
from tests.engines.launch import RealEngine
from tests.engines.programs import MODEL_NAME
from tests.waiting import until

pytestmark = pytest.mark.real_engine

GENERATED = {
    "vllm": ("vllm:generation_tokens_total", "vllm:prompt_tokens_total"),
    "sglang": ("sglang:generation_tokens_total", "sglang:prompt_tokens_total"),
}
CHECKED = {"vllm": "GET /health", "sglang": "GET /ready"}
CHECKS = 10


async def running(router: Served, engine: RealEngine) -> object:
    """Requests that the engine says it runs, as the router knows it."""
    candidates = (await router.route("x", model=MODEL_NAME))["candidates"]
    return next(candidate["load"]["running"] for candidate in candidates if candidate["engine"] == engine.url)


async def test_sglangs_pushed_load_is_known_between_two_looks(real_sglang: RealEngine, tmp_path: Path) -> None:
    """The next look is ten minutes away."""
    async with serve([real_sglang], tmp_path / "router.log", "--probe-period-s", "600") as router:
        body = {"model": MODEL_NAME, "prompt": "x", "max_tokens": 4000, "ignore_eos": True, "stream": True}

        async def one_runs() -> bool:
            return await running(router, real_sglang) == 1

        async def none_runs() -> bool:
            return await running(router, real_sglang) == 0

        async with router.session.post(real_sglang.url + "/v1/completions", json=body) as stream:
            await stream.content.readline()
            await until(one_runs, what="the pushed report of a request that did not come this way")
        await until(none_runs, what="the pushed report that it is over")
        assert await router.metric("router_load_reports_total", outcome="read") > 0
        assert await router.metric("router_load_reports_total", outcome="malformed") == 0


@pytest.mark.parametrize("engines", ["real_mixed_pair"], indirect=True)
async def test_looking_after_an_engine_has_it_generate_nothing(engines: Sequence[RealEngine], tmp_path: Path) -> None:
    async with serve(engines, tmp_path / "router.log", "--probe-period-s", "0.2"):
        logs = {engine: engine.log.read_text(errors="replace") for engine in engines}
        before = [engine.metrics(*GENERATED[engine.kind]) for engine in engines]

        def checked() -> bool:
            """Engines log each question."""
            return all(
                engine.log.read_text(errors="replace").count(CHECKED[engine.kind]) >= logs[engine].count(CHECKED[engine.kind]) + CHECKS
                for engine in engines
            )

        await until(checked, what=f"{CHECKS} more checks of each engine")
        assert [engine.metrics(*GENERATED[engine.kind]) for engine in engines] == before
        for engine in engines:
            asked = engine.log.read_text(errors="replace")[len(logs[engine]) :]
            assert "POST " not in asked
            assert engine.kind == "vllm" or "GET /health" not in asked, "SGLang generates a token for each"
