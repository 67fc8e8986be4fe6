"""Real KV event messages, recorded from unmodified engines, with what the recorder's own decoder made of them.

`vllm/*` are from vLLM 0.32.0, `sglang/*` from SGLang 0.5.23; `dpattn_*_dynamofmt` from SGLang with `"format": "dynamo"`.
SGLang's files also hold messages of its load feed, which are not KV events.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any, NamedTuple

_FOLDER = Path(__file__).parent / "data" / "frames"


class Recorded(NamedTuple):
    frames: list[bytes]
    decoded: list[Any]

    @property
    def payload(self) -> bytes:
        return self.frames[-1]

    @property
    def is_kv(self) -> bool:
        return isinstance(self.decoded[1], list)


def recorded(name: str) -> list[Recorded]:
    """All messages of one file, in the order in which they came."""
    text = (_FOLDER / name).read_text()
    entries = json.loads(text) if name.endswith(".json") else [json.loads(line) for line in text.splitlines()]
    return [Recorded(_frames(entry), entry["decoded"]) for entry in entries]


def recorded_replay() -> list[list[bytes]]:
    """SGLang's whole answer to a question from 0, as a DEALER got it: eight messages and the end marker."""
    return [[base64.b64decode(frame) for frame in frames] for frames in json.loads((_FOLDER / "sglang" / "replay_frames.json").read_text())]


def _frames(entry: dict[str, Any]) -> list[bytes]:
    if "frames_hex" in entry:
        return [bytes.fromhex(frame) for frame in entry["frames_hex"]]
    return [base64.b64decode(frame) for frame in entry["frames_b64"]]
