"""What can stand between a prompt and its token ids.

None of these is an engine's fault, and only one of them is the client's: `PromptRejected`.
"""

from __future__ import annotations


class NotRenderable(Exception):
    """The ids this prompt will have cannot be told here; `reason` says why, in words fit for a log line.

    The request is still served: routing asks the engine's own tokenizer when `ask_engine`, else goes without overlap.
    """

    def __init__(self, reason: str, *, ask_engine: bool = True) -> None:
        super().__init__(reason)
        self.reason = reason
        self.ask_engine = ask_engine
        """False where the engine's `/tokenize` would be wrong too, or too dear (it would fetch and decode images)."""


class PromptRejected(Exception):
    """The model's chat template refuses this conversation (`raise_exception`): a 400 for the client, with the template's words."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class TokenizerNotFound(Exception):
    """No tokenizer files were found; the message says where was looked, and what to do."""
