"""How is a field of a `config.json` read? By its names, with a complaint that says which one is missing or of what value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec


class ModelConfigError(Exception):
    """The `config.json` does not tell what is asked of it; the message names the field."""


class Fields(msgspec.Struct, frozen=True):
    """Fields of a `config.json`, read with a complaint that names the field."""

    values: Mapping[str, Any]

    def __contains__(self, name: str) -> bool:
        return self.values.get(name) is not None

    def whole(self, *names: str, default: int | None = None) -> int:
        """The first of `names` that is there: a whole number above 0. Raises ModelConfigError."""
        for name in names:
            if name in self:
                return _whole(self.values[name], name)
        if default is None:
            others = f" (or {', '.join(names[1:])})" if names[1:] else ""
            raise ModelConfigError(f"the model's config has no {names[0]}{others}")
        return default

    def count(self, name: str, default: int = 0) -> int:
        """A whole number, 0 included. Raises ModelConfigError."""
        value = self.values.get(name)
        if value is None:
            return default
        return 0 if value == 0 and type(value) is int else _whole(value, name)

    def items(self, name: str, length: int | None = None) -> list[Any] | None:
        """A list, None where there is none (or an empty one); one that is too short for `length` layers is an error."""
        value = self.values.get(name)
        if value is None or value == []:
            return None
        if not isinstance(value, list):
            raise ModelConfigError(f"the model's config has {name} = {shown(value)}, expected a list")
        if length is not None and len(value) < length:
            raise ModelConfigError(f"the model's config has {length} layers, but {name} tells of {len(value)}")
        return value[:length]

    def indices(self, name: str) -> list[int]:
        """A list of whole numbers, empty where there is none."""
        items = self.items(name) or []
        if not all(type(item) is int for item in items):
            raise ModelConfigError(f"the model's config has {name} = {shown(items)}, expected whole numbers")
        return items

    def table(self, name: str) -> Fields:
        """A nested object, empty where there is none."""
        return entry(self.values.get(name))

    def text(self, name: str) -> str:
        """A string, empty where there is none."""
        value = self.values.get(name)
        return value if isinstance(value, str) else ""


def entry(value: object) -> Fields:
    """An object within a list, empty where it is none."""
    return Fields(value if isinstance(value, dict) else {})


def _whole(value: object, name: str) -> int:
    if type(value) is float and value.is_integer():
        value = int(value)
    if type(value) is not int or value < 1:
        raise ModelConfigError(f"the model's config has {name} = {shown(value)}, expected a whole number above 0")
    return value


def shown(value: object) -> str:
    """A value as a message shows it."""
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "…"
