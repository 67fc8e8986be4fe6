"""A vLLM that is said to decode and has no connector computes what it is handed a second time, and nothing looks wrong: so it is told."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator

import pytest

from engines.simulator.engine import SimulatedEngine
from engines.types import EngineKind, EngineSpec, Role
from router.disagg import Mode
from tests.integration.test_admin import TOKEN, Operator
from tests.integration.test_pairs_simulated import settings_for, spec_of
from tests.rig import Router, prompt, routing, settings_of
from tests.waiting import until

PERIOD_S = 0.05


@contextlib.asynccontextmanager
async def behind(decode: SimulatedEngine, mode: Mode) -> AsyncIterator[Router]:
    """A router in front of an engine that is said to decode, and of one that computes prompts for it."""
    async with (
        SimulatedEngine(settings_for("nixl", Role.PREFILL)) as there,
        decode,
        routing(
            [spec_of("nixl", there), EngineSpec(decode.url, role=Role.DECODE)],
            disagg=mode,
            admin_token=TOKEN,
            probe_period_s=PERIOD_S,
        ) as router,
    ):
        await looked_at(decode)
        yield router


async def looked_at(decode: SimulatedEngine) -> None:
    """What the engine counts by now is known here."""
    before = looks(decode)
    await until(
        lambda: looks(decode) >= before + 3, what="it has been looked at"
    )  # the first may have begun before, the third follows the second


def looks(engine: SimulatedEngine) -> int:
    return sum(request.path == "/metrics" for request in engine.requests)


async def seen(router: Router, decode: SimulatedEngine) -> float:
    """Tokens computed again, on all pages where they are told."""
    gauge = await router.metric("router_decode_computed_again_tokens", engine=decode.url)
    (endpoint,) = (await Operator(router).engine(decode.url)).json["endpoints"]
    assert endpoint["computed_again_tokens"] >= gauge
    return gauge


@pytest.mark.parametrize("stream", [True, False])
async def test_prompts_computed_twice_are_told_once_in_the_log_and_as_long_as_it_lasts_elsewhere(
    stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    decode = SimulatedEngine(settings_of(kind=EngineKind.VLLM))
    async with behind(decode, Mode.ALWAYS) as router:
        for number in range(3):
            answer = await router.chat(prompt(f"twice {number}"), stream=stream)
            assert (answer.status, answer.headers["x-commutator-prefill-reason"]) == (200, "always")

            async def told() -> bool:
                return await seen(router, decode) > 0

            await until(told, what="it is told")
        said = [record for record in caplog.records if record.getMessage() == "prompts computed twice"]
        assert [record.levelno for record in said] == [logging.WARNING]


async def test_measured_leaves_out_who_computes_again() -> None:
    decode = SimulatedEngine(settings_of(kind=EngineKind.VLLM))
    async with behind(decode, Mode.MEASURED) as router:
        assert (await router.chat(prompt("first"), stream=True)).headers["x-commutator-prefill-reason"] == "not_measured_yet"

        async def told() -> bool:
            return await seen(router, decode) > 0

        await until(told, what="it is told")
        assert (await router.chat(prompt("second"), stream=True)).headers["x-commutator-prefill-reason"] == "no_prefill_engine"


async def test_nothing_is_told_of_one_that_takes_what_it_is_handed() -> None:
    decode = SimulatedEngine(settings_for("nixl", Role.DECODE))
    async with behind(decode, Mode.ALWAYS) as router:
        for number in range(5):
            assert (await router.chat(prompt(f"once {number}"))).status == 200
            assert (await router.chat(prompt(f"once {number}"))).status == 200, "all cached there: nothing is fetched"
            assert (await router.chat(prompt(f"here {number}"), n=2)).status == 200, "computed there, since it cannot be shared"
            await looked_at(decode)
            assert await seen(router, decode) == 0
