"""What is learned of pairs: which are left alone, which links are slow."""

from __future__ import annotations

import pytest

from engines.kv_bytes import KvShape
from engines.types import Endpoint, EngineInfo, EngineKind, EngineSpec, Model, Role
from router.disagg import RELEARN_S, Facts, Mode
from router.pairing import LEFT_ALONE_S, SLOWER, DisaggRules, Pairing

GB = 1e9


def end(name: str) -> Endpoint:
    return Endpoint(f"http://{name}:8000")


def pair(there: str = "p", here: str = "d") -> tuple[Endpoint, Endpoint]:
    return end(there), end(here)


def bytes_of(count: int) -> Facts:
    """A prompt of so many bytes."""
    return Facts(1000, carried=count)


def info(name: str, *, link: str | None = None) -> EngineInfo:
    spec = EngineSpec(end(name).engine, role=Role.PREFILL, link=link)
    return EngineInfo(spec.url, spec, EngineKind.VLLM, "1", (Model("m"),), role=Role.PREFILL)


def test_a_pair_that_fails_is_left_alone_twice_as_long_each_time() -> None:
    pairing, now = Pairing(DisaggRules()), 100.0
    for wait_s in (2.0, 4.0, 8.0, 16.0, 32.0, LEFT_ALONE_S[1], LEFT_ALONE_S[1]):
        pairing.failed(pair(), now)
        assert not pairing.usable(pair(), now + wait_s - 0.1)
        assert pairing.usable(pair("other"), now)
        now += wait_s
        assert pairing.usable(pair(), now)
    pairing.transferred(pair(), bytes_of(1), 0.1, now)
    pairing.failed(pair(), now)
    assert pairing.usable(pair(), now + 2.0), "a transfer that came through makes up for those that did not"


def test_a_link_slower_than_it_should_be_is_told_once_with_both_numbers() -> None:
    pairing = Pairing(DisaggRules())
    pairing.know(info("p", link="10GB/s"), None)
    assert pairing.transferred(pair(), bytes_of(int(GB)), 0.1, 0.0) is None
    told = [pairing.transferred(pair(), bytes_of(int(GB)), 5.0, 1.0) for _ in range(10)]
    (slow,) = [one for one in told if one is not None]
    assert slow.by == "its link"
    assert slow.expected_s == pytest.approx(0.1)
    assert "10,000 MB/s" in str(slow)
    assert pair() in pairing.slow
    for _ in range(100):
        pairing.transferred(pair(), bytes_of(int(GB)), 0.1, 2.0)
    assert not pairing.slow
    assert dict(pairing.throughputs())[pair()] == pytest.approx(10 * GB, rel=0.5)


def test_small_transfers_say_nothing_of_a_link() -> None:
    """A first token takes its time whatever the link."""
    pairing = Pairing(DisaggRules())
    pairing.know(info("p", link="10GB/s"), None)
    assert [pairing.transferred(pair(), bytes_of(1_000_000), 0.15, 0.0) for _ in range(10)] == [None] * 10


@pytest.mark.parametrize("peers", [2, 3])
def test_a_pair_is_held_against_its_peers_where_there_are_enough(peers: int) -> None:
    pairing = Pairing(DisaggRules())
    for number in range(peers):
        for _ in range(5):
            assert pairing.transferred(pair(f"p{number}"), bytes_of(int(GB)), 0.1, 0.0) is None
    told = [pairing.transferred(pair("slow"), bytes_of(int(GB)), 0.1 * SLOWER + 0.3, 0.0) for _ in range(3)]
    assert any(told) is (peers == 3)


def test_measured_leaves_a_slow_pair_out_and_tries_it_again() -> None:
    for mode in (Mode.MEASURED, Mode.ALWAYS):
        pairing = Pairing(DisaggRules(mode))
        pairing.know(info("p", link="10GB/s"), None)
        pairing.transferred(pair(), bytes_of(int(GB)), 5.0, 100.0)
        assert pairing.usable(pair(), 101.0) is (mode is Mode.ALWAYS)
        assert pairing.usable(pair(), 100.0 + RELEARN_S)


def test_bytes_are_the_models() -> None:
    pairing = Pairing(DisaggRules())
    assert pairing.carried("m", 1000) == 0
    pairing.know(info("p"), KvShape(bytes_per_token=28_672))
    assert pairing.carried("m", 1000) == 28_672_000


def test_nothing_is_kept_of_an_engine_that_has_left() -> None:
    pairing = Pairing(DisaggRules(Mode.MEASURED))
    pairing.know(info("p", link="10GB/s"), None)
    pairing.transferred(pair(), bytes_of(int(GB)), 5.0, 0.0)
    pairing.failed(pair(), 0.0)
    pairing.forget(end("p"))
    assert (pairing.slow, list(pairing.throughputs())) == ({}, [])
    assert pairing.usable(pair(), 0.0)


def test_an_engine_that_only_decodes_is_never_asked_whether_it_pays() -> None:
    pairing = Pairing(DisaggRules(Mode.NEVER))
    assert pairing.split(Facts(10), pair(), 0.0, must=True).remote
    assert not pairing.split(Facts(10), pair(), 0.0, must=False).remote
