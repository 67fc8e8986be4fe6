"""What goes over the wire when an engine's blocks change? vLLM 0.32's and SGLang 0.5's map events, byte for byte as msgpack.

[ts, [event, ...], rank]      event = {"type": "BlockStored" | "BlockRemoved" | "AllBlocksCleared", ...}
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from engines.simulator.cache import Change, Cleared, Removed, Stored
from engines.types import EngineKind

_ENCODER = msgspec.msgpack.Encoder()


def encode(changes: Iterable[Change], kind: EngineKind, block_size: int, *, ts: float, rank: int = 0) -> bytes:
    """One batch as its payload frame."""
    events = _vllm(changes, block_size) if kind is EngineKind.VLLM else _sglang(changes, block_size)
    return _ENCODER.encode([ts, list(events), rank])


def _vllm(changes: Iterable[Change], block_size: int) -> Iterator[dict[str, Any]]:
    for change in changes:
        match change:
            case Stored():
                event = {
                    "type": "BlockStored",
                    "block_hashes": change.names,
                    "parent_block_hash": change.parent,
                    "token_ids": change.tokens,
                    "block_size": block_size,
                    "lora_id": 1 if change.adapter else None,
                    "medium": "GPU",
                    "lora_name": change.adapter,
                    "extra_keys": _extra_keys(change),
                    "group_idx": 0,
                    "kv_cache_spec_kind": "full_attention",
                }
                if change.session is not None:
                    event["session_id"] = change.session
                yield event
            case Removed(name):
                yield {"type": "BlockRemoved", "block_hashes": [name], "medium": "GPU", "group_idx": 0}
            case Cleared():
                yield {"type": "AllBlocksCleared"}


def _extra_keys(stored: Stored) -> list[list[str] | None]:
    """What beside the tokens went into each hash: the adapter in every block, the salt in a prompt's first."""
    rest = [stored.adapter] if stored.adapter else None
    keys: list[list[str] | None] = [rest] * len(stored.names)
    if stored.salt and stored.parent is None:
        keys[0] = [*(rest or []), stored.salt]
    return keys


def _sglang(changes: Iterable[Change], block_size: int) -> Iterator[dict[str, Any]]:
    removed: list[int] = []
    for change in changes:
        if removed and not isinstance(change, Removed):
            yield {"type": "BlockRemoved", "block_hashes": removed, "medium": "GPU"}
            removed = []
        match change:
            case Stored():
                event = {
                    "type": "BlockStored",
                    "block_hashes": change.names,
                    "parent_block_hash": change.parent,
                    "token_ids": change.tokens,
                    "block_size": block_size,
                    "lora_id": None,
                    "medium": "GPU",
                }
                optional = {"cache_salt": change.salt, "session_id": change.session, "lora_name": change.adapter}
                yield event | {key: value for key, value in optional.items() if value is not None}
            case Removed(name):
                removed.append(name)
            case Cleared():
                yield {"type": "AllBlocksCleared"}
    if removed:
        yield {"type": "BlockRemoved", "block_hashes": removed, "medium": "GPU"}
