from __future__ import annotations

import pytest

from engines.frames import GREETING, PING, FrameReader, Heard, NotAPublisher, socket_type

LIMIT = 1000
READY = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03PUB"
XPUB = b"\x04\x1a\x05READY\x0bSocket-Type\x00\x00\x00\x04XPUB"
SUBSCRIBER = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03SUB"
LONG = bytes(range(256)) * 2
STREAM = (
    GREETING
    + READY
    + b"\x01\x02kv\x01\x08\0\0\0\0\0\0\0\0\x00\x03abc"
    + b"\x04\x07\x04PING\x00\x00"
    + b"\x01\x02kv\x02"
    + len(LONG).to_bytes(8, "big")
    + LONG
    + b"\x00\x00"
    + b"\x01\x05other\x00\x01x"
    + b"\x00\x02kv"
)
MESSAGES = [[b"kv", bytes(8), b"abc"], [b"kv", LONG], [b"kv"]]
ANSWER = SUBSCRIBER + b"\x00\x03\x01kv" + b"\x04\x05\x04PONG"


def read(reader: FrameReader, *pieces: bytes) -> Heard:
    heard = Heard([])
    for piece in pieces:
        part = reader.feed(piece)
        heard.messages += part.messages
        heard.answer += part.answer
    return heard


@pytest.fixture
def reader() -> FrameReader:
    return FrameReader(b"kv", LIMIT)


def test_a_stream_gives_its_messages_in_one_piece_byte_by_byte_and_cut_anywhere(reader: FrameReader) -> None:
    assert read(reader, STREAM) == Heard(MESSAGES, ANSWER)
    assert read(FrameReader(b"kv", LIMIT), *(STREAM[at : at + 1] for at in range(len(STREAM)))) == Heard(MESSAGES, ANSWER)
    for cut in range(1, len(STREAM)):
        assert read(FrameReader(b"kv", LIMIT), STREAM[:cut], STREAM[cut:]) == Heard(MESSAGES, ANSWER)


def test_what_trails_behind_whole_messages_is_kept(reader: FrameReader) -> None:
    assert len(read(reader, STREAM + b"\x00\x05kv").messages) == 3
    assert reader.feed(b"123").messages == [[b"kv123"]]


def test_the_answer_to_the_greeting_and_to_the_handshake_each_come_once(reader: FrameReader) -> None:
    assert reader.feed(GREETING) == Heard([], SUBSCRIBER)
    assert (reader.feed(XPUB[:-1]), reader.ready) == (Heard([]), False)
    assert (reader.feed(XPUB[-1:]), reader.ready) == (Heard([], b"\x00\x03\x01kv"), True)
    assert reader.feed(PING) == Heard([], b"\x04\x05\x04PONG")
    assert reader.feed(b"\x04\x0a\x04PING\x00\x64abc") == Heard([], b"\x04\x08\x04PONGabc")
    assert reader.feed(b"\x04\x05\x04PONG") == Heard([])
    assert reader.feed(b"\x04\x00\x06\0\0\0\0\0\0\0\0") == Heard([])


def test_an_empty_topic_hears_everything_and_a_long_one_is_told_in_a_long_frame() -> None:
    reader = FrameReader(b"", LIMIT)
    assert read(reader, GREETING, READY, b"\x01\x05other\x00\x01x").messages == [[b"other", b"x"]]
    long = FrameReader(b"t" * 300, LIMIT)
    assert read(long, GREETING, READY).answer.endswith(b"\x02" + (301).to_bytes(8, "big") + b"\x01" + b"t" * 300)


@pytest.mark.parametrize(
    "odd",
    [
        pytest.param(b"HTTP/1.1 400 Bad Request\r\n\r\n", id="http"),
        pytest.param(b"\xff" + bytes(8) + b"\x7e" + GREETING[10:], id="no signature"),
        pytest.param(GREETING[:10] + b"\x01" + GREETING[11:], id="an older version"),
        pytest.param(GREETING.replace(b"NULL", b"CURV"), id="a mechanism with keys"),
        pytest.param(GREETING + SUBSCRIBER, id="another subscriber"),
        pytest.param(GREETING + b"\x04\x06\x05ERROR", id="an error"),
        pytest.param(GREETING + b"\x00\x03abc", id="a message before the handshake"),
        pytest.param(GREETING + READY + b"\x08\x00", id="an unknown flag"),
        pytest.param(GREETING + READY + b"\x02" + (LIMIT + 1).to_bytes(8, "big"), id="too long a frame"),
        pytest.param(GREETING + READY + (b"\x03" + (600).to_bytes(8, "big") + bytes(600)) * 2, id="too long a message"),
        pytest.param(GREETING + READY + b"\x01\x00" * 2000, id="too many frames"),
    ],
)
def test_A9_what_no_publisher_says_ends_the_connection(reader: FrameReader, odd: bytes) -> None:
    with pytest.raises(NotAPublisher):
        reader.feed(odd)
    with pytest.raises(NotAPublisher):
        read(FrameReader(b"kv", LIMIT), *(odd[at : at + 1] for at in range(len(odd))))


def test_the_limit_is_of_each_message_not_of_them_all(reader: FrameReader) -> None:
    frame = b"\x02" + (900).to_bytes(8, "big") + b"kv" + bytes(898)
    assert len(read(reader, GREETING, READY, *[frame] * 5).messages) == 5


def test_what_a_socket_is_stands_in_its_ready_command() -> None:
    assert socket_type(READY[2:]) == "PUB"
    assert socket_type(b"\x05READY") is None
