"""C6 on real vLLM: its own sleep gauge is what the router goes by."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.e2e.serving import serve
from tests.engines.launch import RealEngine
from tests.waiting import until

pytestmark = pytest.mark.real_engine


async def test_C6_a_real_engine_that_is_put_to_sleep_gets_nothing_until_it_is_woken(
    real_vllm_pair: Sequence[RealEngine], tmp_path: Path
) -> None:
    sleeper, other = real_vllm_pair
    async with serve(real_vllm_pair, tmp_path / "log", "--probe-period-s", "0.5") as router:

        async def asleep() -> bool:
            return await router.metric("router_engine_state", engine=sleeper.url, state="asleep") == 1

        async def serves() -> bool:
            return await router.serving() == 2

        sleeper.post("/sleep?level=1", {})
        try:
            assert json.loads(sleeper.get("/is_sleeping")) == {"is_sleeping": True}
            await until(asleep, what="the router sees that it sleeps")
            assert (await router.get("/ready")).json["models"] == {"tiny": 1}
            assert {(await router.ask(f"asleep {number} " * 40)).engine for number in range(6)} == {other.url}
        finally:
            sleeper.post("/wake_up", {})
        await until(serves, what="the router sees that it is awake")
        answers = [await router.ask(f"awake {number} " * 40) for number in range(12)]
        assert {answer.status for answer in answers} == {200}
        assert {answer.engine for answer in answers} == {sleeper.url, other.url}
