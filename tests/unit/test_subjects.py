from __future__ import annotations

import pytest

from discovery.subjects import Subjects, from_token, to_token
from engines.types import Endpoint

ENDPOINTS = [
    Endpoint("http://10.0.0.7:8000", 0),
    Endpoint("https://engine-1.example.com:443", 12),
    Endpoint("http://[fe80::1]:8000", 3),
    Endpoint("http://host.with*odd>chars and spaces:1", 0),
    Endpoint("http://ünïcode.例:80", 999_999_999),
]


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=str)
def test_an_endpoint_is_read_back_from_its_stream_s_subject(endpoint: Endpoint) -> None:
    assert Subjects("fleet.blue").endpoint(Subjects("fleet.blue").stream(endpoint)) == endpoint


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=str)
def test_an_endpoint_and_attempt_are_read_back_from_a_snapshot_s_subject(endpoint: Endpoint) -> None:
    subjects = Subjects("fleet")
    assert subjects.answered(subjects.reply("mirror", endpoint, 17)) == (endpoint, 17)


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=str)
def test_a_subject_has_exactly_the_tokens_its_wildcard_has_and_none_that_nats_would_read_as_one(endpoint: Endpoint) -> None:
    subjects = Subjects("fleet")
    for made, wildcard in [
        (subjects.stream(endpoint), subjects.streams),
        (subjects.reply("mirror", endpoint, 1), subjects.replies("mirror")),
    ]:
        assert len(made.split(".")) == len(wildcard.split("."))
        assert all(token.isascii() and token and not set(token) & set("*> \t\r\n") for token in made.split("."))


def test_different_endpoints_have_different_subjects() -> None:
    assert len({Subjects("fleet").stream(endpoint) for endpoint in ENDPOINTS}) == len(ENDPOINTS)


@pytest.mark.parametrize(
    "subject",
    [
        "",
        "fleet.kv",
        "fleet.kv.http.1.2",
        "fleet.kv.http",
        "other.kv.http.0",
        "fleet.snapshot.http.0",
        "fleet.kv.ht tp.0",
        "fleet.kv.=3.0",
        "fleet.kv.=3a.0",
        "fleet.kv.=FF.0",
        "fleet.kv.http.-1",
        "fleet.kv.http.01",
        "fleet.kv.http.1x",
        "fleet.kv.http.٣",
        "fleet.kv.http.99999999999999999999",
        "fleet.kv..0",
    ],
)
def test_a_subject_that_no_endpoint_gives_is_nobody_s(subject: str) -> None:
    assert Subjects("fleet").endpoint(subject) is None


@pytest.mark.parametrize("subject", ["", "a.b.c", "fleet.reply", "fleet.reply.m.http.0.x", "other.reply.m.http.0.1", "fleet.kv.http.0.1"])
def test_a_subject_that_no_snapshot_gives_is_nobody_s(subject: str) -> None:
    assert Subjects("fleet").answered(subject) is None


@pytest.mark.parametrize("token", ["=41", "a=2D", "=2d"])
def test_only_the_one_spelling_of_a_token_is_read(token: str) -> None:
    assert from_token(token) is None
    assert to_token("A") == "A"


@pytest.mark.parametrize("namespace", ["", ".", "a.", ".a", "a..b", "a b", "a.*", ">", "a.>", "ä", "a\n"])
def test_a_namespace_that_nats_would_not_take_literally_is_refused(namespace: str) -> None:
    with pytest.raises(ValueError, match="namespace"):
        Subjects(namespace)
