"""`commutator up` with stock engines: one vLLM and one SGLang on the CPU, and the router in front of both."""

from __future__ import annotations

from pathlib import Path

import pytest

from discovery.up.commands import toml
from engines.launch.plan import LaunchPlan
from tests.engines import programs
from tests.engines.programs import MODEL_NAME
from tests.integration.test_up import engines_in, up
from tests.rig import prompt

pytestmark = pytest.mark.real_engine


def pool(plan: LaunchPlan) -> dict[str, object]:
    """A pool of one such engine, as a table of the file."""
    return {
        "name": plan.engine,
        "engine": plan.engine,
        "model": plan.model,
        "python": plan.python,
        "env": plan.env,
        "arguments": list(plan.arguments),
    }


async def test_both_engines_start_serve_find_prefixes_and_end(tmp_path: Path) -> None:
    pools = [pool(programs.vllm_plan(programs.VLLM)), pool(programs.sglang_plan(programs.SGLANG))]
    (tmp_path / "up.toml").write_text(f'pool = {toml(pools)}\nserve = {{ policy = "kv" }}\n')
    async with up(tmp_path, "--config", "up.toml", ready_within_s=600) as running:
        assert [engine["name"] for engine in running.engines] == ["vllm-0", "sglang-0"]
        served, wanted = set[str](), {engine["url"] for engine in running.engines}
        for number in range(64):  # equals are drawn between: that one of two is never drawn does not happen
            if served == wanted:
                break
            text = prompt(f"up{number}", 60)
            first = await running.router.chat(text, model=MODEL_NAME)
            assert first.status == 200, first.body
            again = await running.router.chat(text, model=MODEL_NAME)
            served.add(first.engine)
            if again.engine == first.engine:
                assert again.cached_tokens > 0, "by the engine's own count"
        assert served == wanted
        assert (await running.router.get("/ready")).json["models"] == {MODEL_NAME: 2}
    assert engines_in(tmp_path) == []
