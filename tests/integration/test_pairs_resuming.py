"""A decode engine dies while it streams: another one goes on, with the prompt computed for it anew, and the client cannot tell."""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import pytest

from engines.simulator.engine import SimulatedEngine
from engines.simulator.faults import Answer as Scripted
from engines.simulator.faults import Break, Fail
from engines.types import EngineSpec, Role
from router.disagg import Mode
from tests.integration.test_failover import nothing_is_in_flight
from tests.integration.test_pairs_simulated import WAYS, settings_for, spec_of
from tests.integration.test_resuming import CHAT, COMPLETION, FirstThatLooksAtCaches, body, broken
from tests.rig import Router, asked, prompt, routing, settings_of

APIS = [(way, path) for way in WAYS for path in (CHAT, COMPLETION) if (way, path) != ("rooms", CHAT)]
"""SGLang tells no ids in the stream of a chat."""
TEXT = prompt("a text", 50)


class Fleet(NamedTuple):
    prefill: SimulatedEngine
    decode: list[SimulatedEngine]
    router: Router


@contextlib.asynccontextmanager
async def fleet(way: str, decode: int = 2, *, alone: bool = False) -> AsyncIterator[Fleet]:
    """A prefill engine, and others that are asked in order: decode engines, then one that takes whole requests."""
    async with contextlib.AsyncExitStack() as stack:
        there = await stack.enter_async_context(SimulatedEngine(settings_for(way, Role.PREFILL)))
        here = [await stack.enter_async_context(SimulatedEngine(settings_for(way, Role.DECODE))) for _ in range(decode)]
        specs = [spec_of(way, engine) for engine in (there, *here)]
        if alone:
            here.append(await stack.enter_async_context(SimulatedEngine(settings_of(kind=there.kind))))
            specs.append(EngineSpec(here[-1].url))
        policy = f"{FirstThatLooksAtCaches.__module__}:{FirstThatLooksAtCaches.__name__}"
        settings: dict[str, Any] = {"resume": 1, "disagg": Mode.ALWAYS, "policy": policy, "probe_period_s": 60.0}
        router = await stack.enter_async_context(routing(specs, **settings))
        FirstThatLooksAtCaches.order = [engine.url for engine in (there, *here)]
        yield Fleet(there, here, router)
        await nothing_is_in_flight(router)


async def stream(router: Router, path: str) -> bytes:
    """A stream that is whole, without the second it was made in and what only the engine that began it knew."""
    answer = await router.post(path, body(path, TEXT, rid="one"), {"x-request-id": "0123456789abcdef"})
    assert answer.status == 200
    return re.sub(rb'("created":)\d+|,"prompt_tokens_details":\{[^}]*}', rb"\1", answer.body)


@pytest.mark.parametrize(("way", "path"), APIS)
@pytest.mark.parametrize("alone", [False, True], ids=["decode", "aggregated"])
async def test_another_engine_goes_on(way: str, path: str, alone: bool) -> None:
    async with fleet(way, 1 if alone else 2, alone=alone) as (there, (one, other), router):
        one.faults.add(Break(3))
        got = await stream(router, path)
        assert len(asked(one, path)) == len(asked(other, path)) == 1
        assert len(asked(there, path) + asked(there, COMPLETION)) >= (1 if alone else 2), "what was generated is computed too"
        assert (other.counters.fetched > 0) is not alone
        assert got == await stream(router, path)
        assert await router.metric("router_resumes_total", outcome="resumed") == 1
        assert await router.metric("router_kv_transfers_total", outcome="failed") == 0


async def test_a_stream_that_no_engine_can_go_on_with_breaks_off() -> None:
    """The prefill engine that is left could compute it, and is never asked for an answer."""
    async with fleet("nixl", 1) as (there, (one,), router):
        one.faults.add(Break(3))
        _, error = await broken(router, CHAT, text=TEXT)
        assert "no endpoint" in str(error["message"])
        assert await router.metric("router_resumes_total", outcome="no_engine") == 1
        assert all(b'max_tokens":1,' in request.body for request in asked(there, COMPLETION))


@pytest.mark.parametrize("fault", [Fail(1), Scripted(status=500, body=b'{"error":{"message":"KV load failed"}}')], ids=["stream", "500"])
async def test_a_handover_that_fails_when_a_stream_goes_on_costs_no_token_either(fault: Fail | Scripted) -> None:
    """The client has the beginning: what fails now is tried again before anybody sees it."""
    async with fleet("nixl") as (_, (one, other), router):
        one.faults.add(Break(3))
        other.faults.add(fault)
        got = await stream(router, CHAT)
        assert got == await stream(router, CHAT)
        assert len(asked(other, CHAT)) == 2, "handed over in vain, then computed there"
        assert await router.metric("router_kv_transfers_total", outcome="failed") == 1
        assert await router.metric("router_resumes_total", outcome="resumed") == 1
