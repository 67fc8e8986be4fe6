"""What does the router itself say to API clients when something is wrong? Errors in the shape of the API that the path belongs to.

    OpenAI      {"error": {"message": …, "type": …, "param": null, "code": …}}         in a stream:  data: the same
    Anthropic   {"type": "error", "error": {"type": …, "message": …}}                  in a stream:  event: error, data: the same

Their types differ too: each SDK picks its exception by status, and some callers by type.
"""

from __future__ import annotations

from typing import Final

import msgspec

OPENAI_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    417: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
}
"""OpenAI's `error.type` by status; anything else is the server's fault."""

ANTHROPIC_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "request_too_large",
    417: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Anthropic's, as of its API reference; anything else is `api_error`."""


def api_error(path: bytes, status: int, message: str, code: str | None = None) -> bytes:
    """An error body. `code` says what happened in one word; it is the status when there is no better word."""
    return msgspec.json.encode(_error(path, status, message, code))


def error_event(path: bytes, status: int, message: str, code: str) -> bytes:
    """A server-sent event that tells a streaming client that its answer broke off.

    Named `error` where the API names its events, which is what its SDK raises on.
    """
    if path.startswith(b"/v1/responses"):
        told = msgspec.json.encode({"type": "error", "code": code, "message": message, "param": None, "sequence_number": 0})
        return b"event: error\ndata: " + told + b"\n\n"
    name = b"event: error\n" if is_anthropic(path) else b""
    return name + b"data: " + api_error(path, status, message, code) + b"\n\n"


def is_anthropic(path: bytes) -> bool:
    """Whether a path belongs to Anthropic's Messages API."""
    return path == b"/v1/messages" or path.startswith(b"/v1/messages/")


def _error(path: bytes, status: int, message: str, code: str | None) -> dict[str, object]:
    if is_anthropic(path):
        return {"type": "error", "error": {"type": ANTHROPIC_TYPES.get(status, "api_error"), "message": message}}
    kind = OPENAI_TYPES.get(status, "server_error")
    return {"error": {"message": message, "type": kind, "param": None, "code": code or status}}
