"""Membership: announcements and leases in, changes out."""

import msgspec
import pytest

from discovery.registry import Changed, Joined, Left, Registry
from discovery.sources.static import static_specs
from engines.types import EngineInfo, EngineKind, EngineSpec, Model, Role

SPEC = EngineSpec("http://h:8000")
TINY = Model("tiny", root="/m/tiny", card=msgspec.Raw(b'{"id":"tiny","created":1}'))
ADAPTER = Model("ad1", root="/lora/ad1", parent="tiny")
A = EngineInfo(id=SPEC.url, spec=SPEC, kind=EngineKind.VLLM, version="0.32.0", models=(TINY,), block_size=16, boot=100.0)


def with_(**changes: object) -> EngineInfo:
    return msgspec.structs.replace(A, **changes)


def test_an_engine_joins_once() -> None:
    registry = Registry()
    assert registry.announce(A, 0.0) == Joined(A)
    assert registry.announce(A, 1.0) is None
    assert registry.members == (A,)
    assert A.id in registry
    assert len(registry) == 1


def test_an_engine_leaves_once_with_a_reason() -> None:
    registry = Registry()
    registry.announce(A, 0.0)
    assert registry.leave(A.id, "gone") == Left(A, "gone")
    assert registry.leave(A.id, "gone") is None
    assert registry.members == ()
    assert registry.announce(A, 1.0) == Joined(A)


def test_H9_what_is_announced_last_at_a_url_replaces_what_was_there() -> None:
    registry = Registry()
    registry.announce(A, 0.0)
    other = with_(models=(Model("other"),), spec=EngineSpec(SPEC.url, role=Role.PREFILL))
    change = registry.announce(other, 1.0)
    assert change == Changed(A, other)
    assert registry.members == (other,)
    assert registry.get(A.id) == other


@pytest.mark.parametrize(
    ("new", "same"),
    [
        (with_(models=(TINY, ADAPTER)), True),
        (with_(models=(msgspec.structs.replace(TINY, card=msgspec.Raw(b'{"id":"tiny","created":2}')),)), True),
        (with_(boot=200.0), False),
        (with_(models=(Model("other"),)), False),
        (with_(spec=EngineSpec(SPEC.url, role=Role.DECODE)), False),
        (with_(block_size=32), False),
        (with_(ranks=(0, 1)), False),
        (with_(kind=EngineKind.SGLANG), False),
    ],
)
def test_only_adapters_may_change_within_one_life(new: EngineInfo, same: bool) -> None:
    assert Changed(A, new).same_life is same
    assert Changed(new, A).same_life is same


def test_a_lease_ends_at_its_time_unless_renewed() -> None:
    registry = Registry()
    registry.announce(A, 0.0, lease_s=10.0)
    assert registry.expire(9.9) == []
    registry.announce(A, 9.0, lease_s=10.0)
    assert registry.expire(10.0) == []
    (left,) = registry.expire(19.0)
    assert left.info == A
    assert registry.members == ()
    assert registry.expire(100.0) == []


def test_a_member_without_a_lease_stays_until_it_leaves() -> None:
    registry = Registry()
    registry.announce(A, 0.0, lease_s=10.0)
    registry.announce(A, 1.0)
    assert registry.expire(1e9) == []
    assert registry.members == (A,)


def test_a_lease_of_one_that_left_does_not_end_its_next_life() -> None:
    registry = Registry()
    registry.announce(A, 0.0, lease_s=10.0)
    registry.leave(A.id, "gone")
    registry.announce(A, 5.0)
    assert registry.expire(1e9) == []


def test_specs_are_normalised_and_keep_their_order() -> None:
    specs = static_specs([EngineSpec("http://B:1/", block_size=16), EngineSpec("http://a:2")])
    assert specs == (EngineSpec("http://b:1", block_size=16), EngineSpec("http://a:2"))


@pytest.mark.parametrize("again", ["http://h:8000", "http://H:8000/"])
def test_an_engine_given_twice_is_an_error_that_names_it(again: str) -> None:
    with pytest.raises(ValueError, match=r"engine http://h:8000 is given twice"):
        static_specs([SPEC, EngineSpec(again)])
