"""What was found, and how is it told? One line for each thing that was looked at.

ok       cache       http://a:8000   1008 of 1023 prompt tokens were cached the second time; first token after 9 ms, 58 ms the first time
wrong    usage       http://a:8000   it does not say how much of a prompt it had cached → start it with --enable-prompt-tokens-details
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence

import msgspec


class State(enum.StrEnum):
    """How it is with one thing."""

    OK = "ok"
    WARNING = "warning"
    """It works, and not as well as it could."""
    WRONG = "wrong"
    UNKNOWN = "unknown"
    """It could not be looked at."""


class Finding(msgspec.Struct, frozen=True):
    """One line."""

    check: str
    """What was looked at, in a word: a heading of docs/troubleshooting.md."""
    subject: str
    """Whose."""
    state: State
    text: str
    mend: str = ""
    """What to do about it."""


def ok(check: str, subject: str, text: str) -> Finding:
    """It is as it should be."""
    return Finding(check, subject, State.OK, text)


def wrong(check: str, subject: str, text: str, mend: str) -> Finding:
    """It is not."""
    return Finding(check, subject, State.WRONG, text, mend)


def warning(check: str, subject: str, text: str, mend: str) -> Finding:
    """It could be better."""
    return Finding(check, subject, State.WARNING, text, mend)


def unknown(check: str, subject: str, text: str, mend: str = "") -> Finding:
    """It could not be looked at."""
    return Finding(check, subject, State.UNKNOWN, text, mend)


def healthy(findings: Iterable[Finding]) -> bool:
    """Whether nothing is wrong."""
    return all(finding.state is not State.WRONG for finding in findings)


def as_text(findings: Sequence[Finding]) -> str:
    """For people."""
    checks = max((len(finding.check) for finding in findings), default=0)
    subjects = max((len(finding.subject) for finding in findings), default=0)
    return "\n".join(
        f"{finding.state:<8} {finding.check:<{checks}}  {finding.subject:<{subjects}}  {finding.text}"
        + (f" → {finding.mend}" if finding.mend else "")
        for finding in findings
    )


def as_json(findings: Sequence[Finding]) -> str:
    """For programs: `{"ok": …, "findings": [{"check", "subject", "state", "text", "mend"}, …]}`."""
    return msgspec.json.encode({"ok": healthy(findings), "findings": findings}).decode()
