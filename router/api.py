"""The shapes of the router's own answers to API clients."""

from __future__ import annotations

from typing import Final

import msgspec

ERROR_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
}
"""OpenAI's `error.type` by status; anything else is the server's fault."""


def api_error(status: int, message: str, kind: str | None = None, *, param: str | None = None) -> bytes:
    """An error body in OpenAI's shape; `kind` overrides the type that follows from the status."""
    kind = kind or ERROR_TYPES.get(status, "server_error")
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": status}})


def error_event(message: str, kind: str = "server_error") -> bytes:
    """A server-sent event that tells a streaming client that its answer broke off."""
    return b"data: " + msgspec.json.encode({"error": {"message": message, "type": kind, "param": None, "code": 502}}) + b"\n\n"
