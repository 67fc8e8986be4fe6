"""What must never be shown? Values under a secret's name, and credentials inside text.

Used by logs and by `--check-config`; anything that prints what it was given goes through here.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import cast

import msgspec

MASK = "***"

NAMES = frozenset({"authorization", "proxy_authorization", "api_key", "x_api_key", "token", "password", "secret", "cookie", "set_cookie"})
SUFFIXES = ("_api_key", "_password", "_secret", "_auth_token", "_access_token")

CREDENTIALS = re.compile(
    r"(?P<before>[a-z][a-z0-9+.-]*://)[^\s/@\"']+(?P<after>@)"  # scheme://user:password@
    r"|(?P<scheme>\b(?:bearer|basic)\s+)[A-Za-z0-9._~+/=-]{4,}"  # an Authorization header's value
    r"|(?P<key>\b(?:api[-_]?key|password|secret|(?:access|auth)[-_]token)[\"']?\s*[=:]\s*)"  # a line, a query, a repr
    r"(?!(?:has no effect|the value is not allowed)\b)[^\s,;&()]+",  # but for what our own complaints say of a setting
    re.IGNORECASE,
)


NUMBERS = frozenset({int, float, bool})


@functools.lru_cache(maxsize=1024)
def is_secret(name: str) -> bool:
    """Whether what goes by this name is never shown: a header, a field, a key; case and dashes do not matter."""
    name = name.lower().replace("-", "_")
    return name in NAMES or name.endswith(SUFFIXES)


def redact_text(text: str) -> str:
    """`text` with credentials in it masked."""
    if not _suspicious(text.casefold()):
        return text
    return CREDENTIALS.sub(lambda found: f"{found['before'] or found['scheme'] or found['key']}{MASK}{found['after'] or ''}", text)


def _suspicious(text: str) -> bool:
    """Of every text that `CREDENTIALS` would change, and of few others: nearly all log fields pass at the cost of this search.

    (The case is to be folded: the expression also takes a long s for one.)
    """
    return "@" in text or "bearer" in text or "basic" in text or "key" in text or "password" in text or "secret" in text or "token" in text


def redact(value: object) -> object:
    """`value` as plain JSON-like values, whatever is secret in it masked, at any depth."""
    match value:
        case None | bool() | int() | float():
            return value
        case str():
            return redact_text(value)
        case bytes() | bytearray():
            return redact_text(value.decode("utf-8", "replace"))
        case (str() | bytes() as name, _) if is_secret(name if isinstance(name, str) else name.decode("latin-1")):
            return [redact(name), MASK]  # a header, as lists of them hold it
        case Mapping():
            return redact_fields(value)
        case msgspec.Struct():
            return redact_fields({name: getattr(value, name) for name in value.__struct_fields__})
        case list() | tuple() | set() | frozenset():
            return [redact(item) for item in value]
        case _:
            return redact_text(str(value))


def redact_fields(fields: Mapping[object, object] | Mapping[str, object]) -> dict[str, object]:
    """`redact` for what has names: a value under a secret's name is masked whole."""
    shown: dict[str, object] = {}
    for key, item in fields.items():
        name, kind = str(key), type(item)
        if item is None:
            shown[name] = item
        elif is_secret(name):
            shown[name] = MASK
        elif kind is str:
            shown[name] = redact_text(cast("str", item))
        else:
            shown[name] = item if kind in NUMBERS else redact(item)
    return shown
