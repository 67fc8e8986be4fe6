"""Which members may be chosen, and what is held against the others."""

import doctest

import pytest

from engines.types import EngineInfo, EngineKind, EngineSpec, Model
from router import fleet as module
from router.fleet import Fleet, Member
from router.scheduling.types import Rejection

NOW = 1000.0
BOTH = frozenset(EngineKind)


def info(name: str, *models: str, kind: EngineKind = EngineKind.VLLM, ranks: tuple[int, ...] = (0,)) -> EngineInfo:
    url = f"http://{name}:8000"
    return EngineInfo(url, EngineSpec(url), kind, "1", tuple(Model(model) for model in models or ("m",)), ranks)


def fleet_of(*infos: EngineInfo) -> Fleet:
    fleet = Fleet()
    for each in infos:
        fleet.add(each)
        fleet.serve(each.id)
    return fleet


def put(member: Member, state: str) -> None:
    match state:
        case "ejected":
            member.suspected = True
        case "cooling":
            member.refused(NOW, 5.0, in_flight=3)
        case "draining":
            member.draining = True
        case "asleep":
            member.asleep = True
        case _:
            assert state == "fine"


def test_the_example_in_its_text_is_true() -> None:
    results = doctest.testmod(module)
    assert (results.attempted, results.failed) == (4, 0)


@pytest.mark.parametrize(
    ("states", "tried", "eligible"),
    [
        (["fine", "fine"], "", "ab"),
        (["fine", "fine"], "a", "b"),
        (["fine", "ejected"], "", "a"),
        (["fine", "cooling"], "", "a"),
        (["fine", "draining"], "", "a"),
        (["fine", "asleep"], "a", ""),
        (["ejected", "ejected"], "", "ab"),
        (["ejected", "ejected"], "a", "b"),
        (["ejected", "draining"], "", "a"),
        (["ejected", "cooling"], "", ""),
        (["cooling", "cooling"], "", ""),
        (["draining", "draining"], "", ""),
    ],
)
def test_suspected_engines_are_tried_only_when_none_is_left_that_is_fine_or_asks_for_a_pause(
    states: list[str], tried: str, eligible: str
) -> None:
    fleet = fleet_of(info("a"), info("b"))
    members = fleet.of_model("m")
    for member, state in zip(members, states, strict=True):
        put(member, state)
    able, rejected = fleet.eligible(members, {f"http://{name}:8000" for name in tried}, NOW)
    assert [member.info.id for member in able] == [f"http://{name}:8000" for name in eligible]
    assert {endpoint.engine for endpoint, _ in rejected} == {member.info.id for member in members} - {member.info.id for member in able}


def test_every_rank_of_a_rejected_engine_is_rejected() -> None:
    fleet = fleet_of(info("a", ranks=(0, 1, 2)), info("b"))
    put(fleet.of_model("m")[0], "cooling")
    _, rejected = fleet.eligible(fleet.of_model("m"), set(), NOW)
    assert [(endpoint.rank, reason) for endpoint, reason in rejected] == [(rank, Rejection.COOLING) for rank in range(3)]


def test_an_engine_has_all_its_room_until_it_says_that_it_is_full() -> None:
    member = fleet_of(info("a")).of_model("m")[0]
    assert [member.room(now, 64) for now in (0.0, NOW, 1e9)] == [64, 64, 64]


def test_the_lowest_count_at_which_it_was_full_within_one_pause_is_what_it_begins_with() -> None:
    member = fleet_of(info("a")).of_model("m")[0]
    for in_flight in (40, 39, 20, 21):
        member.refused(NOW, 5.0, in_flight)
    assert member.room(NOW + 5.0, 1000) == 20
    member.refused(NOW + 6.0, 5.0, 60)
    assert member.room(NOW + 11.0, 1000) == 60


def test_an_engine_that_was_full_with_nothing_in_flight_begins_with_one() -> None:
    member = fleet_of(info("a")).of_model("m")[0]
    member.refused(NOW, 5.0, 0)
    assert [member.room(NOW + 5.0 + s, 1000) for s in (0.0, 0.4, 0.5, 1.0, 3.0, 60.0)] == [1, 1, 2, 4, 64, 1000]


def test_a_shorter_pause_does_not_cut_a_longer_one_short() -> None:
    member = fleet_of(info("a")).of_model("m")[0]
    member.refused(NOW, 30.0, 1)
    member.refused(NOW + 1.0, 1.0, 1)
    assert member.rejection(NOW + 29.0) is Rejection.COOLING
    assert member.rejection(NOW + 30.0) is None


def test_models_whose_engines_have_left_are_remembered_until_they_come_back_or_are_forgotten() -> None:
    fleet = fleet_of(info("a", "m", "n"), info("b", "n"))
    fleet.remove("http://a:8000")
    assert fleet.lost_models() == {"m"}
    fleet.remove("http://b:8000")
    assert fleet.lost_models() == {"m", "n"}
    fleet.add(info("a", "other"))
    assert fleet.lost_models() == {"n"}, "what is at its URL now is another"
    fleet.forget("http://b:8000")
    assert fleet.lost_models() == set()


def test_engines_that_come_once_and_leave_do_not_pile_up() -> None:
    fleet = Fleet()
    for number in range(2 * module.MAX_LOST):
        fleet.add(info(f"engine{number}", f"model{number}"))
        fleet.remove(f"http://engine{number}:8000")
    assert len(fleet.lost_models()) == module.MAX_LOST


def test_engines_of_the_wrong_kind_are_not_able() -> None:
    fleet = fleet_of(info("a"), info("b", kind=EngineKind.SGLANG))
    assert [member.info.id for member in fleet.able("m", frozenset({EngineKind.SGLANG}))] == ["http://b:8000"]
    assert len(fleet.able("m", BOTH)) == 2
    assert fleet.able("unknown", BOTH) == []
