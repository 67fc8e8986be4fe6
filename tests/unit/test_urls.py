"""Addresses: one spelling per engine, and rank r at port + r."""

import pytest

from engines.urls import at_rank, host_of, normalise, reachable, split_tcp


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://127.0.0.1:8000/", "http://127.0.0.1:8000"),
        (" HTTP://Engine-A:8000 ", "http://engine-a:8000"),
        ("http://engine", "http://engine:80"),
        ("https://engine/", "https://engine:443"),
        ("http://[::1]:8000", "http://[::1]:8000"),
    ],
)
def test_an_engine_has_one_spelling(url: str, expected: str) -> None:
    assert normalise(url) == expected
    assert normalise(normalise(url)) == expected


@pytest.mark.parametrize(
    "url", ["127.0.0.1:8000", "tcp://h:1", "http://", "http://h:8000/v1", "http://h:99999", "http://h:x", "http://h/?a=b"]
)
def test_a_url_that_names_no_engine_is_an_error_that_shows_it(url: str) -> None:
    with pytest.raises(ValueError, match="engine URL") as error:
        normalise(url)
    assert repr(url) in str(error.value)


def test_a_password_in_a_url_is_an_error_that_does_not_show_it() -> None:
    with pytest.raises(ValueError, match="api-key") as error:
        normalise("http://user:hunter2@h:8000")
    assert "hunter2" not in str(error.value)


@pytest.mark.parametrize(
    ("endpoint", "host", "expected"),
    [
        ("tcp://*:5557", "10.0.0.7", "tcp://10.0.0.7:5557"),
        ("tcp://0.0.0.0:5557", "engine", "tcp://engine:5557"),
        ("tcp://[::]:5557", "10.0.0.7", "tcp://10.0.0.7:5557"),
        ("tcp://:::5557", "10.0.0.7", "tcp://10.0.0.7:5557"),
        ("tcp://*:5557", "::1", "tcp://[::1]:5557"),
        ("tcp://10.1.1.1:5557", "10.0.0.7", "tcp://10.1.1.1:5557"),
        ("ipc:///run/kv", "10.0.0.7", "ipc:///run/kv"),
    ],
)
def test_a_wildcard_becomes_a_host_that_can_be_reached(endpoint: str, host: str, expected: str) -> None:
    assert reachable(endpoint, host) == expected


def test_rank_r_is_at_port_plus_r() -> None:
    assert [at_rank("tcp://h:5557", rank) for rank in (0, 1, 7)] == ["tcp://h:5557", "tcp://h:5558", "tcp://h:5564"]
    assert at_rank("tcp://[fd00::1]:5557", 2) == "tcp://[fd00::1]:5559"
    assert at_rank("ipc:///run/kv", 2) == "ipc:///run/kv"


def test_only_tcp_with_a_port_is_split() -> None:
    assert split_tcp("tcp://[::1]:5557") == ("::1", 5557)
    assert split_tcp("tcp://h") is None
    assert split_tcp("inproc://h:1") is None
    assert host_of("http://[::1]:8000") == "::1"
