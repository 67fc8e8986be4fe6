"""What can be set, and what is: for `--help`, for `--check-config`, and for the generated reference."""

from __future__ import annotations

import json
import textwrap
import typing
from collections.abc import Iterator, Mapping
from itertools import groupby

import msgspec

from discovery.config.loader import CHECK_FLAG, CONFIG_FLAG, CONFIG_VARIABLE, Loaded, S
from discovery.config.options import Option, allowed, alternatives, options
from discovery.redact import MASK, is_secret, redact_text
from engines.types import EngineSpec

WIDTH = 100
EVERY_COMMAND = (
    (f"{CONFIG_FLAG} FILE", f"Read settings from a TOML file; also {CONFIG_VARIABLE}."),
    (CHECK_FLAG, "Print what is in force and where each value comes from, then exit."),
    ("--help", "Print this and exit."),
)


def help_text(command: str, settings: type[msgspec.Struct]) -> str:
    """What `commutator COMMAND --help` prints."""
    unnamed = "".join(f"{option.path[-1].upper()} " for option in options(settings) if option.positional)
    lines = [f"usage: commutator {command} {unnamed}[OPTIONS]", "", _first_line(settings), "", "options:"]
    for option in options(settings):
        value = "" if option.is_switch else " " + _placeholder(option)
        flag = option.flag if option.negated_flag is None else f"{option.flag}, {option.negated_flag}"
        lines += _entry(flag + value, f"{option.description} {_default(option)}".strip())
    for flag, description in EVERY_COMMAND:
        lines += _entry(flag, description)
    return "\n".join(lines) + "\n"


def in_force(loaded: Loaded[S]) -> str:
    """The settings as TOML that could be loaded again, secrets aside; behind each value, where it comes from."""
    sections = groupby(sorted(options(type(loaded.settings)), key=lambda option: len(option.path) > 1), key=lambda option: option.path[:-1])
    return "\n".join(line for path, members in sections for line in _section(loaded, path, list(members))) + "\n"


def _section(loaded: Loaded[S], path: tuple[str, ...], members: list[Option]) -> Iterator[str]:
    if path:
        yield f"\n[{'.'.join(path)}]"
    for option in members:
        value: object = loaded.settings
        for name in option.path:
            value = getattr(value, name)
        shown = MASK if option.secret and value != option.default else value
        source = loaded.sources.get(option.key, "default")
        yield f"# {option.path[-1]} is not set" if shown is None else f"{option.path[-1]} = {to_toml(shown)}  # {source}"


def to_toml(value: object) -> str:
    """A TOML value; a Struct becomes an inline table without what is at its default, secrets masked."""
    match value:
        case bool():
            return str(value).lower()
        case int() | float():
            return repr(value)
        case list() | tuple() if any(isinstance(item, msgspec.Struct) for item in value):
            return "[\n" + "".join(f"    {to_toml(item)},\n" for item in value) + "]"
        case list() | tuple():
            return "[" + ", ".join(to_toml(item) for item in value) + "]"
        case dict():
            return (
                "{ "
                + ", ".join(f"{json.dumps(str(name))} = {to_toml(MASK if is_secret(str(name)) else item)}" for name, item in value.items())
                + " }"
            )
        case msgspec.Struct():
            fields = msgspec.structs.fields(value)
            kept = {field.name: item for field in fields if (item := getattr(value, field.name)) != field.default}
            return "{ " + ", ".join(f"{name} = {to_toml(MASK if is_secret(name) else item)}" for name, item in kept.items()) + " }"
        case _:
            return json.dumps(redact_text(str(value)), ensure_ascii=False)  # a JSON string is a TOML basic string


def reference(commands: Mapping[str, type[msgspec.Struct]]) -> str:
    """The tables of `docs/reference/configuration.md`, one for each command."""
    return "\n".join(line for command, settings in commands.items() for line in _table(command, settings))


def _table(command: str, settings: type[msgspec.Struct]) -> Iterator[str]:
    yield f"## `commutator {command}`\n\n{_first_line(settings)}\n"
    yield "| key | flag | variable | allowed | default | |\n| --- | --- | --- | --- | --- | --- |"
    for option in options(settings):
        flag = f"`{option.flag}`" if option.negated_flag is None else f"`{option.flag}` `{option.negated_flag}`"
        cells = (f"`{option.key}`", flag, f"`{option.variable}`", allowed(option.type), _default_value(option), option.description)
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
    yield ""


def _entry(left: str, right: str) -> list[str]:
    return [
        f"  {left}",
        *textwrap.wrap(right, WIDTH, initial_indent="      ", subsequent_indent="      ", break_on_hyphens=False, break_long_words=False),
    ]


def _placeholder(option: Option) -> str:
    """What stands for the value in help: its choices, or what kind of thing it is."""
    match alternatives(option.item_type or option.type)[0]:
        case kind if typing.get_origin(kind) is typing.Literal:
            return "|".join(typing.get_args(kind))
        case kind if kind in (int, float):
            return "N"
        case kind if isinstance(kind, type) and issubclass(kind, EngineSpec):
            return "URL[,KEY=VALUE…]"
        case _:
            return option.path[-1].upper()


def _default(option: Option) -> str:
    default = _default_value(option)
    return f"[default: {default.strip('`')}]" if default else ""


def _default_value(option: Option) -> str:
    return "" if option.default in (None, (), []) else f"`{to_toml(option.default)}`"


def _first_line(settings: type[msgspec.Struct]) -> str:
    return (settings.__doc__ or "").strip().partition("\n\n")[0]
