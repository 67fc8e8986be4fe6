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


def api_error(status: int, message: str, code: str | None = None) -> bytes:
    """An error body in OpenAI's shape. `code` says what happened in one word; it is the status when there is no better word."""
    kind = ERROR_TYPES.get(status, "server_error")
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": None, "code": code or status}})


def error_event(status: int, message: str, code: str) -> bytes:
    """A server-sent event that tells a streaming client that its answer broke off."""
    return b"data: " + api_error(status, message, code) + b"\n\n"
