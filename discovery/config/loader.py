"""What is in force, and who said so?

Four layers, each over the one before, for every option alike:

    defaults  <  TOML file (--config FILE, or COMMUTATOR_CONFIG)  <  environment  <  flags

A list given in one layer replaces the list of the layer below. In TOML it is a list; as a flag it is repeated; in a variable its
items are divided by `;`, because engines are written with commas. Nothing is guessed: what is not an option is an error that
names it, and a value that is not allowed is an error that names its source. All complaints come at once.
"""

from __future__ import annotations

import math
import re
import tomllib
import typing
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Generic, Protocol, TypeVar, runtime_checkable

import msgspec

from discovery.config.errors import Complaint, ConfigError, nearest
from discovery.config.options import PREFIX, Option, allowed, alternatives, options
from discovery.config.specs import build_engine_spec, parse_engine_spec
from discovery.redact import redact_text
from engines.types import EngineSpec

CONFIG_FLAG, CONFIG_VARIABLE, CHECK_FLAG = "--config", f"{PREFIX}CONFIG", "--check-config"
LIST_SEPARATOR = ";"

SERVICE_LINK = re.compile(rf"{PREFIX}(\w+_)?(SERVICE_(HOST|PORT(_\w+)?)|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)")
"""Kubernetes sets these in every pod beside a Service whose name begins with `commutator`; and `…_PORT`, which is told by its value."""

S = TypeVar("S", bound=msgspec.Struct)


@runtime_checkable
class Checked(Protocol):
    """A settings Struct that knows what is wrong in combination."""

    def check(self, given: frozenset[str]) -> Iterator[Complaint]:
        """Complaints; `given` holds the keys that somebody set."""
        ...


class Loaded(msgspec.Struct, Generic[S], frozen=True):
    """Settings, and for each key that is not a default, who set it."""

    settings: S
    sources: dict[str, str]
    check_only: bool
    """`--check-config` was among the flags."""


class _Given(msgspec.Struct, frozen=True):
    """A value as one layer gives it, before it is checked."""

    value: object
    source: str
    strict: bool
    """From TOML, which has types of its own; everything else is text."""


def load(
    settings: type[S],
    *,
    argv: Sequence[str],
    environ: Mapping[str, str],
    read_file: Callable[[str], str],
    known_variables: Collection[str] = (),
) -> Loaded[S]:
    """The settings in force. `known_variables` begin with our prefix and belong to somebody else. Raises `ConfigError`."""
    known = options(settings)
    flags, config_file, check_only, problems = _read_flags(known, argv)
    config_file = config_file or environ.get(CONFIG_VARIABLE)
    layers: dict[str, _Given] = {}
    if config_file:
        layers |= _read_toml(known, config_file, read_file, problems)
    layers |= _read_environment(known, environ, known_variables, problems)
    layers |= flags
    values = {option.key: _value(option, layers[option.key], problems) for option in known if option.key in layers}
    if problems:
        raise ConfigError(redact_text("\n".join(problems)))
    loaded = _build(settings, values, ())
    sources = {key: given.source for key, given in layers.items()}
    problems = [
        f"{sources.get(complaint.key, complaint.key)}: {complaint.message}" for complaint in _complaints(loaded, frozenset(sources))
    ]
    if problems:
        raise ConfigError(redact_text("\n".join(problems)))
    return Loaded(loaded, sources, check_only)


def _complaints(loaded: object, given: frozenset[str]) -> Iterator[Complaint]:
    if isinstance(loaded, Checked):
        yield from loaded.check(given)


# ---------------------------------------------------------------------------------------------------------------- layers


def _read_flags(known: Sequence[Option], argv: Sequence[str]) -> tuple[dict[str, _Given], str | None, bool, list[str]]:
    """What the flags give, the file and the check they ask for, and what is wrong with them."""
    by_flag = {option.flag: option for option in known}
    negated = {option.negated_flag: option for option in known if option.negated_flag}
    given: dict[str, _Given] = {}
    items: defaultdict[str, list[str]] = defaultdict(list)
    config_file, check_only, problems = None, False, list[str]()
    rest = list(argv)
    while rest:
        argument = rest.pop(0)
        flag, equals, value = argument.partition("=")
        if flag == CHECK_FLAG and not equals:
            check_only = True
        elif flag in by_flag and by_flag[flag].is_switch and not equals:
            given[by_flag[flag].key] = _Given("true", flag, strict=False)
        elif flag in negated and not equals:
            given[negated[flag].key] = _Given("false", flag, strict=False)
        elif flag in by_flag or flag == CONFIG_FLAG:
            if not equals and (not rest or rest[0].startswith("--")):
                problems.append(f"{flag}: a value is needed" + (f": {allowed(by_flag[flag].type)}" if flag in by_flag else ""))
                continue
            value = value if equals else rest.pop(0)
            if flag == CONFIG_FLAG:
                config_file = value
            elif by_flag[flag].item_type is None:
                given[by_flag[flag].key] = _Given(value, flag, strict=False)
            else:
                items[by_flag[flag].key].append(value)
                given[by_flag[flag].key] = _Given(items[by_flag[flag].key], flag, strict=False)
        elif flag.startswith("-"):
            problems.append(f"unknown option {flag}" + nearest(flag, [*by_flag, *negated, CONFIG_FLAG, CHECK_FLAG]))
        else:
            _read_unnamed(known, argument, given, problems)
    return given, config_file, check_only, problems


