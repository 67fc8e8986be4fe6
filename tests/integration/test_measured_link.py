"""`commutator advise --link measured`: a link is found as fast as it is, or it is said why it was not found."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from engines.kv_bytes import KvShape
from engines.simulator.engine import SimulatedEngine
from engines.simulator.settings import Connector as Way
from engines.simulator.settings import SimulateSettings
from engines.types import Connector, EngineKind, EngineSpec, Role
from planner.advise.measuring import LinkNotMeasured, measure_link
from tests.rig import settings_of

BYTES_A_TOKEN = 1000
RATE = 4e6


def settings_for(way: str, role: Role) -> SimulateSettings:
    kind = EngineKind.SGLANG if way == "rooms" else EngineKind.VLLM
    connector = Way.MOONCAKE if way == "mooncake" else Way.NIXL
    timed = {"speedup": 1, "prefill_tokens_per_s": 1e6, "kv_blocks": 4096, "kv_bytes_per_token": BYTES_A_TOKEN, "link_bytes_per_s": RATE}
    return settings_of(kind=kind, connector=connector, role=role, **timed)


def specs(way: str, engines: Sequence[SimulatedEngine]) -> list[EngineSpec]:
    connector = {"nixl": Connector.NIXL, "mooncake": Connector.MOONCAKE}.get(way)
    asked = Role.PREFILL if way == "mooncake" else None
    return [
        EngineSpec(one.url, role=one.role, connector=connector, bootstrap=one.bootstrap if one.role is asked else None) for one in engines
    ]


@pytest.mark.parametrize("way", ["nixl", "mooncake", "rooms"])
async def test_a_link_is_as_fast_as_it_is(way: str) -> None:
    async with (
        SimulatedEngine(settings_for(way, Role.PREFILL)) as there,
        SimulatedEngine(settings_for(way, Role.DECODE)) as here,
    ):
        link = await measure_link(specs(way, [there, here]), KvShape(BYTES_A_TOKEN))
        assert link.name == "measured"
        assert RATE / 2 < link.bytes_per_s < RATE * 1.5


async def test_two_engines_that_take_whole_requests_have_no_link() -> None:
    async with SimulatedEngine(settings_of()) as one, SimulatedEngine(settings_of()) as other:
        with pytest.raises(LinkNotMeasured, match="role=prefill"):
            await measure_link([EngineSpec(one.url), EngineSpec(other.url)], KvShape(BYTES_A_TOKEN))


async def test_engines_of_different_groups_have_none() -> None:
    async with SimulatedEngine(settings_of(role=Role.PREFILL)) as there, SimulatedEngine(settings_of(role=Role.DECODE)) as here:
        pair = [EngineSpec(there.url, role=Role.PREFILL, group="a"), EngineSpec(here.url, role=Role.DECODE, group="b")]
        with pytest.raises(LinkNotMeasured, match="cannot hand KV"):
            await measure_link(pair, KvShape(BYTES_A_TOKEN))


async def test_an_engine_that_is_not_there_is_named() -> None:
    async with SimulatedEngine(settings_of(role=Role.PREFILL)) as there:
        gone = EngineSpec("http://127.0.0.1:9", role=Role.DECODE)
        with pytest.raises(LinkNotMeasured):
            await measure_link([EngineSpec(there.url, role=Role.PREFILL), gone], KvShape(BYTES_A_TOKEN))
