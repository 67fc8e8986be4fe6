"""What can go wrong with an engine, divided by what the caller may do next.

Foreign exceptions (sockets, aiohttp, ZMQ) are mapped to these once, at the edge that sees them.
"""

from __future__ import annotations

import errno

OUR_OWN = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL})
"""Why a connection cannot be made that say nothing of the engine: this process is short of something."""


class EngineError(Exception):
    """Anything an engine did, or failed to do."""


class EngineUnreachable(EngineError):
    """No connection could be made: nothing reached the engine, so anything may be tried elsewhere."""

    def __init__(self, message: str = "", *, number: int | None = None) -> None:
        super().__init__(message)
        self.number = number
        """The `errno`, where there was one: `ECONNREFUSED` says for certain that nobody listens, `EMFILE` only something about us."""

    @property
    def ours(self) -> bool:
        """Whether this process is at fault and not the engine."""
        return self.number in OUR_OWN


class EngineConnectTimeout(EngineUnreachable):
    """No connection within the time allowed."""

    def __init__(self, timeout_s: float) -> None:
        super().__init__(f"connect timed out after {timeout_s:g} s")
        self.stage = "connect"
        self.timeout_s = timeout_s


class EngineClosed(EngineError):
    """The connection ended before a response began: the engine may or may not have seen the request."""


class EngineTimeout(EngineError):
    """No response head, or no further bytes, within the time allowed; `stage` names which."""

    def __init__(self, stage: str, timeout_s: float) -> None:
        super().__init__(f"{stage} timed out after {timeout_s:g} s")
        self.stage = stage
        self.timeout_s = timeout_s


class EngineBroken(EngineError):
    """The response began and then broke off or was not HTTP: it can only be continued, never repeated."""


class TransferFailed(EngineError):
    """A decode engine did not get the KV cache of a prompt that another engine had computed for it; no token has been generated."""


class NotAnEngine(EngineError):
    """Something answered at the URL, and it is neither vLLM nor SGLang; the message says what it was."""


class EngineAnswered(EngineError):
    """A control-plane path answered, but not with a 2xx; `server` is its `Server` header and `excerpt` its first words, on one line."""

    def __init__(self, status: int, path: str, *, server: str = "", excerpt: str = "") -> None:
        said = f" ({excerpt!r})" if excerpt else ""
        hint = ": it wants an API key, or another one" if status in {401, 403} else ""
        super().__init__(f"{server or 'something'} answered {status} at {path}{said}{hint}")
        self.status = status
        self.path = path
        self.server = server
        self.excerpt = excerpt


class EngineNotReady(EngineError):
    """It is an engine, and it says that it does not serve now: still loading, draining, or its core is dead."""
