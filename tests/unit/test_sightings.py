"""What sources say, laid together."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from discovery.sources.found import Found
from discovery.sources.sightings import Change, Follow, Release, Sightings
from engines.types import EngineSpec, Role

A, B, C = (EngineSpec(f"http://{name}:8000") for name in "abc")


def sightings() -> Sightings:
    return Sightings(["docker", "file"], fixed={"http://named:8000"})


def test_what_several_sources_know_is_followed_once_and_let_go_when_none_does() -> None:
    seen = sightings()
    assert seen.found("docker", Found((A, B))) == [Follow(A, "docker"), Follow(B, "docker")]
    assert seen.found("file", Found((B, C))) == [Follow(C, "file")]
    assert seen.found("docker", Found((A,))) == []
    assert seen.found("docker", Found(())) == [Release(A.url)]
    assert seen.found("file", Found((C,))) == [Release(B.url)]


def test_the_same_list_again_changes_nothing() -> None:
    seen = sightings()
    seen.found("docker", Found((A, B)))
    assert seen.found("docker", Found((B, A))) == []


def test_a_source_that_fails_keeps_what_it_said() -> None:
    seen = sightings()
    seen.found("docker", Found((A,)))
    seen.failed("docker", "no answer")
    assert seen.found("file", Found((B,))) == [Follow(B, "file")]
    assert (seen.states["docker"].engines, seen.states["docker"].failure) == ((A.url,), "no answer")
    assert seen.found("docker", Found((A,))) == []
    assert seen.states["docker"].failure == ""


def test_other_words_for_an_engine_are_told_and_those_of_the_first_source_count() -> None:
    seen = sightings()
    prefill = EngineSpec(A.url, role=Role.PREFILL)
    seen.found("file", Found((A,)))
    assert seen.found("docker", Found((prefill,))) == [Follow(prefill, "docker")]
    assert seen.found("docker", Found(())) == [Follow(A, "file")]


def test_an_engine_that_is_named_is_no_sources_to_change() -> None:
    seen = sightings()
    assert seen.found("docker", Found((EngineSpec("http://named:8000", role=Role.PREFILL),))) == []
    assert seen.found("docker", Found(())) == []


def test_it_is_complete_when_each_has_been_heard_or_has_failed() -> None:
    seen = sightings()
    seen.found("docker", Found(()))
    assert not seen.complete
    seen.failed("file", "not there")
    assert seen.complete


@given(st.lists(st.tuples(st.sampled_from(["docker", "file"]), st.frozensets(st.sampled_from("abcde")), st.booleans()), max_size=20))
def test_whatever_is_said_the_changes_lead_to_what_is_known_last(said: list[tuple[str, frozenset[str], bool]]) -> None:
    seen = sightings()
    followed: set[str] = set()
    last: dict[str, frozenset[str]] = {}
    for source, names, fails in said:
        if fails:
            seen.failed(source, "why")
            continue
        last[source] = names
        changes: list[Change] = seen.found(source, Found(tuple(EngineSpec(name) for name in sorted(names))))
        for change in changes:
            match change:
                case Follow():
                    assert change.spec.url not in followed
                    followed.add(change.spec.url)
                case Release():
                    followed.remove(change.engine)
        assert followed == frozenset[str]().union(*last.values())
