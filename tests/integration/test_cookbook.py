"""The cookbook's policies run as they are, in `serve` and in `replay`."""

import random
from collections import Counter
from pathlib import Path

import pytest

from engines.types import Endpoint
from router.replay.engines import Hardware
from router.replay.generators import generate
from router.replay.replay import Member, Replay, Setting
from router.replay.workload import timed
from router.scheduling.policies.least_loaded import LeastLoaded
from router.scheduling.table import load_policy
from router.scheduling.types import Candidate, Context, Load, Overlap, RoutingRequest
from tests.rig import fleet, routing

DOCS = Path(__file__).parents[2] / "docs"
PATHS = ("tenant_pinning:TenantPinning", "cheapest_gpu_first:CheapestGpuFirst", "sticky_sessions:StickySessions")


@pytest.fixture(autouse=True)
def examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(DOCS / "examples")


def test_the_page_shows_them_whole() -> None:
    text = (DOCS / "cookbook.md").read_text() + (DOCS / "policies.md").read_text()
    for path in PATHS:
        source = (DOCS / "examples" / f"{path.partition(':')[0]}.py").read_text()
        assert source in text
        assert len([line for line in source.splitlines() if line.strip()]) < 32


@pytest.mark.parametrize("path", PATHS)
async def test_a_policy_of_the_cookbook_serves(path: str) -> None:
    async with fleet(3) as engines, routing(engines, policy=path) as router:
        homes = Counter(
            [(await router.chat("a question of some length " * 8, headers={"x-session-id": "acme/1"})).engine for _ in range(6)]
        )
        assert sum(homes.values()) == 6
        assert (await router.route("a question"))["policy"] == path


@pytest.mark.parametrize("path", PATHS)
def test_a_policy_of_the_cookbook_replays(path: str) -> None:
    def ttft_s(policy: object) -> tuple[float, float]:
        replay = Replay(Setting(Hardware(), (Member(),) * 4), policy, path)  # type: ignore[arg-type]
        for _ in replay.run(timed(generate("chat", 300), 1.0)):
            pass
        served = replay.tally.served
        assert all(one.e2e_s is not None for one in served)
        cached = sum(one.cached_tokens for one in served) / sum(one.prompt_tokens for one in served)
        return sum(one.ttft_s or 0.0 for one in served) / len(served), cached

    name, policy = load_policy(path)
    assert name == path
    _, cached = ttft_s(policy)
    if "Sticky" in path:
        assert cached > 1.1 * ttft_s(LeastLoaded())[1], "conversations find what they left"


def chosen(path: str, candidates: list[Candidate]) -> str:
    costs = load_policy(path)[1].score(RoutingRequest("m", 1600, session="acme/1"), candidates, Context(0.0, random.Random(0)))
    return candidates[min(range(len(costs)), key=costs.__getitem__)].endpoint.engine


def card(url: str, **load: float) -> Candidate:
    return Candidate(Endpoint(url), 16, 100, 100, Overlap(), Load(**load))  # type: ignore[arg-type]


def test_the_cheapest_card_is_filled_first() -> None:
    path = PATHS[1]
    assert chosen(path, [card("http://h100-0", active_requests=0), card("http://l4-0", active_requests=7)]) == "http://l4-0"
    assert chosen(path, [card("http://l4-0", active_requests=7), card("http://l4-1", active_requests=6)]) == "http://l4-1"
    assert chosen(path, [card("http://a100-0", active_requests=7), card("http://l4-0", active_requests=24)]) == "http://a100-0"
    assert chosen(path, [card("http://h100-0", active_requests=0), card("http://l4-0", active_requests=100)]) == "http://h100-0"


def test_a_session_stays_until_its_engine_is_behind() -> None:
    path = PATHS[2]

    def stays(queued: int) -> bool:
        home = Candidate(
            Endpoint("http://home"), 16, 100, 20, Overlap(80, in_flight=80), Load(active_prefill_tokens=queued, s_per_token=1e-4)
        )
        return chosen(path, [home, card("http://other", s_per_token=1e-4)]) == "http://home"

    assert stays(4000)
    assert not stays(6000)
