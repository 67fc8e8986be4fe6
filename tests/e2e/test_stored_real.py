"""C7 on stock engines: vLLM keeps responses where it is told to, and each engine knows only its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.e2e.serving import Served, serve
from tests.engines.launch import RealEngine
from tests.engines.programs import MODEL_NAME

pytestmark = pytest.mark.real_engine


async def test_C7_each_turn_goes_to_the_engine_that_keeps_the_one_before(real_vllm_pair: Sequence[RealEngine], tmp_path: Path) -> None:
    asked: dict[str, object] = {"model": MODEL_NAME, "input": "hello", "max_output_tokens": 4, "store": True}

    async def respond(router: Served, **more: str) -> str:
        async with router.session.post(router.url + "/v1/responses", json=asked | more) as answer:
            assert answer.status == 200, await answer.text()  # the other engine answers 404
            return str((await answer.json())["id"])

    firsts: list[str] = []
    for life in range(2):  # the second router has seen none of the first turns, and asks the engines
        async with serve(real_vllm_pair, tmp_path / f"router{life}.log", "--policy", "round-robin") as router:
            if life == 0:
                firsts = [await respond(router) for _ in range(4)]
            for first in firsts * 2:
                after = first
                for _ in range(3):
                    after = await respond(router, previous_response_id=after)
