"""However the network cuts an answer, the scanner finds the same in it, and what a relay passes on is the same bytes."""

from __future__ import annotations

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from router.sse import MAX_LINE_BYTES, Scanner, Usage

TEXT = st.text(max_size=20) | st.sampled_from(
    ["🎉 你好", '"usage"', '{"usage":{"prompt_tokens":1}}', "[DONE]", "error", "data: x", "a\u2028b"]
)
ENDINGS = st.sampled_from(["\n", "\r\n", "\r"])
COUNTS = st.integers(0, 2**40)


def compact(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


@st.composite
def usages(draw: st.DrawFn) -> dict[str, object]:
    usage: dict[str, object] = {"prompt_tokens": draw(COUNTS), "completion_tokens": draw(COUNTS)}
    match draw(st.integers(0, 2)):
        case 0:
            usage["prompt_tokens_details"] = {"cached_tokens": draw(COUNTS)}
        case 1:
            usage["prompt_tokens_details"] = None
    return usage


EVENTS = ["event: ping", "event: content_block_delta", "event:error", "event: response.created", "event: own"]
FIELDS = ["id: 7", "retry: 10", "data", "data:", "unknown", "data: [DONE]", "", ""]


def one_line(text: str) -> str:
    return " ".join(text.splitlines())


@st.composite
def payloads(draw: st.DrawFn) -> dict[str, object]:
    """The JSON of an event: a role, a token, usage, or something of the messages API."""
    text = draw(TEXT) * draw(st.sampled_from([1, 1, 1, 1500]))
    kinds: list[dict[str, object]] = [
        {"id": "x", "choices": [{"delta": {"role": "assistant", "content": ""}}]},
        {"id": "x", "choices": [], "usage": draw(usages())},
        {"id": "x", "choices": [{"delta": {"content": text}}], "usage": draw(st.none() | usages())},
        {"error": {"message": text}},
        {"type": draw(st.sampled_from(["ping", "content_block_delta", "message_delta"])), "text": text},
    ]
    return draw(st.sampled_from(kinds))


def lines() -> st.SearchStrategy[str]:
    """One line of an event stream, of any kind that engines send or might."""
    return st.one_of(
        payloads().map(lambda value: "data: " + compact(value)),
        payloads().map(lambda value: "data:" + json.dumps(value)),
        TEXT.map(lambda text: ": " + one_line(text)),
        TEXT.map(lambda text: "data: " + one_line(text)),
        st.sampled_from(EVENTS),
        st.sampled_from(FIELDS),
    )


@st.composite
def streams(draw: st.DrawFn) -> bytes:
    ending = draw(ENDINGS)
    body = ending.join(draw(st.lists(lines(), max_size=12)))
    return (body + draw(st.sampled_from(["", ending, ending + ending]))).encode()


@st.composite
def documents(draw: st.DrawFn) -> bytes:
    """A whole JSON answer."""
    before, after = draw(TEXT) * draw(st.sampled_from([1, 5000])), draw(TEXT) * draw(st.sampled_from([1, 5000]))
    document = {"choices": [{"text": before}], "usage": draw(usages()), "prompt": after}
    return (compact(document) if draw(st.booleans()) else json.dumps(document, indent=1)).encode()


def found(pieces: list[bytes], *, streamed: bool) -> tuple[bool, int, bool, Usage | None]:
    scanner = Scanner(streamed=streamed)
    firsts = sum([scanner.feed(piece) for piece in pieces if piece])
    return scanner.first_token, firsts, scanner.failed, scanner.usage()


@st.composite
def cuts(draw: st.DrawFn, of: bytes) -> list[bytes]:
    places = sorted(draw(st.sets(st.integers(0, len(of)), max_size=20))) if of else []
    if of and draw(st.booleans()):  # and everywhere around a line's end
        places = sorted(
            {*places, *(at for at in range(len(of)) if of[max(0, at - 2) : at + 2].strip(b"\r\n") != of[max(0, at - 2) : at + 2])}
        )
    return [of[start:end] for start, end in zip([0, *places], [*places, len(of)], strict=True)]


@settings(deadline=None)  # the machine may be busy
@given(st.data(), streams())
def test_S11_any_cut_of_a_stream_gives_the_same_answers(data: st.DataObject, stream: bytes) -> None:
    stream += b"\n"  # an unfinished last line is no line; the relay finishes it at the answer's end
    pieces = data.draw(cuts(stream))
    assert b"".join(pieces) == stream
    whole = found([stream], streamed=True)
    assert found(pieces, streamed=True) == whole
    assert whole[1] == int(whole[0])
    if len(stream) < 2000:
        assert found([bytes([byte]) for byte in stream], streamed=True) == whole


@settings(deadline=None)  # the machine may be busy
@given(st.data(), documents())
def test_any_cut_of_a_json_answer_gives_its_usage(data: st.DataObject, document: bytes) -> None:
    usage = json.loads(document)["usage"]
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    expected = Usage(usage["prompt_tokens"], usage["completion_tokens"], cached)
    assert found(data.draw(cuts(document)), streamed=False) == (False, 0, False, expected)


@settings(deadline=None)  # the machine may be busy
@given(st.data(), st.binary(max_size=300))
def test_no_bytes_upset_the_scanner(data: st.DataObject, noise: bytes) -> None:
    for streamed in (True, False):
        found(data.draw(cuts(noise)), streamed=streamed)


@settings(deadline=None)  # the machine may be busy
@given(st.lists(st.binary(min_size=1, max_size=5000), max_size=40))
def test_the_scanners_memory_is_bounded(pieces: list[bytes]) -> None:
    scanner = Scanner(streamed=True)
    for piece in pieces * 4:
        scanner.feed(piece)
        assert len(scanner._line) <= MAX_LINE_BYTES + 5000
        assert len(scanner._cut_off) <= 4096


def test_a_usage_within_a_usage_is_the_one_that_counts() -> None:
    for stream in (b': "usage"\n: {"usage":{"prompt_tokens":1}}\n', b'data: {"usage":{"usage":null,"prompt_tokens":3}}\n'):
        pieces = [bytes([byte]) for byte in stream]
        assert found(pieces, streamed=True) == found([stream], streamed=True)
