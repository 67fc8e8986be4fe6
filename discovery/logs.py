"""How does a process say what happens? stdlib logging: a constant message, and fields beside it.

    event(logger, logging.INFO, "engine joined", engine="http://10.0.0.7:8000", ranks=2)

    on a terminal:  14:02:11 info  engine joined  engine=http://10.0.0.7:8000 ranks=2
    elsewhere:      {"time":"…T14:02:11.201Z","level":"info","logger":"router.app","message":"engine joined","engine":"http://…","ranks":2}

Both go through `discovery.redact`: no secret reaches a log, at any level, whoever logs it.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import select
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Literal, TextIO

import msgspec

from discovery.redact import redact_fields, redact_text

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["auto", "json", "text"]

BATCH_S = 0.05

ROOMS = ("commutator", "engines", "discovery", "router", "planner")

RESERVED = frozenset({"time", "level", "logger", "message", "trace"})
"""Names that a line has itself; a field that would hide one is written with an underscore behind it."""


def event(logger: logging.Logger, level: int, message: str, /, **fields: object) -> None:
    """Log a constant message with its fields."""
    if logger.isEnabledFor(level):
        logger.handle(_Event(logger.name, level, message, fields))


class _Event(logging.LogRecord):
    """A record without what nobody shows: the caller's line, threads, processes. Finding them takes longer than all the rest."""

    def __init__(self, name: str, level: int, message: str, fields: dict[str, object]) -> None:
        self.name, self.levelno, self.levelname = name, level, logging.getLevelName(level)
        self.msg, self.args, self.fields = message, (), fields
        self.created = time.time()  # noqa: TID251  when it happened, for people
        self.msecs = self.relativeCreated = 0.0
        self.pathname = self.filename = self.module = self.funcName = ""
        self.lineno = 0
        self.exc_info = self.exc_text = self.stack_info = None
        self.thread = self.process = self.threadName = self.processName = None


def configure(level: LogLevel, form: LogFormat, stream: TextIO, *, process: int | None = None) -> None:
    """From here on every logger of the process writes to `stream`, ours from `level` and others' from warning (or debug).

    `process` is its number where several write to one stream: it is in every line, and lines of different processes do not mix.
    """
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False  # asked for, never shown
    handler = BatchingHandler(stream, most=None if process is None else select.PIPE_BUF)
    handler.setFormatter(JsonFormatter() if wants_json(form, stream) else TextFormatter())
    if process is not None:
        handler.addFilter(functools.partial(_numbered, process))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.DEBUG if level == "debug" else max(logging.WARNING, _number(level)))
    for room in ROOMS:
        logging.getLogger(room).setLevel(_number(level))


def wants_json(form: LogFormat, stream: TextIO) -> bool:
    """Whether lines for `stream` are JSON; `auto` means text for a terminal only."""
    return form == "json" or (form == "auto" and not stream.isatty())


class BatchingHandler(logging.StreamHandler[TextIO]):
    """Makes and writes lines together while a loop runs: one after the other they cost half of what each costs between requests.

    A record waits for `BATCH_S` at most, and not at all when it is a warning or worse, or when no loop runs.
    """

    def __init__(self, stream: TextIO, *, most: int | None = None) -> None:
        """`most`: how many bytes are written at once, where others write to the same pipe; a single longer line may be mixed with theirs."""
        super().__init__(stream)
        self._most = most
        self._records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Take the record; write it now or soon."""
        self._records.append(record)
        if record.levelno >= logging.WARNING:
            self.flush()
        elif len(self._records) == 1:
            self._flush_soon()

    def flush(self) -> None:
        """Write what waits."""
        records, self._records = self._records, []
        lines = []
        for record in records:
            try:
                lines.append(self.format(record) + self.terminator)
            except Exception:  # noqa: BLE001  logging's own rule: a line that cannot be made must not end what it tells of
                self.handleError(record)
        try:
            for text in self._pieces(lines):
                self.stream.write(text)
                super().flush()
            super().flush()
        except Exception:  # noqa: BLE001  nor one that cannot be written
            if records:
                self.handleError(records[-1])

    def _pieces(self, lines: list[str]) -> Iterator[str]:
        """What is written at once."""
        begin = size = 0
        for end, line in enumerate(lines if self._most is not None else ()):
            length = len(line.encode(errors="replace"))
            if end > begin and size + length > (self._most or 0):
                yield "".join(lines[begin:end])
                begin, size = end, 0
            size += length
        if lines:
            yield "".join(lines[begin:])

    def _flush_soon(self) -> None:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            self.flush()
        else:
            loop.call_later(BATCH_S, self.flush)


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def __init__(self) -> None:
        super().__init__()
        self._second, self._shown = -1, ""

    def format(self, record: logging.LogRecord) -> str:
        """The record as JSON, secrets masked."""
        line: dict[str, object] = {
            "time": self._time(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": redact_text(record.getMessage()),
        }
        line.update(_fields(record))
        if trace := _trace(self, record):
            line["trace"] = trace
        return msgspec.json.encode(line).decode()

    def _time(self, at: float) -> str:
        second = int(at)
        if second != self._second:
            self._second, self._shown = second, datetime.fromtimestamp(second, UTC).isoformat().removesuffix("+00:00")
        return f"{self._shown}.{int((at - second) * 1000):03}Z"


class TextFormatter(logging.Formatter):
    """One short line for a reader, a traceback below it when there is one."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as text, secrets masked."""
        at = datetime.fromtimestamp(record.created).astimezone().strftime("%H:%M:%S")
        fields = " ".join(f"{name}={_plain(value)}" for name, value in _fields(record).items())
        line = f"{at} {record.levelname.lower():<7} {_one_line(record)}" + (f"  {fields}" if fields else "")
        trace = _trace(self, record)
        return f"{line}\n{trace}" if trace else line


def _numbered(process: int, record: logging.LogRecord) -> bool:
    """A filter that lets every record pass, with the number of its process."""
    record.fields = {"process": process} | getattr(record, "fields", {})
    return True


def _fields(record: logging.LogRecord) -> dict[str, object]:
    fields = redact_fields(getattr(record, "fields", {}))
    if not RESERVED.isdisjoint(fields):
        return {f"{name}_" if name in RESERVED else name: value for name, value in fields.items()}
    return fields


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
