"""What does an engine's own tokenizer say? The way out for prompts that cannot be rendered here.

Bounded in time, and not tried again for a while by an engine that did not answer: a slow tokenizer must not slow every request.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from engines.errors import EngineAnswered, EngineBroken, EngineError
from router.prompts.asking import PATH
from router.prompts.errors import NotRenderable
from router.prompts.parity import REFUSALS
from router.prompts.tokenizer import pack

Post = Callable[[str, Any], Awaitable[Any]]
"""`await post(path, body)`: the engine's JSON answer, as `EngineClient.post_json`. Raises `EngineError`."""

REST_S = 10.0
"""How long an engine is left alone after it did not answer."""


class Asker:
    """Asks one engine's `/tokenize`."""

    def __init__(self, post: Post, model: str, *, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.model = model
        self._post = post
        self._timeout_s = timeout_s
        self._clock = clock
        self._rests_until = float("-inf")
        self._rests_for = ""

    async def ids(self, body: dict[str, Any]) -> list[int]:
        """The ids of a prompt. Raises `EngineError`."""
        answer = await self._post(PATH, body)
        tokens = answer.get("tokens") if isinstance(answer, dict) else None
        if not isinstance(tokens, list) or not all(isinstance(token, int) for token in tokens):
            raise EngineBroken(f"{PATH}: no list of tokens in the answer")
        return tokens

    async def packed(self, body: dict[str, Any]) -> bytes:
        """The packed ids of a prompt, within the time limit. Raises `NotRenderable`."""
        if self._clock() < self._rests_until:
            raise NotRenderable(f"the engine's {PATH} is left alone for a while: {self._rests_for}")
        try:
            async with asyncio.timeout(self._timeout_s):
                return pack(await self.ids(body))
        except TimeoutError as error:
            raise self._rest(f"no answer within {self._timeout_s:g} s") from error
        except EngineAnswered as answer:
            if answer.status in REFUSALS:
                raise NotRenderable(f"the engine's {PATH} refuses the prompt: {answer}", ask_engine=False) from answer
            raise self._rest(str(answer)) from answer
        except (EngineError, ValueError) as error:
            raise self._rest(str(error)) from error

    def _rest(self, why: str) -> NotRenderable:
        self._rests_until, self._rests_for = self._clock() + REST_S, why
        return NotRenderable(f"the engine's {PATH}: {why}")
