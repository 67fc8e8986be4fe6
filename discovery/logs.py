"""How does a process say what happens? stdlib logging: a constant message, and fields beside it.

    event(logger, logging.INFO, "engine joined", engine="http://10.0.0.7:8000", ranks=2)

    on a terminal:  14:02:11 info  engine joined  engine=http://10.0.0.7:8000 ranks=2
    elsewhere:      {"time":"…T14:02:11.201Z","level":"info","logger":"router.app","message":"engine joined","engine":"http://…","ranks":2}

Both go through `discovery.redact`: no secret reaches a log, at any level, whoever logs it.
"""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from typing import Literal, TextIO

import msgspec

from discovery.redact import redact_fields, redact_text

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["auto", "json", "text"]

ROOMS = ("commutator", "engines", "discovery", "router", "planner")

RESERVED = ("time", "level", "logger", "message", "trace")
"""Names that a line has itself; a field that would hide one is written with an underscore behind it."""


def event(logger: logging.Logger, level: int, message: str, /, **fields: object) -> None:
    """Log a constant message with its fields."""
    logger.log(level, message, extra={"fields": fields}, stacklevel=2)


def configure(level: LogLevel, form: LogFormat, stream: TextIO) -> None:
    """From here on every logger of the process writes to `stream`, ours from `level` and others' from warning (or debug)."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter() if wants_json(form, stream) else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.DEBUG if level == "debug" else max(logging.WARNING, _number(level)))
    for room in ROOMS:
        logging.getLogger(room).setLevel(_number(level))


def wants_json(form: LogFormat, stream: TextIO) -> bool:
    """Whether lines for `stream` are JSON; `auto` means text for a terminal only."""
    return form == "json" or (form == "auto" and not stream.isatty())


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as JSON, secrets masked."""
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": redact_text(record.getMessage()),
            **_fields(record),
        }
        if trace := _trace(self, record):
            line["trace"] = trace
        return msgspec.json.encode(line).decode()


class TextFormatter(logging.Formatter):
    """One short line for a reader, a traceback below it when there is one."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as text, secrets masked."""
        at = datetime.fromtimestamp(record.created).astimezone().strftime("%H:%M:%S")
        fields = " ".join(f"{name}={_plain(value)}" for name, value in _fields(record).items())
        line = f"{at} {record.levelname.lower():<7} {_one_line(record)}" + (f"  {fields}" if fields else "")
        trace = _trace(self, record)
        return f"{line}\n{trace}" if trace else line


def _fields(record: logging.LogRecord) -> dict[str, object]:
    return {f"{name}_" if name in RESERVED else name: value for name, value in redact_fields(getattr(record, "fields", {})).items()}


def _one_line(record: logging.LogRecord) -> str:
    message = redact_text(record.getMessage())
    return message if message.isprintable() else repr(message)


def _trace(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    return redact_text(formatter.formatException(record.exc_info)) if record.exc_info and record.exc_info[0] else ""


def _plain(value: object) -> str:
    if isinstance(value, str) and value and value.isprintable() and not set(value) & set(' "='):
        return value
    return msgspec.json.encode(value).decode()


def _number(level: LogLevel) -> int:
    return logging.getLevelNamesMapping()[level.upper()]
