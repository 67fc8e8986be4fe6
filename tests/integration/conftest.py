"""What integration tests share: a log that can be read."""

from __future__ import annotations

import io
import json
import logging
from typing import Any

import pytest

from discovery import logs


class Log:
    """What the process has logged, at every level, as it would have been written."""

    def __init__(self) -> None:
        self.stream = io.StringIO()

    @property
    def text(self) -> str:
        """All of it."""
        for handler in logging.getLogger().handlers:
            handler.flush()
        return self.stream.getvalue()

    def lines(self, message: str = "request") -> list[dict[str, Any]]:
        """The lines with this message; of each request, unless another is named."""
        return [line for line in map(json.loads, self.text.splitlines()) if line["message"] == message]


@pytest.fixture
def logged(logging_as_it_was: None) -> Log:
    """The log, from here on."""
    log = Log()
    logs.configure("debug", "json", log.stream)
    return log
