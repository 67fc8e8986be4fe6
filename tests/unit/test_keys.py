"""Keys as they are written and as they are given."""

from __future__ import annotations

import pytest

from router.keys import CLIENTS_WANTED, OPEN_PATHS, ApiKey, BadKeys, Door, KeyRing, read_keys, read_token


def test_a_line_is_a_key_or_a_name_and_a_key() -> None:
    lines = ["# who may ask", "", "alice:sk-1", "  bob@example.org:sk-2  ", "sk-3", "alice:sk-4", "sk-a:b:c"]
    assert read_keys(lines) == (
        ApiKey("alice", "sk-1"),
        ApiKey("bob@example.org", "sk-2"),
        ApiKey("key-5", "sk-3"),
        ApiKey("alice", "sk-4"),
        ApiKey("sk-a", "b:c"),
    )


@pytest.mark.parametrize("line", ["alice:", ":sk-canary", "two canary", "sk-cänary", "alice :sk-canary", "sk-canary\x07"])
def test_what_is_no_key_is_named_by_its_place_and_never_shown(line: str) -> None:
    with pytest.raises(BadKeys) as raised:
        read_keys(["sk-1", line])
    assert "line 2" in str(raised.value)
    assert "nary" not in str(raised.value)


def test_a_key_given_twice_is_refused_whatever_its_names() -> None:
    with pytest.raises(BadKeys, match="item 2 repeats"):
        read_keys(["alice:sk-1", "bob:sk-1"], "item")


@pytest.mark.parametrize(
    ("headers", "name"),
    [
        ([(b"authorization", b"Bearer sk-1")], "alice"),
        ([(b"authorization", b"bearer  sk-1 ")], "alice"),
        ([(b"x-api-key", b"sk-2")], "bob"),
        ([(b"authorization", b"Basic c2stMQ=="), (b"x-api-key", b"sk-2")], "bob"),
        ([], None),
        ([(b"authorization", b"sk-1")], None),
        ([(b"authorization", b"Bearer ")], None),
        ([(b"authorization", b"Bearer sk-")], None),
        ([(b"authorization", b"Bearer sk-11")], None),
        ([(b"authorization", b"Bearer SK-1")], None),
        ([(b"x-api-key", b"")], None),
        ([(b"x-api-key", b"Bearer sk-2")], None),
        ([(b"x-other", b"sk-1")], None),
        ([(b"authorization", b"Bearer wrong"), (b"x-api-key", b"sk-2")], "bob"),
        ([(b"x-api-key", b"wrong"), (b"authorization", b"Bearer sk-1")], "alice"),
        ([(b"x-api-key", b"sk-2"), (b"authorization", b"Bearer sk-1")], "alice"),
        ([(b"x-api-key", b"wrong"), (b"x-api-key", b"sk-2")], None),
    ],
)
def test_a_request_is_its_keys_holders(headers: list[tuple[bytes, bytes]], name: str | None) -> None:
    assert KeyRing(read_keys(["alice:sk-1", "bob:sk-2"])).holder(headers) == name


def test_keys_of_one_name_are_one_client_and_a_ring_without_keys_lets_nobody_in() -> None:
    ring = KeyRing(read_keys(["alice:old", "alice:new"]))
    assert [ring.holder([(b"x-api-key", key)]) for key in (b"old", b"new")] == ["alice", "alice"]
    ring.replace(read_keys(["alice:new"]))
    assert [ring.holder([(b"x-api-key", key)]) for key in (b"old", b"new")] == [None, "alice"]
    ring.replace(())
    assert ring.holder([(b"x-api-key", b"new")]) is None
    assert len(ring) == 0


def test_a_ring_does_not_keep_the_keys() -> None:
    ring = KeyRing([ApiKey("alice", "sk-canary")])
    assert "canary" not in repr(vars(ring))


def test_the_door_lets_whoever_watches_the_router_in_without_a_key_and_nobody_else() -> None:
    door = Door(KeyRing([ApiKey("alice", "sk-1")]), CLIENTS_WANTED, OPEN_PATHS)
    key = [(b"x-api-key", b"sk-1")]
    for path in (b"/health", b"/ready", b"/metrics"):
        assert (door.admit(path, []), door.admit(path, [(b"x-api-key", b"wrong")]), door.admit(path, key)) == ("", "", "alice")
    for path in (b"/v1/models", b"/v1/chat/completions", b"/route", b"/health/", b"//health", b"/nowhere", b""):
        assert (door.admit(path, []), door.admit(path, key)) == (None, "alice")


def test_a_token_file_holds_one_long_word() -> None:
    assert read_token("\n 0123456789abcdef \n") == "0123456789abcdef"
    for text in ("", "short", "0123456789 abcdef", "0123456789abcdef\nsecond-token-here", "0123456789abcdeé"):
        with pytest.raises(BadKeys) as raised:
            read_token(text)
        assert not text.strip() or text.strip() not in str(raised.value)
