"""The doctor in front of real engines: it finds nothing wrong where nothing is, and what is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from discovery.config.specs import parse_engine_spec
from engines.types import EngineSpec
from router.doctor.command import examine
from router.doctor.findings import State
from router.doctor.settings import DoctorSettings
from tests.e2e.serving import serve
from tests.e2e.test_pairs_real import KINDS, lines
from tests.engines.launch import RealEngine
from tests.engines.pairs import Pair

pytestmark = pytest.mark.real_engine


@pytest.mark.parametrize("engines", ["real_mixed_pair"], indirect=True)
async def test_O2_of_real_engines_that_are_well_nothing_is_wrong(engines: Sequence[RealEngine], tmp_path: Path) -> None:
    async with serve(engines, tmp_path / "router.log") as router:
        found = await examine(DoctorSettings(router=router.url))
    assert [finding for finding in found if finding.state is State.WRONG] == []
    for check in ("reachable", "cache", "usage", "events", "replay", "block-size", "tokenizer", "keep-alive", "clock"):
        assert [finding.state for finding in found if finding.check == check] == [State.OK] * len(engines), check
    assert [finding.state for finding in found if finding.check == "routing"] == [State.OK]


@pytest.mark.parametrize("engines", ["half_silent_vllm", "half_silent_sglang"], indirect=True)
async def test_O2_a_real_engine_without_events_is_named_and_no_other(engines: Sequence[RealEngine]) -> None:
    found = await examine(DoctorSettings(engine=tuple(EngineSpec(engine.url) for engine in engines)))
    assert [(finding.check, finding.subject) for finding in found if finding.state is State.WRONG] == [("events", engines[1].url)]


@pytest.mark.parametrize("kind", KINDS)
async def test_O2_a_real_pair_hands_a_prompt_over_and_is_well(kind: str, request: pytest.FixtureRequest) -> None:
    pair: Pair = request.getfixturevalue(kind)
    found = await examine(DoctorSettings(engine=tuple(map(parse_engine_spec, lines(pair)))))
    assert [finding.state for finding in found if finding.check == "transfer"] == [State.OK], found
    assert [finding for finding in found if finding.state is State.WRONG] == []
