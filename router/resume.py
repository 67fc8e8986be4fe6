"""An engine has died in the midst of a text: from where, and how, can another one go on so that nobody could tell?

    decide ──▶ Plan ──first──▶ engine ──▶ Transcript ──▶ client
       │         └──continued──▶ another engine ──┘
       └── Obstacle: why not

Engines tell the token ids behind what they stream when they are asked to (`return_token_ids`). The router asks, keeps the ids, and hands
on the stream without them. When the engine dies, another one of the same kind gets the prompt's ids with those delivered behind them:
the same prefix, so the same next token. Exact means exact: at temperature 0 the text is the one an undisturbed engine would have given;
above, it is drawn from the same distribution. Whatever depends on more than the ids before it is not resumed (`Obstacle`).
"""

from __future__ import annotations

import enum
from typing import Any, Final

import msgspec
from msgspec import Raw

from engines.types import EngineKind
from router.routes import PromptForm, Route

DEFAULT_COMPLETION_TOKENS: Final = 16
"""What both engines generate for a completion that names no limit."""


class Obstacle(enum.StrEnum):
    """Why a broken stream does not go on elsewhere. Closed: it is a metric's label."""

    # what the client asks for
    CHOICES = "choices"
    """More than one answer: `n`, `best_of`, beam search, several prompts."""
    TOOLS = "tools"
    STRUCTURED = "structured_output"
    """A grammar's state is not told by the ids."""
    LOGPROBS = "logprobs"
    TOKEN_IDS = "token_ids"  # noqa: S105  no secret
    """The client sees the ids itself, and those of text held back too."""
    SEED = "seed"
    """Another engine would begin the seeded draws anew."""
    PENALTIES = "penalties"
    """They count generated tokens, and a continuation has those in its prompt."""
    STOP = "stop_strings"
    ECHO = "echo"
    MEDIA = "media"
    """Images, audio, embeddings: the ids do not tell them."""
    PARAMETER = "parameter"
    """A field that is not known here to leave a continuation exact."""
    ENGINE = "engine"
    """SGLang tells no ids in the stream of a chat."""
    # what was seen of the stream
    NO_IDS = "no_ids"
    """The engine told none."""
    UNREADABLE = "unreadable"
    """Events of no known form."""
    PARSED = "parsed"
    """The engine parts reasoning or tool calls from the text."""
    UNCERTAIN = "uncertain"
    """Sampled text was delivered behind the last mark."""
    # what came of resuming
    NO_ENGINE = "no_engine"
    OFTEN = "too_often"
    REFUSED = "refused"
    """The other engine answered with an error."""
    DIVERGED = "diverged"
    """The other engine did not take the ids, or does not continue as the first one had begun."""


_ANY: Final = frozenset({
    "model", "messages", "prompt", "stream", "stream_options", "stream_interval", "max_tokens", "max_completion_tokens", "min_tokens",
    "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "repetition_penalty", "ignore_eos", "logit_bias",
    "allowed_token_ids", "skip_special_tokens", "user", "priority", "cache_salt", "session_id", "request_id", "rid", "metadata", "store",
    "service_tier", "prompt_cache_key", "safety_identifier", "parallel_tool_calls", "add_generation_prompt", "continue_final_message",
    "add_special_tokens", "documents", "chat_template", "chat_template_kwargs", "reasoning_effort",
})  # fmt: skip
"""What leaves a continuation exact whatever its value: it shapes the prompt, whose ids are known, or each token by itself; limits are
lowered by what was delivered; or it is looked at apart."""

_NEUTRAL: Final[dict[str, tuple[Obstacle, tuple[object, ...]]]] = {
    "n": (Obstacle.CHOICES, (1,)),
    "best_of": (Obstacle.CHOICES, (1,)),
    "use_beam_search": (Obstacle.CHOICES, (False,)),
    "tools": (Obstacle.TOOLS, ([],)),
    "tool_choice": (Obstacle.TOOLS, ("none", "auto")),
    "functions": (Obstacle.TOOLS, ([],)),
    "function_call": (Obstacle.TOOLS, ("none",)),
    "response_format": (Obstacle.STRUCTURED, ({"type": "text"},)),
    "structured_outputs": (Obstacle.STRUCTURED, ()),
    "guided_json": (Obstacle.STRUCTURED, ()),
    "guided_regex": (Obstacle.STRUCTURED, ()),
    "guided_choice": (Obstacle.STRUCTURED, ()),
    "guided_grammar": (Obstacle.STRUCTURED, ()),
    "json_schema": (Obstacle.STRUCTURED, ()),
    "regex": (Obstacle.STRUCTURED, ()),
    "ebnf": (Obstacle.STRUCTURED, ()),
    "logprobs": (Obstacle.LOGPROBS, (False,)),
    "top_logprobs": (Obstacle.LOGPROBS, (0,)),
    "prompt_logprobs": (Obstacle.LOGPROBS, ()),
    "logprob_token_ids": (Obstacle.LOGPROBS, ()),
    "return_token_ids": (Obstacle.TOKEN_IDS, (False,)),
    "return_tokens_as_token_ids": (Obstacle.TOKEN_IDS, (False,)),
    "presence_penalty": (Obstacle.PENALTIES, (0,)),
    "frequency_penalty": (Obstacle.PENALTIES, (0,)),
    "include_stop_str_in_output": (Obstacle.STOP, (False,)),
    "echo": (Obstacle.ECHO, (False,)),
    "suffix": (Obstacle.ECHO, ("",)),
    "prompt_embeds": (Obstacle.MEDIA, ()),
    "modalities": (Obstacle.MEDIA, (["text"],)),
    "bad_words": (Obstacle.PARAMETER, ([],)),
    "length_penalty": (Obstacle.PARAMETER, (1,)),
    "include_reasoning": (Obstacle.PARAMETER, (True,)),
    "spaces_between_special_tokens": (Obstacle.PARAMETER, (True,)),
}
"""What only passes with these values (or null), and what it is an obstacle by otherwise."""


