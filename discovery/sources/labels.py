"""What does a label say of an engine? One table for Docker's labels and Kubernetes' labels and annotations.

    Docker      commutator.port=8000      commutator.role=prefill        commutator.api-key-env=VLLM_KEY
    Kubernetes  commutator.io/port: 8000  commutator.io/role: prefill    …

The keys are those of an engine on the command line, with what an address needs besides: `port`, `scheme`. Where an address is wanted,
a port will do: it is taken to be on the engine's own host, since a Kubernetes label can hold no address.
"""

from __future__ import annotations

from collections.abc import Mapping

from discovery.config.errors import ConfigError, nearest
from discovery.config.specs import KEYS, build_engine_spec
from engines.types import EngineSpec

DOCKER, KUBERNETES = "commutator.", "commutator.io/"
_ADDRESSES = {"kv-events": "tcp", "kv-replay": "tcp", "bootstrap": "http"}
_OWN = ("port", "scheme", "api-key-env")
NAMES = (*_OWN, *(key.replace("_", "-") for key in KEYS if key != "url"))


def own(labels: Mapping[str, str], prefix: str) -> dict[str, str]:
    """Labels that are ours, without their prefix."""
    return {name.removeprefix(prefix): value for name, value in labels.items() if name.startswith(prefix)}


def spec_of(host: str, port: int | None, keys: Mapping[str, str], environ: Mapping[str, str]) -> EngineSpec:
    """The engine at `host` that these keys describe; `port` where they name none. Raises ConfigError saying which one is wrong.

    >>> spec_of("10.0.0.7", 8000, {"role": "decode", "kv-events": "5557"}, {}).kv_events
    'tcp://10.0.0.7:5557'
    """
    for name in keys:
        if name not in NAMES:
            raise ConfigError(f"unknown key {name!r}{nearest(name, NAMES)}")
    named = keys.get("port") or (None if port is None else str(port))
    if named is None:
        raise ConfigError("no port is named, and it is not clear which one is meant")
    if not named.isascii() or not named.isdigit() or not 0 < int(named) < 65_536:
        raise ConfigError(f"port {named!r} is none")
    shown = f"[{host}]" if ":" in host else host
    table: dict[str, object] = {"url": f"{keys.get('scheme', 'http')}://{shown}:{named}"}
    for name, value in keys.items():
        if name not in _OWN:
            is_port = name in _ADDRESSES and value.isascii() and value.isdigit()
            table[name.replace("-", "_")] = f"{_ADDRESSES[name]}://{shown}:{value}" if is_port else value
    if (variable := keys.get("api-key-env")) is not None:
        if "api-key" in keys:
            raise ConfigError("api-key and api-key-env are both given")
        if variable not in environ:
            raise ConfigError(f"api-key-env names {variable}, which is not set")
        table["api_key"] = environ[variable]
    return build_engine_spec(table, strict=False)
