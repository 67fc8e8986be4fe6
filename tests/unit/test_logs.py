from __future__ import annotations

import io
import logging
import select

import msgspec
import pytest

from discovery import logs
from discovery.logs import LogFormat, LogLevel, event
from discovery.redact import redact_text
from engines.types import EngineSpec

pytestmark = pytest.mark.usefixtures("logging_as_it_was")

logger = logging.getLogger("router.made_up")
stranger = logging.getLogger("somebody.else")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def configured(level: LogLevel = "info", form: LogFormat = "auto", stream: io.StringIO | None = None) -> io.StringIO:
    stream = stream or io.StringIO()
    logs.configure(level, form, stream)
    return stream


def lines(stream: io.StringIO) -> list[dict[str, object]]:
    return [msgspec.json.decode(line, type=dict[str, object]) for line in stream.getvalue().splitlines()]


def test_a_line_elsewhere_than_on_a_terminal_is_json_with_its_fields() -> None:
    stream = configured()
    event(logger, logging.INFO, "engine joined", engine="http://h:1", ranks=2)
    (line,) = lines(stream)
    assert str(line.pop("time")).endswith("Z")
    assert line == {"level": "info", "logger": "router.made_up", "message": "engine joined", "engine": "http://h:1", "ranks": 2}


def test_a_line_on_a_terminal_is_short_text() -> None:
    stream = configured(stream=Terminal())
    event(logger, logging.WARNING, "engine is blind", engine="http://h:1", why="no events", blocks=None)
    assert stream.getvalue().rstrip().partition(" ")[2] == 'warning engine is blind  engine=http://h:1 why="no events" blocks=null'


def test_the_format_can_be_chosen() -> None:
    assert lines(_logged(configured(form="json", stream=Terminal())))
    assert " info    hello" in _logged(configured(form="text")).getvalue()


def _logged(stream: io.StringIO) -> io.StringIO:
    event(logger, logging.INFO, "hello")
    return stream


def test_others_are_heard_from_warning_on_and_at_debug_level_in_full() -> None:
    stream = configured("info")
    stranger.info("chatter")
    stranger.warning("careful")
    assert [line["message"] for line in lines(stream)] == ["careful"]
    stream = configured("debug")
    stranger.debug("chatter")
    assert [line["message"] for line in lines(stream)] == ["chatter"]


def test_a_level_silences_what_is_less_severe() -> None:
    stream = configured("error")
    event(logger, logging.WARNING, "quiet")
    stranger.warning("quiet")
    event(logger, logging.ERROR, "loud")
    assert [line["message"] for line in lines(stream)] == ["loud"]


def test_a_field_cannot_hide_what_a_line_says_of_itself() -> None:
    stream = configured()
    event(logger, logging.INFO, "true message", message="other", level=3, time=0)
    (line,) = lines(stream)
    assert (line["message"], line["message_"], line["level"], line["level_"], line["time_"]) == ("true message", "other", "info", 3, 0)


def test_a_line_is_one_line_whatever_is_in_it() -> None:
    stream = configured()
    event(logger, logging.INFO, "two\nlines", body="a\nb", odd=object, bytes_=b"\xff", items={1})
    assert len(lines(stream)) == 1
    stream = configured(form="text")
    event(logger, logging.INFO, "one\nmessage", body="a\nb")
    assert len(stream.getvalue().splitlines()) == 1


def test_an_exception_is_logged_with_where_it_was_raised() -> None:
    stream = configured()
    try:
        int("Bearer canary-of-an-exception")
    except ValueError:
        logger.exception("it failed")
    (line,) = lines(stream)
    assert "test_an_exception_is_logged" in str(line["trace"])
    assert "canary" not in str(line)


@pytest.mark.parametrize("level", ["debug", "info", "warning", "error"])
@pytest.mark.parametrize("form", ["json", "text"])
def test_A7_no_secret_reaches_a_log_at_any_level(level: LogLevel, form: LogFormat) -> None:
    stream = configured(level, form)
    for severity in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR):
        event(logger, severity, "request", headers={"Authorization": "Bearer canary", "X-API-Key": "canary", "Cookie": "canary"})
        event(logger, severity, "request", headers=[(b"authorization", b"canary"), ("x-api-key", "canary")], body=b"password=canary")
        event(logger, severity, "request", api_key="canary", token="canary", password="canary", nats="nats://u:canary@h:1")
        event(logger, severity, "engine", spec=EngineSpec("http://h:1", api_key="canary"), all=[{"deep": {"api-key": "canary"}}])
        logger.log(severity, "connecting to %s", "nats://user:canary@h:4222")
        stranger.log(severity, "sent Authorization: Bearer %s", "canary")
    assert "***" in stream.getvalue()
    assert "canary" not in stream.getvalue()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("nats://u:p@h:1 and http://t@h", "nats://***@h:1 and http://***@h"),
        ("Authorization: Bearer abcdef", "Authorization: Bearer ***"),
        ("http://h:1,api-key=abc,role=decode", "http://h:1,api-key=***,role=decode"),
        ("EngineSpec(url='http://h:1', api_key='abc')", "EngineSpec(url='http://h:1', api_key=***)"),
        ("?apikey=abc&password: x, secret=y", "?apikey=***&password: ***, secret=***"),
        ("--nats-password: has no effect without nats", "--nats-password: has no effect without nats"),
        ("--api-key: the value is not allowed; password: the", "--api-key: the value is not allowed; password: ***"),
        ("http://h:8000/v1 is fine; a bearer of news; prompt_tokens=5", "http://h:8000/v1 is fine; a bearer of news; prompt_tokens=5"),
    ],
)
def test_credentials_inside_text_are_masked_and_nothing_else_is(text: str, shown: str) -> None:
    assert redact_text(text) == shown


class Pipe(io.StringIO):
    """Remembers what was written at once."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[str] = []

    def write(self, text: str) -> int:
        self.writes.append(text)
        return super().write(text)


async def test_lines_of_processes_that_share_a_pipe_carry_their_number_and_are_written_in_pieces_that_do_not_mix() -> None:
    pipe = Pipe()
    logs.configure("info", "json", pipe, process=3)
    for number in range(100):
        event(logger, logging.INFO, "request", number=number, text="ä" * 60)
    event(logger, logging.INFO, "request", number=100, text="x" * 2 * select.PIPE_BUF)
    event(logger, logging.WARNING, "and out")
    assert [line["number"] for line in lines(pipe)[:-1]] == list(range(101))
    assert {line["process"] for line in lines(pipe)} == {3}
    sizes = [len(text.encode()) for text in pipe.writes]
    assert sorted(sizes)[-2] <= select.PIPE_BUF < max(sizes), "only the one line that is longer by itself"
    assert len(sizes) < 20
    assert all(text.endswith("\n") for text in pipe.writes)
