"""How is an engine written in one line?

    http://h:8000,kv-events=tcp://h:5557,kv-replay=tcp://h:5558,role=prefill,block-size=16,tokenizer=/models/m,api-key=…
    └── URL ────┘ └── what the engine cannot or should not be asked; keys are `EngineSpec`'s fields ───────────────────┘

The same keys, with underscores, make a table in TOML; values with a comma can only be written there.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from discovery.config.errors import ConfigError, nearest
from engines.links import UnknownLink, parse_link
from engines.types import Connector, EngineSpec, Role
from engines.urls import normalise

_CHOICES = {"role": tuple(Role), "connector": tuple(Connector)}
KEYS = tuple(field.name for field in msgspec.structs.fields(EngineSpec))


def parse_engine_spec(text: str) -> EngineSpec:
    """The engine that `text` names. Raises `ConfigError` saying which part is wrong."""
    url, *parts = (part.strip() for part in text.split(","))
    if "=" in url and "://" not in url.partition("=")[0]:
        raise ConfigError(f"{text!r}: the URL comes first, then key=value parts")
    table: dict[str, object] = {"url": url}
    for part in parts:
        name, equals, value = part.partition("=")
        key = name.strip().replace("-", "_")
        if not equals:
            raise ConfigError(f"{part!r}: expected key=value; a second engine is a second item")
        if key in table:
            raise ConfigError(f"{name.strip()!r} is given twice")
        table[key] = value.strip()
    return build_engine_spec(table, strict=False)


def build_engine_spec(table: Mapping[str, object], *, strict: bool) -> EngineSpec:
    """The engine that a TOML table (`strict`) or the parts of a line describe. Raises `ConfigError`."""
    for key in table:
        if key not in KEYS:
            written = key if strict else key.replace("_", "-")
            raise ConfigError(f"unknown key {written!r}" + nearest(written, KEYS if strict else [name.replace("_", "-") for name in KEYS]))
    try:
        spec = msgspec.convert(table, EngineSpec, strict=strict)
    except msgspec.ValidationError as error:
        raise ConfigError(_in_words(str(error))) from None
    _check_cache(spec)
    _check_pairing(spec)
    return msgspec.structs.replace(spec, url=_one_spelling(spec.url))


def _one_spelling(url: str) -> str:
    if "://" not in url:
        raise ConfigError(f"{url!r} has no scheme; write http://{url}")
    try:
        return normalise(url)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _check_cache(spec: EngineSpec) -> None:
    for name, address in (("kv-events", spec.kv_events), ("kv-replay", spec.kv_replay)):
        if address is not None and not address.startswith(("tcp://", "ipc://")):
            raise ConfigError(f"{name}={address!r} is not a ZMQ address; write tcp://HOST:PORT")
    if spec.kv_replay is not None and spec.kv_events is None:
        raise ConfigError("kv-replay has no effect without kv-events")
    if spec.block_size is not None and spec.block_size < 1:
        raise ConfigError(f"block-size must be at least 1, not {spec.block_size}")


def _check_pairing(spec: EngineSpec) -> None:
    """What no engine could make use of. Whether this one can, where it says itself what it is for, `engines.probe` finds out."""
    if spec.bootstrap is not None and not spec.bootstrap.startswith("http://"):
        raise ConfigError(f"bootstrap={spec.bootstrap!r} is not the address of a bootstrap server; write http://HOST:PORT")
    if spec.link is not None:
        try:
            parse_link(spec.link)
        except UnknownLink as error:
            raise ConfigError(f"link: {error}") from None
    if spec.role is Role.AGGREGATED and (spec.connector is not None or spec.bootstrap is not None or spec.link is not None or spec.group):
        raise ConfigError("connector, bootstrap, link and group have no effect with role=aggregated")
    if spec.connector is not None and spec.role is None:
        raise ConfigError("connector has no effect without role=prefill or role=decode")
    if spec.bootstrap is not None and spec.role is Role.DECODE:
        raise ConfigError("bootstrap has no effect with role=decode: it is where a prefill engine is asked for its part")
    if spec.bootstrap is not None and spec.connector is Connector.NIXL:
        raise ConfigError("bootstrap has no effect with connector=nixl, whose prefill engines say in each answer where they are asked")


def _in_words(problem: str) -> str:
    """What msgspec says, with the key where a reader looks for it."""
    message, _, path = problem.partition(" - at `$.")
    key = path.rstrip("`").replace("_", "-")
    if key in _CHOICES:
        message = f"{message}; one of {', '.join(_CHOICES[key])}"
    return f"{key}: {message}" if key else message
