"""Which paths are an engine's inference API? One table: what is not in it is 404, and no engine ever sees it.

Paths are compared as they came, byte for byte: a doubled slash, a dot segment or an encoded character is another path.
"""

from __future__ import annotations

import enum
from typing import Final

import msgspec

from engines.types import EngineKind

BOTH: Final = frozenset(EngineKind)
VLLM: Final = frozenset({EngineKind.VLLM})
SGLANG: Final = frozenset({EngineKind.SGLANG})


class PromptForm(enum.Enum):
    """How a route's body carries its prompt."""

    CHAT = "chat"
    """`messages`, rendered by the chat template."""
    COMPLETION = "completion"
    """`prompt`: text, token ids, or a list of either."""
    GENERATE = "generate"
    """SGLang's `text` or `input_ids`; vLLM's `token_ids`."""
    MESSAGES = "messages"
    """Anthropic's Messages API: read where vLLM serves it."""
    RESPONSES = "responses"
    """OpenAI's Responses API: likewise."""
    UNREAD = "unread"
    """Not read: such requests are routed by load alone."""


class Route(msgspec.Struct, frozen=True):
    """One path that is passed on."""

    path: str
    form: PromptForm = PromptForm.UNREAD
    engines: frozenset[EngineKind] = BOTH
    websocket: bool = False
    """Opened by a GET that asks for a WebSocket; every other route is a POST."""
    takes_xargs: bool = False
    """vLLM reads `vllm_xargs` from its bodies."""

    @property
    def method(self) -> str:
        """The one method it takes."""
        return "GET" if self.websocket else "POST"


_ROUTES: Final = (
    Route("/v1/chat/completions", PromptForm.CHAT, takes_xargs=True),
    Route("/v1/completions", PromptForm.COMPLETION, takes_xargs=True),
    Route("/v1/responses", PromptForm.RESPONSES, takes_xargs=True),
    Route("/v1/messages", PromptForm.MESSAGES, takes_xargs=True),
    Route("/v1/messages/count_tokens"),
    Route("/v1/embeddings"),
    Route("/v1/rerank"),
    Route("/rerank", engines=VLLM),
    Route("/v2/rerank", engines=VLLM),
    Route("/v1/score"),
    Route("/score", engines=VLLM),
    Route("/pooling", engines=VLLM),
    Route("/classify"),
    Route("/v1/classify"),
    Route("/tokenize"),
    Route("/detokenize"),
    Route("/v1/tokenize", engines=SGLANG),
    Route("/v1/detokenize", engines=SGLANG),
    Route("/v1/audio/transcriptions"),
    Route("/v1/audio/translations", engines=VLLM),
    Route("/v1/realtime", websocket=True),
    Route("/v1/chat/completions/render", PromptForm.CHAT, VLLM),
    Route("/v1/completions/render", PromptForm.COMPLETION, VLLM),
    Route("/inference/v1/generate", PromptForm.GENERATE, VLLM),
    Route("/generate", PromptForm.GENERATE, SGLANG),
)

INFERENCE: Final[dict[bytes, Route]] = {route.path.encode(): route for route in _ROUTES}
