"""Engines added, drained and removed, without any."""

from __future__ import annotations

import pytest

from engines.types import Endpoint, EngineInfo, EngineKind, EngineSpec, Model, Role
from router.fleet import Fleet
from router.load import LoadBook
from router.roster import Added, Roster, UnknownEngine
from router.scheduling.types import Rejection

URL = "http://a:8000"


class Followed:
    """A monitor without a network: what is followed joins at once."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.specs: dict[str, EngineSpec] = {}

    def spec(self, engine_id: str) -> EngineSpec | None:
        return self.specs.get(engine_id)

    def add(self, spec: EngineSpec) -> str:
        assert spec.url not in self.specs
        self.specs[spec.url] = spec
        self.join(spec.url)
        return spec.url

    def join(self, url: str) -> None:
        self.fleet.add(EngineInfo(url, self.specs[url], EngineKind.VLLM, "1", (Model("m"),)))
        self.fleet.serve(url)

    def remove(self, engine_id: str) -> None:
        del self.specs[engine_id]
        self.fleet.remove(engine_id)


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


@pytest.fixture
def followed(fleet: Fleet) -> Followed:
    return Followed(fleet)


@pytest.fixture
def load() -> LoadBook:
    return LoadBook()


@pytest.fixture
def roster(followed: Followed, fleet: Fleet, load: LoadBook) -> Roster:
    return Roster(followed, fleet, load)


def test_an_engine_that_drains_is_not_chosen_and_its_model_is_not_listed(roster: Roster, fleet: Fleet) -> None:
    assert roster.add(EngineSpec(URL)) is Added.NEW
    assert ([model.id for model in fleet.models()], fleet.takers("m")) == (["m"], 1)
    roster.drain(URL)
    assert fleet.members[URL].rejection(0.0) is Rejection.DRAINING
    assert (list(fleet.models()), fleet.takers("m")) == ([], 0)
    roster.undrain(URL)
    assert fleet.members[URL].rejection(0.0) is None
    assert fleet.takers("m") == 1


def test_draining_outlasts_a_restart_of_the_engine_but_not_its_removal(roster: Roster, fleet: Fleet, followed: Followed) -> None:
    roster.add(EngineSpec(URL))
    roster.drain(URL)
    fleet.remove(URL)
    followed.join(URL)
    assert fleet.members[URL].draining
    roster.remove(URL, now=True)
    roster.add(EngineSpec(URL))
    assert not fleet.members[URL].draining


def test_an_engine_that_is_not_there_yet_can_be_drained_and_removed(roster: Roster, fleet: Fleet, followed: Followed) -> None:
    roster.add(EngineSpec(URL))
    fleet.remove(URL)
    roster.drain(URL)
    assert fleet.is_draining(URL)
    assert roster.remove(URL, now=False)
    assert not followed.specs


def test_a_removed_engine_goes_when_its_last_request_has_ended(roster: Roster, followed: Followed, load: LoadBook) -> None:
    roster.add(EngineSpec(URL))
    with load.reserve(Endpoint(URL), [], 0):
        assert not roster.remove(URL, now=False)
        roster.sweep()
        assert (roster.is_leaving(URL), roster.in_flight(URL), list(followed.specs)) == (True, 1, [URL])
    roster.sweep()
    assert (roster.is_leaving(URL), list(followed.specs)) == (False, [])


def test_undraining_calls_a_removal_off(roster: Roster, followed: Followed, load: LoadBook) -> None:
    roster.add(EngineSpec(URL))
    with load.reserve(Endpoint(URL), [], 0):
        roster.remove(URL, now=False)
        roster.undrain(URL)
    roster.sweep()
    assert list(followed.specs) == [URL]


def test_H9_an_engine_named_again_by_other_words_replaces_what_was_there(roster: Roster, fleet: Fleet, followed: Followed) -> None:
    roster.add(EngineSpec(URL))
    before = fleet.members[URL]
    assert roster.add(EngineSpec(URL)) is Added.SAME
    assert fleet.members[URL] is before
    assert roster.add(EngineSpec(URL, role=Role.PREFILL)) is Added.REPLACED
    assert fleet.members[URL].info.spec.role is Role.PREFILL
    assert fleet.of_model("m") == [fleet.members[URL]]
    assert list(followed.specs) == [URL]


def test_naming_an_engine_that_is_being_removed_keeps_it(roster: Roster, fleet: Fleet, load: LoadBook, followed: Followed) -> None:
    roster.add(EngineSpec(URL))
    with load.reserve(Endpoint(URL), [], 0):
        roster.remove(URL, now=False)
        assert roster.add(EngineSpec(URL)) is Added.REPLACED
    roster.sweep()
    assert list(followed.specs) == [URL]
    assert not fleet.members[URL].draining


def test_what_is_not_followed_cannot_be_changed(roster: Roster) -> None:
    with pytest.raises(UnknownEngine):
        roster.drain(URL)
    with pytest.raises(UnknownEngine):
        roster.undrain(URL)
    with pytest.raises(UnknownEngine):
        roster.remove(URL, now=True)


def test_what_a_source_no_longer_finds_drains_and_goes(roster: Roster, fleet: Fleet, followed: Followed, load: LoadBook) -> None:
    roster.follow(EngineSpec(URL), "docker")
    with load.reserve(Endpoint(URL), [], 0):
        roster.release(URL)
        assert fleet.members[URL].draining
        roster.sweep()
        assert list(followed.specs) == [URL]
    roster.sweep()
    assert not followed.specs
    roster.release(URL)


def test_what_is_found_again_while_it_drains_stays_as_it_was(roster: Roster, fleet: Fleet, followed: Followed, load: LoadBook) -> None:
    roster.follow(EngineSpec(URL), "docker")
    member = fleet.members[URL]
    with load.reserve(Endpoint(URL), [], 0):
        roster.release(URL)
        roster.follow(EngineSpec(URL), "docker")
        assert fleet.members[URL] is member
        assert not member.draining
    roster.sweep()
    assert list(followed.specs) == [URL]


def test_an_operators_drain_outlasts_what_a_source_says(roster: Roster, fleet: Fleet, load: LoadBook) -> None:
    roster.follow(EngineSpec(URL), "docker")
    roster.drain(URL)
    with load.reserve(Endpoint(URL), [], 0):
        roster.release(URL)
        roster.follow(EngineSpec(URL), "docker")
    assert fleet.members[URL].draining


def test_H9_found_by_other_words_it_replaces_what_was_there(roster: Roster, fleet: Fleet) -> None:
    roster.follow(EngineSpec(URL), "docker")
    roster.follow(EngineSpec(URL, role=Role.PREFILL), "docker")
    assert fleet.members[URL].info.spec.role is Role.PREFILL
    assert fleet.of_model("m") == [fleet.members[URL]]


@pytest.mark.parametrize("found_first", [True, False])
def test_what_an_operator_has_named_is_no_sources_to_change(roster: Roster, fleet: Fleet, followed: Followed, found_first: bool) -> None:
    if found_first:
        roster.follow(EngineSpec(URL), "docker")
    roster.add(EngineSpec(URL))
    roster.follow(EngineSpec(URL, role=Role.PREFILL), "docker")
    roster.release(URL)
    assert followed.specs == {URL: EngineSpec(URL)}
    assert not fleet.members[URL].draining
