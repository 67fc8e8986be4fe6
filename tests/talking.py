"""An engine's way with text, in small: what it generates, when it gives it, and the events it gives it in. For tests of resuming.

Every next token follows from all before it, so a text that goes on elsewhere goes on the same. Tokens are bytes, and some are only a part
of a character: as in vLLM, text is given when it ends in a whole character, and with stop strings all but what may begin one.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

PIECES = (
    b"a",
    b"b",
    b"c ",
    b"ab",
    b" ",
    b"\n",
    "é".encode(),
    "é".encode()[:1],
    "é".encode()[1:],
    "語".encode()[:2],
    "語".encode()[2:],
    b"",
)
"""Token id → its bytes; the last one is special, and is no text."""
END_TOKEN = len(PIECES)


class Asked(NamedTuple):
    """What matters to the engine of a request."""

    prompt: tuple[int, ...]
    limit: int
    stop: tuple[str, ...] = ()
    chat: bool = True
    usage: bool = False
    continuous: bool = False
    ends: bool = False
    """It may end by itself."""
    draw: int = 0
    """What else its tokens follow from, where they are drawn."""


def following(ids: Sequence[int], asked: Asked) -> int:
    """The token behind `ids`."""
    return zlib.crc32(bytes(ids), asked.draw) % (len(PIECES) + asked.ends)


def text_of(tokens: Sequence[int]) -> str:
    """What tokens say, up to the last whole character."""
    text = b"".join(PIECES[token] for token in tokens if token != END_TOKEN).decode("utf-8", "replace")
    return text.rstrip("\ufffd")


def generated(asked: Asked) -> list[int]:
    """All the engine would say, stop strings aside."""
    ids = list(asked.prompt)
    for _ in range(asked.limit):
        ids.append(following(ids, asked))
        if ids[-1] == END_TOKEN:
            break
    return ids[len(asked.prompt) :]


class Step(NamedTuple):
    """What one token brings."""

    token: int
    text: str
    finish: str | None


def steps(asked: Asked) -> Iterator[Step]:
    """Token by token, with the text as it is given."""
    window, text, given = b"", "", 0
    held_back = max(map(len, asked.stop), default=1) - 1
    tokens = generated(asked)
    for number, token in enumerate(tokens):
        window += PIECES[token] if token != END_TOKEN else b""
        if (shown := window.decode("utf-8", "replace")) and not shown.endswith("\ufffd"):
            text, window = text + shown, b""
        finish = "stop" if token == END_TOKEN else "length" if number == len(tokens) - 1 else None
        if found := [at for string in asked.stop if (at := text.find(string)) >= 0]:
            text, finish = text[: min(found)], "stop"
        end = len(text) if finish else max(len(text) - held_back, given)
        yield Step(token, text[given:end], finish)
        given = end
        if finish:
            return


def events(asked: Asked, *, rng: random.Random, name: str = "one", ids: bool = True, merge: float = 0.3) -> list[bytes]:
    """The stream, as vLLM writes it; some events bring several tokens."""
    kind = "chat.completion.chunk" if asked.chat else "text_completion"
    head: dict[str, Any] = {"id": name, "object": kind, "created": len(name), "model": "m"}
    out = []
    told = list(asked.prompt) if ids else None
    if asked.chat:
        choice = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        out.append(_event(head | {"choices": [choice]} | _usage(asked, 0, always=False) | {"prompt_token_ids": told, "prompt_text": None}))
    pending: list[Step] = []
    count = 0
    for step in steps(asked):
        pending.append(step)
        if step.finish is None and rng.random() < merge:
            continue
        text, tokens = "".join(one.text for one in pending), [one.token for one in pending]
        pending = []
        choice = {"index": 0} | ({"delta": {"content": text} if text else {}} if asked.chat else {"text": text})
        choice |= {"logprobs": None, "finish_reason": step.finish}
        if step.finish or not asked.chat:
            choice["stop_reason"] = None
        if not asked.chat:
            choice["prompt_token_ids"] = told if not count else None
        count += len(tokens)
        out.append(_event(head | {"choices": [choice | {"token_ids": tokens if ids else None}]} | _usage(asked, count, always=False)))
    if asked.usage:
        out.append(_event(head | {"choices": []} | _usage(asked, count, always=True)))
    return [*out, b"data: [DONE]\n\n"]


def _usage(asked: Asked, count: int, *, always: bool) -> dict[str, Any]:
    prompt = len(asked.prompt)
    usage = {"prompt_tokens": prompt, "total_tokens": prompt + count, "completion_tokens": count}
    return {"usage": usage} if always or asked.continuous else {}


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def read_back(body: bytes, asked: Asked) -> Asked:
    """What an engine is asked by a continuation's body."""
    fields = msgspec.json.decode(body)
    prompt = fields["kv_transfer_params"]["prompt_token_ids"] if "kv_transfer_params" in fields else fields["prompt"]
    return asked._replace(prompt=tuple(prompt), limit=fields["max_tokens"])


class Heard(NamedTuple):
    """A stream as its client understands it."""

    text: str
    finish: str | None
    usage: dict[str, Any] | None
    heads: set[tuple[str, int, str]]
    roles: int
    done: bool


def heard(stream: bytes) -> Heard:
    """Read a stream, strictly."""
    text, finish, usage, heads, roles, done = "", None, None, set(), 0, False
    assert stream.endswith(b"\n\n")
    for event in stream.split(b"\n\n")[:-1]:
        assert not done, "something behind the end"
        if event == b"data: [DONE]":
            done = True
            continue
        chunk = msgspec.json.decode(event.removeprefix(b"data: "))
        heads.add((chunk["id"], chunk["created"], chunk["object"]))
        assert chunk.get("prompt_token_ids") is None
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            assert finish is None, "text behind the end"
            assert choice.get("token_ids") is None
            assert choice.get("prompt_token_ids") is None
            roles += "role" in choice.get("delta", {})
            text += choice.get("delta", {}).get("content") or choice.get("text") or ""
            finish = choice["finish_reason"]
            if chunk.get("usage"):
                assert chunk["usage"]["total_tokens"] == chunk["usage"]["prompt_tokens"] + chunk["usage"]["completion_tokens"]
    return Heard(text, finish, usage, heads, roles, done)
