"""Do the real engines start, answer, count and publish? What every other test here stands on."""

from __future__ import annotations

import json

import pytest

from tests.engines.launch import RealEngine
from tests.engines.programs import MODEL_NAME

pytestmark = pytest.mark.real_engine


@pytest.fixture(params=["real_vllm", "real_sglang"])
def engine(request: pytest.FixtureRequest) -> RealEngine:
    found: RealEngine = request.getfixturevalue(request.param)
    return found


def test_a_repeated_prompt_is_a_hit_by_the_engines_own_count(engine: RealEngine) -> None:
    body = {"model": MODEL_NAME, "prompt": "what is asked twice " * 60, "max_tokens": 2, "temperature": 0}
    first = json.loads(engine.post("/v1/completions", body))
    before = engine.counters()
    second = json.loads(engine.post("/v1/completions", body))
    counted = engine.counters() - before
    assert counted.queries == first["usage"]["prompt_tokens"]
    assert counted.queries - engine.block_size <= counted.hits < counted.queries
    assert second["choices"][0]["text"] == first["choices"][0]["text"]


def test_what_it_answers_depends_on_the_prompt(engine: RealEngine) -> None:
    """With an engine's own dummy weights it would not, and comparing answers would show nothing."""
    bodies = [{"model": MODEL_NAME, "prompt": prompt, "max_tokens": 8, "temperature": 0} for prompt in ("import os", "class Answer")]
    texts = {json.loads(engine.post("/v1/completions", body))["choices"][0]["text"] for body in bodies}
    assert len(texts) == 2


def test_it_has_nothing_in_flight_afterwards(engine: RealEngine) -> None:
    assert engine.unfinished() == 0
