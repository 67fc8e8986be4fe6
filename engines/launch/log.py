"""What does an engine's log say: how far it is, and why it ended?

Engines say the cause of their end once, in a traceback of a worker, then that the worker has ended, then that they have. So the lines that
name an error are kept, in order, without those that only say that another one went before.
"""

from __future__ import annotations

import re
from typing import Final

MOST_LINES: Final = 4
LONGEST: Final = 500

_ANSI: Final = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_PREFIX: Final = re.compile(
    r"^(?:\((?:\w|[-=. ])+\)\s*)?"  # vLLM: (EngineCore_0 pid=12)
    r"(?:(?:TRACE|DEBUG|INFO|WARNING|ERROR|CRITICAL)\s+)?"
    r"(?:\[?\d{2,4}-\d{2}(?:-\d{2})?[ T]\d{2}:\d{2}:\d{2}[^\]\s]*(?:\s+[A-Z]{2}\d+)*\]?\s*)?"  # 11-30 00:49:57, [2026-11-30 00:49:57 TP0]
    r"(?:\[[\w./]+:\d+\]\s*)?"  # [core.py:123]
    r"(?:[IWEF]\d{4} [\d:.]+ \d+ \S+\]\s*)?"  # torch: W1130 01:00:42.053000 5401 torch/_library/triton.py:53]
)
_NAMES_ERROR: Final = re.compile(r"^(?:[A-Za-z_][\w.]*(?:Error|Exception|Failed|Exit|NotStarted|NotFound)\b.*|.*\b(?:error|fatal):\s.*)$")
_SAYS_NOTHING: Final = re.compile(
    r"See root cause above|See stack trace for root cause|Engine core initialization failed|died unexpectedly"
)
_MISSING: Final = re.compile(r"No module named '?(vllm|sglang)\b")


def plain(line: str) -> str:
    """A line as a reader wants it: no colours, no date, no process; one progress bar's last state."""
    return _PREFIX.sub("", _ANSI.sub("", line.rsplit("\r", maxsplit=1)[-1]).strip())


def latest(text: str) -> str:
    """What the engine said last, on one line; empty when it has said nothing."""
    for line in reversed(text.splitlines()):
        if said := plain(line):
            return _short(said)
    return ""


def cause(text: str) -> list[str]:
    """The lines that say why it ended, at most four; where none names an error, its last ones."""
    lines = [said for line in text.splitlines() if (said := plain(line))]
    errors = [line for line in lines if _NAMES_ERROR.match(line)]
    telling = [line for line in errors if not _SAYS_NOTHING.search(line)] or errors or lines
    return [_short(line) for line in list(dict.fromkeys(telling))[-MOST_LINES:]]


def not_installed(text: str) -> str | None:
    """The engine whose package the Python that was to run it has not, if that is why it ended."""
    found = _MISSING.search(text)
    return found[1] if found else None


def _short(line: str) -> str:
    return line if len(line) <= LONGEST else line[:LONGEST] + "…"
