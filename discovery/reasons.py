"""What went wrong, for a user to read? One line for each thing that did."""

from __future__ import annotations

from collections.abc import Iterator


def reasons(error: BaseException) -> Iterator[str]:
    """One line for each thing that went wrong; a group is only as informative as what is in it."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from reasons(inner)
        return
    text = " ".join(_told(error).split())
    own = isinstance(error, OSError) or type(error).__module__.partition(".")[0] in ("engines", "discovery", "router", "planner")
    yield text if own and text else f"{type(error).__name__}: {text}; --log-level debug shows where" if text else type(error).__name__


def _told(error: BaseException) -> str:
    """What it says, without the number that `str` puts before what the system says."""
    if not isinstance(error, OSError) or not error.strerror or not str(error).startswith("[Errno "):
        return str(error)
    return f"{error.filename}: {error.strerror}" if error.filename is not None else error.strerror
