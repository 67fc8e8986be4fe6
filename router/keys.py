"""Whose request is this? API keys, the names they go by, and their comparison.

    Authorization: Bearer sk-…   OpenAI's clients          x-api-key: sk-…   Anthropic's

A key is found by part of a keyed hash of it, and then the hash is compared whole, in constant time. So nobody can learn a key from how
long the answer takes, and ten thousand keys cost a request what one does. Keys themselves are not kept.

Keys are written one to a line, `key` or `name:key`; a key with a colon in it needs a name. Keys of one name are one client, which is how a key is replaced without a gap.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from router.exchange import Headers

OPEN_PATHS: Final = frozenset({b"/health", b"/ready", b"/metrics"})
"""Answered without a key: whoever watches the router (a load balancer, Prometheus) is no client of its models."""

CLIENTS_WANTED: Final = "an API key is needed: `Authorization: Bearer KEY` or `x-api-key: KEY`"
ADMIN_WANTED: Final = "the admin token is needed: `Authorization: Bearer TOKEN`"
SHORTEST_TOKEN: Final = 16

_NAMED: Final = re.compile(r"(?P<name>[A-Za-z0-9_.@-]{1,64}):(?P<named>[!-~]+)|(?P<nameless>[!-9;-~]+)")
_BEARER: Final = b"bearer "
_FOUND_BY: Final = 8
"""Bytes of the hash by which a key is found."""


class ApiKey(msgspec.Struct, frozen=True):
    """One key."""

    name: str
    """Whose it is; shown in logs, so never part of the key."""
    key: str


class BadKeys(ValueError):
    """What was to be a list of keys is none. The message says where, and never what was written there."""


def read_keys(lines: Iterable[str], unit: str = "line") -> tuple[ApiKey, ...]:
    """The keys, one to a line (or to whatever `unit` is); empty ones and such as begin with `#` say nothing. Raises BadKeys.

    >>> [key.name for key in read_keys(["# ours", "alice:sk-1", "sk-2"])]
    ['alice', 'key-3']
    """
    found: dict[str, ApiKey] = {}
    for number, line in enumerate(map(str.strip, lines), 1):
        if not line or line.startswith("#"):
            continue
        match = _NAMED.fullmatch(line)
        if match is None:
            raise BadKeys(f"{unit} {number} is neither `key` nor `name:key`; a key is made of visible ASCII characters")
        key = match["named"] or match["nameless"]
        if key in found:
            raise BadKeys(f"{unit} {number} repeats a key")
        found[key] = ApiKey(match["name"] or f"key-{number}", key)
    return tuple(found.values())


def read_token(text: str) -> str:
    """The token that a file holds. Raises BadKeys."""
    token = text.strip()
    if len(token) < SHORTEST_TOKEN or re.fullmatch(r"[!-~]+", token) is None:
        raise BadKeys(f"it does not hold one token of at least {SHORTEST_TOKEN} visible ASCII characters")
    return token


class KeyRing:
    """The keys that are accepted now.

    >>> ring = KeyRing([ApiKey("alice", "sk-1")])
    >>> ring.holder([(b"authorization", b"Bearer sk-1")]), ring.holder([(b"x-api-key", b"sk-1")]), ring.holder([(b"x-api-key", b"sk")])
    ('alice', 'alice', None)
    """

    def __init__(self, keys: Iterable[ApiKey]) -> None:
        self._secret = secrets.token_bytes(32)
        self._names: dict[bytes, tuple[bytes, str]] = {}
        self.replace(keys)

    def __len__(self) -> int:
        """How many keys are accepted."""
        return len(self._names)

    def replace(self, keys: Iterable[ApiKey]) -> None:
        """From now on these are the keys."""
        digests = [(self._digest(key.key.encode("latin-1")), key.name) for key in keys]
        self._names = {digest[:_FOUND_BY]: (digest, name) for digest, name in digests}

    def holder(self, headers: Headers) -> str | None:
        """The name of the key that a request carries, as a bearer token or else as `x-api-key`; None when none is accepted. O(headers)."""
        bearer = plain = None
        for name, value in headers:
            if name == b"authorization":
                if bearer is None and value[: len(_BEARER)].lower() == _BEARER:
                    bearer = value[len(_BEARER) :].strip()
            elif name == b"x-api-key" and plain is None:
                plain = value
        name_of_bearer = None if bearer is None else self._name(bearer)
        return self._name(plain) if name_of_bearer is None and plain is not None else name_of_bearer

    def _name(self, key: bytes) -> str | None:
        digest = self._digest(key)
        found = self._names.get(digest[:_FOUND_BY])
        return found[1] if found is not None and hmac.compare_digest(found[0], digest) else None

    def _digest(self, key: bytes) -> bytes:
        return hashlib.blake2b(key, digest_size=32, key=self._secret).digest()


class Door:
    """Who may come in, and where without a key."""

    def __init__(self, ring: KeyRing, wanted: str, open_paths: frozenset[bytes] = frozenset()) -> None:
        """`wanted` tells in words what somebody lacks who is not let in."""
        self.wanted = wanted
        self._ring = ring
        self._open_paths = open_paths

    def admit(self, path: bytes, headers: Headers) -> str | None:
        """The name of whoever asks; empty where nobody needs one, None for nobody who may come in."""
        name = self._ring.holder(headers)
        return "" if name is None and path in self._open_paths else name