def _read_unnamed(known: Sequence[Option], argument: str, given: dict[str, _Given], problems: list[str]) -> None:
    """The one argument that has no name, where the command takes one."""
    option = next((option for option in known if option.positional), None)
    if option is not None and option.key not in given:
        given[option.key] = _Given(argument, option.path[-1].upper(), strict=False)
    else:
        problems.append(f"unexpected argument {argument!r}: every {'other ' if option else ''}option has a name, --NAME VALUE")


def _read_environment(
    known: Sequence[Option], environ: Mapping[str, str], known_variables: Collection[str], problems: list[str]
) -> dict[str, _Given]:
    by_variable = {option.variable: option for option in known}
    given: dict[str, _Given] = {}
    for name, text in environ.items():
        if not name.startswith(PREFIX) or name == CONFIG_VARIABLE or _is_service_link(name, text):
            continue
        if option := by_variable.get(name):
            items = [item.strip() for item in text.split(LIST_SEPARATOR) if item.strip()]
            given[option.key] = _Given(text if option.item_type is None else items, name, strict=False)
        elif name not in known_variables:
            problems.append(f"unknown variable {name}" + nearest(name, by_variable))
    return given


def _is_service_link(name: str, text: str) -> bool:
    return SERVICE_LINK.fullmatch(name) is not None or (name.endswith("_PORT") and text.startswith(("tcp://", "udp://", "sctp://")))


def _read_toml(known: Sequence[Option], file: str, read_file: Callable[[str], str], problems: list[str]) -> dict[str, _Given]:
    try:
        table = tomllib.loads(read_file(file))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"{CONFIG_FLAG} {file}: cannot be read: {reason}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{CONFIG_FLAG} {file}: not TOML: {error}") from None
    by_key = {option.key: option for option in known}
    given: dict[str, _Given] = {}
    for key, value in _flatten(table, {option.path[:-1] for option in known}, ()):
        if key in by_key:
            given[key] = _Given(value, f"{file}: {key}", strict=True)
        else:
            problems.append(f"{file}: unknown key {key}" + nearest(key, by_key))
    return given


def _flatten(table: Mapping[str, object], sections: set[tuple[str, ...]], path: tuple[str, ...]) -> Iterator[tuple[str, object]]:
    """Leaves by dotted key; a table is entered when some option lies in it, and is a value otherwise."""
    for name, value in table.items():
        here = (*path, name)
        if isinstance(value, dict) and here in sections:
            yield from _flatten(value, sections, here)
        else:
            yield ".".join(here), value


# ---------------------------------------------------------------------------------------------------------------- values


def _value(option: Option, given: _Given, problems: list[str]) -> object:
    """The value as the Struct wants it; what is wrong goes to `problems`."""
    raw = given.value
    try:
        if option.item_type is EngineSpec:
            raw = [_engine(item) for item in raw] if isinstance(raw, list) else raw
        elif not given.strict:
            raw = _tables(option, raw)
        return _finite(msgspec.convert(raw, option.type, strict=given.strict))
    except ConfigError as error:
        problems.append(f"{given.source}: {error}")
    except (msgspec.ValidationError, ValueError):
        if found := list(_faults(option, raw, strict=given.strict)):
            problems.extend(f"{given.source}: {fault}" for fault in found)
            return None
        shown = "the value" if option.secret else _shown(given.value)
        problems.append(f"{given.source}: {shown} is not allowed; allowed is {allowed(option.type)}")
    return None


def _tables(option: Option, raw: object) -> object:
    """Text that stands for a table is JSON."""
    if isinstance(raw, list) and isinstance(option.item_type, type) and issubclass(option.item_type, msgspec.Struct):
        return [msgspec.json.decode(item) for item in raw]
    if isinstance(raw, str) and any(typing.get_origin(alternative) is dict for alternative in alternatives(option.type)):
        return msgspec.json.decode(raw)
    return raw


def _faults(option: Option, raw: object, *, strict: bool) -> Iterator[str]:
    """What is wrong with the tables of a list, each by its keys. What is in them is not shown: an environment may hold secrets."""
    if not (isinstance(raw, list) and isinstance(option.item_type, type) and issubclass(option.item_type, msgspec.Struct)):
        return
    fields = {field.encode_name: field for field in msgspec.structs.fields(option.item_type)}
    for number, table in enumerate(raw, 1):
        if not isinstance(table, dict):
            continue
        where = f"table {number}: "
        yield from (f"{where}unknown key {key!r}{nearest(key, fields)}" for key in table if key not in fields)
        yield from (f"{where}`{name}` is missing" for name, field in fields.items() if field.required and name not in table)
        for name, field in fields.items():
            try:
                msgspec.convert(table[name], field.type, strict=strict)
            except KeyError:
                continue
            except msgspec.ValidationError:
                yield f"{where}{name}: the value is not allowed; allowed is {allowed(field.type)}"


def _finite(value: object) -> object:
    """The value, unless no bound could hold it: `nan` is not less than anything."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(value)
    return value


def _engine(item: object) -> EngineSpec:
    match item:
        case str():
            return parse_engine_spec(item)
        case dict():
            return build_engine_spec(item, strict=True)
        case _:
            raise ConfigError(f"{_shown(item)} is neither a line nor a table that describes an engine")


def _shown(value: object) -> str:
    return repr(value) if isinstance(value, str) else str(value).lower() if isinstance(value, bool) else str(value)


def _build(settings: type[S], values: Mapping[str, object], path: tuple[str, ...]) -> S:
    """An instance from flat values; what is not given keeps its default."""
    fields: dict[str, object] = {}
    for field in msgspec.structs.fields(settings):
        here = (*path, field.name)
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            fields[field.name] = _build(field.type, values, here)
        elif (key := ".".join(here)) in values:
            fields[field.name] = values[key]
    return settings(**fields)
