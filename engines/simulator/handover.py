"""What does a request say of KV that is computed on one engine and used on another? Its fields → `Keep`, `Fetch`, or `Never`.

    NIXL       prefill: do_remote_decode ──▶ Keep            its answer names blocks, a request id and an address: a handle
               decode:  that handle ──▶ Fetch
    Mooncake   prefill: do_remote_decode, transfer_id ──▶ Keep
               decode:  do_remote_prefill, transfer_id, engine id, bootstrap address ──▶ Fetch
    SGLang     both:    bootstrap host, port and room ──▶ Keep on the prefill engine, Fetch on the decode engine

KV itself is faked by its *contents*: a number for each block that depends on all tokens up to the block's end. Engines do not check what
they are handed, and neither do these; but where the contents are not those of the receiver's own prompt, it generates other tokens than it
would have, always the same ones. So does whoever hits such a block in its cache later on.

What vLLM 0.32 and SGLang 0.5 do with a malformed hand-over is done here too, up to the end of the whole server.
"""

from __future__ import annotations

import enum
import zlib
from array import array
from collections.abc import Mapping
from typing import Any

import msgspec

from engines.simulator.settings import Connector
from engines.types import Role

Contents = tuple[int, ...]


class Keep(msgspec.Struct, frozen=True):
    """Keep the prompt's KV for another engine, which asks for it under `key`."""

    key: str
    after_stop: bool = True
    """Also when the answer ended by itself; Mooncake then keeps nothing."""
    meets: bool = False
    """Compute nothing before the other engine has come, and do not answer before it has everything (SGLang)."""


class Fetch(msgspec.Struct, frozen=True):
    """Take the prompt's KV from another engine."""

    url: str
    """Of the server where it is asked for: `http://host:port`."""
    key: str
    engine: str = ""
    """What the other engine calls itself; another one is refused."""
    blocks: tuple[int, ...] | None = None
    """Its blocks, where the handle names them (NIXL)."""
    cached: int | None = None
    """What the other engine had found in its cache, where the handle says so."""


class Never(enum.Enum):
    """A hand-over that cannot come about, and for which the engine waits."""

    WAITS = enum.auto()
    """Until the client leaves."""
    ENDS_LATER = enum.auto()
    """Until the client leaves; then the whole server ends."""
    ENDS = enum.auto()
    """The whole server ends at once."""


Handover = Keep | Fetch | Never


class Transfers(msgspec.Struct):
    """What an engine with a role counts of hand-overs since it started, and now."""

    role: Role
    counts_nixl: bool = False
    """Whether they are on its metrics page as NIXL's; those of Mooncake are on none."""
    transfers: int = 0
    bytes: int = 0
    blocks: int = 0
    seconds: float = 0.0
    failed: int = 0
    expired: int = 0
    """Prompts whose KV nobody had fetched in time."""
    late: int = 0
    """Prompts that were fetched when they had expired, or had been fetched before."""
    early: int = 0
    """Prompts that are not computed before the other engine comes."""
    in_flight: int = 0
    """Prompts that are computed and not fetched."""


class Rooms(msgspec.Struct, frozen=True):
    """SGLang's fields, one of each for every sequence."""

    hosts: tuple[str | None, ...]
    ports: tuple[int | None, ...]
    rooms: tuple[int, ...]


def from_vllm(params: Mapping[str, Any] | None, connector: Connector, role: Role, key: str) -> Handover | None:
    """What `kv_transfer_params` ask of an engine; `key` is what it calls the request itself."""
    if not params or role is Role.AGGREGATED:
        return None
    read = _nixl if connector is Connector.NIXL else _mooncake
    return read(params, role, key)


def _nixl(params: Mapping[str, Any], _: Role, key: str) -> Handover | None:
    """Each engine does either, whatever its role."""
    if params.get("do_remote_prefill"):
        groups = params.get("remote_block_ids")
        if not groups:
            return Never.ENDS
        engine, request, host, port = (params.get(name) for name in ("remote_engine_id", "remote_request_id", "remote_host", "remote_port"))
        if None in {engine, request, host, port}:
            return Never.ENDS_LATER
        return Fetch(f"http://{host}:{port}", str(request), str(engine), tuple(groups[0]), params.get("remote_prefill_cached_tokens"))
    return Keep(key) if params.get("do_remote_decode") else None


def _mooncake(params: Mapping[str, Any], role: Role, _: str) -> Handover | None:
    """The one role's part asked of the other ends the server."""
    transfer = params.get("transfer_id")
    if params.get("do_remote_prefill"):
        if role is Role.PREFILL:
            return Never.ENDS
        engine, address = params.get("remote_engine_id"), params.get("remote_bootstrap_addr")
        if None in {transfer, engine, address}:
            return Never.WAITS
        return Fetch(str(address), str(transfer), str(engine))
    if params.get("do_remote_decode"):
        if role is Role.DECODE:
            return Never.ENDS
        return Keep(str(transfer), after_stop=False) if transfer else None
    return None


def from_sglang(rooms: Rooms, index: int, role: Role, *, samples: int) -> Handover:
    """What a room asks of an engine, for the prompt at `index`; several samples of one prompt share a room, in which decode waits for ever."""
    if role is Role.PREFILL:
        return Keep(str(rooms.rooms[index]), meets=True)
    if samples > 1:
        return Never.WAITS
    return Fetch(f"http://{rooms.hosts[index]}:{rooms.ports[index]}", str(rooms.rooms[index]))


def contents(tokens: list[int] | array[int], block_size: int, adapter: str | None = None) -> Contents:
    """The contents of a prompt's blocks, the last one perhaps not full. Runtime complexity: O(tokens), at the speed of crc32."""
    row = array("I", tokens)
    data, width = memoryview(row).cast("B"), block_size * row.itemsize
    state, found = zlib.crc32((adapter or "").encode()), []
    for offset in range(0, data.nbytes, width):
        state = zlib.crc32(data[offset : offset + width], state)
        found.append(state)
    return tuple(found)


def difference(given: Contents, wanted: Contents) -> int:
    """0 where the contents are the ones that are wanted; else a number that depends on what they are instead."""
    if given == wanted:
        return 0
    return zlib.crc32(msgspec.msgpack.encode(given)) | 1