class Plan(msgspec.Struct, frozen=True):
    """A stream that can go on elsewhere, as far as the request tells."""

    form: PromptForm
    kind: EngineKind
    fields: dict[str, Raw]
    """The request's body."""
    greedy: bool
    """Equal ids before it give equal tokens."""
    held_back: int
    """Characters that the engine holds back, lest they begin a stop string."""

    @property
    def wants_usage(self) -> bool:
        """Whether the stream ends with the token counts."""
        options = self.value("stream_options")
        return isinstance(options, dict) and options.get("include_usage") is True

    def first(self) -> bytes:
        """The body for the first engine."""
        return msgspec.json.encode(self.fields | {"return_token_ids": True})

    def continued(self, prompt: list[int], generated: int) -> bytes:
        """The body for an engine that goes on behind `prompt`, of which the last `generated` ids are the answer's."""
        fields: dict[str, object] = dict(self.fields)
        for name in ("max_tokens", "max_completion_tokens", "min_tokens"):
            if isinstance(tokens := self.value(name), int):
                fields[name] = max(0, tokens - generated)
        if self.form is PromptForm.CHAT:
            fields["kv_transfer_params"] = {"prompt_token_ids": prompt}
        else:
            fields["prompt"] = prompt
            if "max_tokens" not in fields:
                fields["max_tokens"] = DEFAULT_COMPLETION_TOKENS - generated
        return msgspec.json.encode(fields | {"return_token_ids": True})

    def value(self, name: str) -> Any:  # noqa: ANN401  JSON
        """A field of the body, decoded; None when it has none."""
        return msgspec.json.decode(self.fields[name]) if name in self.fields else None


class _Part(msgspec.Struct):
    type: str = ""


class _Message(msgspec.Struct):
    content: str | list[str | _Part] | None = None


_fields_decoder = msgspec.json.Decoder(dict[str, Raw])


def decide(route: Route, body: bytes, kind: EngineKind) -> Plan | Obstacle | None:
    """Whether the answer to `body` can go on elsewhere: how, or what is in the way. None where that is no question: no stream of text.

    `body` has been read before and holds no field that must not pass (`openai.strip`).
    """
    if route.path not in ("/v1/chat/completions", "/v1/completions"):
        return None
    try:
        return _decided(route, _fields_decoder.decode(body), kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return Obstacle.PARAMETER  # in a field that nobody here has read, for the engine to complain about


def _decided(route: Route, fields: dict[str, Raw], kind: EngineKind) -> Plan | Obstacle | None:
    plan = Plan(route.form, kind, fields, greedy=False, held_back=0)
    if plan.value("stream") is not True:
        return None
    if kind is EngineKind.SGLANG and route.form is PromptForm.CHAT:
        return Obstacle.ENGINE
    greedy = plan.value("temperature") == 0
    stop = plan.value("stop") or []
    obstacle = _obstacle(plan, greedy=greedy, stop=stop)
    if obstacle is not None:
        return obstacle
    held_back = max(map(len, [stop] if isinstance(stop, str) else stop), default=1) - 1
    return Plan(route.form, kind, fields, greedy, held_back)


def _obstacle(plan: Plan, *, greedy: bool, stop: object) -> Obstacle | None:
    vllm = plan.kind is EngineKind.VLLM
    if not greedy and plan.value("seed") is not None:
        return Obstacle.SEED
    if stop and not (greedy and vllm and _strings(stop)):
        return Obstacle.STOP
    if not vllm and plan.value("repetition_penalty") not in (None, 1):
        return Obstacle.PENALTIES  # vLLM's asks whether a token occurs in prompt or answer; SGLang's, what was generated
    for name in plan.fields.keys() - _ANY:
        value = plan.value(name)
        obstacle, neutral = _NEUTRAL.get(name, (Obstacle.PARAMETER, ()))
        if value is not None and (type(value) is bool, value) not in [(type(one) is bool, one) for one in neutral]:
            return obstacle
    return _unusual_prompt(plan)


def _unusual_prompt(plan: Plan) -> Obstacle | None:
    """What is in the way of a prompt that is more than one text."""
    if plan.form is PromptForm.CHAT:
        try:
            messages = msgspec.json.decode(plan.fields["messages"], type=list[_Message])
        except (KeyError, msgspec.ValidationError):
            return Obstacle.MEDIA
        parts = [part for message in messages if isinstance(message.content, list) for part in message.content]
        return None if all(isinstance(part, str) or part.type == "text" for part in parts) else Obstacle.MEDIA
    prompt = plan.value("prompt")
    one = isinstance(prompt, str) or (isinstance(prompt, list) and bool(prompt) and all(type(token) is int for token in prompt))
    return None if one else Obstacle.CHOICES


def _strings(stop: object) -> bool:
    return isinstance(stop, str) or (isinstance(stop, list) and all(isinstance(string, str) and string for string in stop))
