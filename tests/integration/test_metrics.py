"""What the metrics page shows is what happened, and the reference names every family of it and no other."""

from __future__ import annotations

import re
from pathlib import Path

from engines.simulator.engine import SimulatedEngine
from engines.simulator.faults import Answer
from tests.rig import fleet, prompt, routing
from tests.waiting import until

REFERENCE = (Path(__file__).parents[2] / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8")
OF_A_ROUTER, _, OF_A_RELAY = REFERENCE.partition("## Of `commutator relay`")


def families(page: str) -> dict[str, str]:
    """Each family's type, by the name that its series have."""
    return dict(re.findall(r"^# TYPE (\S+) (\S+)$", page, re.MULTILINE))


async def test_the_reference_names_every_family_with_its_type_and_no_other() -> None:
    async with fleet(2) as engines, routing(engines) as router:
        assert (await router.chat("hello", stream=True)).status == 200
        shown = families((await router.get("/metrics")).body.decode())
    assert shown == dict(re.findall(r"^\| `(\S+)` \| (\S+) \|", OF_A_ROUTER, re.MULTILINE))


async def test_lengths_and_the_time_between_tokens_are_counted_once_for_each_stream() -> None:
    async with fleet(1, speedup=1.0, decode_step_ms=1.0) as engines, routing(engines) as router:
        told = await router.chat(prompt("a", 50), stream=True, max_tokens=11, stream_options={"include_usage": True})
        untold = await router.chat(prompt("b", 50), stream=True, max_tokens=11)
        whole = await router.chat(prompt("c", 50), max_tokens=11)
        assert [told.status, untold.status, whole.status] == [200] * 3
        assert await router.metric("router_inter_token_latency_seconds_count") == 2
        assert await router.metric("router_inter_token_latency_seconds_sum") > 0
        assert await router.metric("router_time_to_first_token_seconds_count") == 2
        assert await router.metric("router_input_tokens_count") == 3
        assert await router.metric("router_input_tokens_sum") == await router.metric("router_prompt_tokens_total") > 150
        assert await router.metric("router_output_tokens_count") == 2, "a stream without usage does not tell"
        assert await router.metric("router_output_tokens_sum") == 22


async def test_a_client_that_leaves_is_counted_by_how_far_its_request_was() -> None:
    async with fleet(1, speedup=1.0, decode_step_ms=50.0, prefill_tokens_per_s=100.0) as engines, routing(engines) as router:
        response = await router.begin("hi", stream=True, max_tokens=400)
        while b'"content":"' not in (piece := await response.content.readline()) or b'"content":""' in piece:
            assert piece
        response.close()
        response = await router.begin(prompt("slow", 200), stream=True)  # the role comes at once, the first token in seconds
        response.close()

        async def counted() -> bool:
            before = await router.metric("router_cancellations_total", phase="before_first_token")
            during = await router.metric("router_cancellations_total", phase="streaming")
            return (before, during) == (1, 1)

        await until(counted, what="both are counted")


async def test_an_engine_is_shown_with_what_it_is_what_it_says_and_what_failed_there() -> None:
    async with fleet(2) as engines, routing(engines, policy="round-robin") as router:
        bad, good = engines
        bad.faults.add(Answer(503))
        for _ in range(4):
            assert (await router.chat("hello")).status == 200
        page = (await router.get("/metrics")).body.decode()
        assert await router.metric("router_engine_failures_total", engine=bad.url) == 1
        assert await router.metric("router_engine_failures_total", engine=good.url) == 0
        assert await router.metric("router_endpoint_requests_total") == 5
        assert await router.metric("router_engine_info", engine=good.url, kind="vllm", role="aggregated", block_size="16") == 1
        assert await router.metric("router_build_info") == 1
        assert [_reported(page, bad), _reported(page, good)] == [True, True]


def _reported(page: str, engine: SimulatedEngine) -> bool:
    return all(
        f'router_engine_{name}{{engine="{engine.url}",rank="0"}}' in page
        for name in ("running_requests", "waiting_requests", "kv_usage_ratio")
    )


async def test_what_load_costs_in_cached_prefixes_is_counted() -> None:
    async with fleet(2, speedup=1.0, decode_step_ms=20.0) as engines, routing(engines) as router:
        shared = prompt("shared", 30)
        first = await router.chat(shared)
        holder = first.engine

        async def known() -> bool:
            return await router.overlap_at(holder, shared) > 0

        await until(known, what="the prefix is known")
        busy = [await router.begin(shared + prompt(str(number), 300), stream=True, max_tokens=300) for number in range(12)]
        for response in busy:
            response.close()

        async def ended() -> bool:
            return await router.metric("router_cancellations_total") == len(busy)

        await until(ended, what="all have left")
        outweighed = await router.metric("router_decisions_total", reason="load_outweighed")
        assert outweighed > 0
        assert await router.metric("router_overlap_regret_tokens_total") >= 16 * outweighed


async def test_the_lag_of_events_is_that_between_the_engines_clock_and_ours() -> None:
    async with fleet(1) as engines, routing(engines) as router:
        await router.chat(prompt("x", 100))

        async def lags() -> bool:
            return await router.metric("relay_batches_total") > 0

        await until(lags, what="events have come")
        assert 0 <= await router.metric("relay_event_lag_seconds") < 30
