"""May these two engines share this request, and does it pay? What is known of pairs, and of requests that cannot be shared.

The chooser has chosen who decodes; this says whether somebody else computes the prompt. It learns from what such requests took, and
leaves a pair alone for a while whose transfers fail. Pure: `now` is an argument.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from router.disagg import Measured, Mode, Paces, Split, StaticRule, Why, decide
from router.routes import PromptForm

if TYPE_CHECKING:
    from engines.types import Endpoint
    from router.disagg import Facts
    from router.intake import Asked

SPLIT_PATHS: Final = frozenset({"/v1/chat/completions", "/v1/completions", "/inference/v1/generate", "/generate"})
LEFT_ALONE_S: Final = (2.0, 60.0)
"""How long a pair is left alone after its first failed transfer; doubles with each further one, up to the second number."""
_FALSE: Final = frozenset({b"null", b"false"})
_MANY_OPENINGS: Final = (b'["', b"[[", b"[{")

Pair = tuple["Endpoint", "Endpoint"]
"""Prefill, decode."""


class DisaggRules(msgspec.Struct, frozen=True):
    """What the operator wants."""

    mode: Mode = Mode.ALWAYS
    static: StaticRule = StaticRule()
    enforce: bool = False
    """Without a usable prefill engine, decode engines compute no prompts in its place."""


class _Broken(msgspec.Struct):
    times: int = 0
    until: float = 0.0


class Pairing:
    """What is known of all pairs."""

    def __init__(self, rules: DisaggRules, bytes_per_token: dict[str, int] | None = None) -> None:
        """`bytes_per_token` of KV cache, by model."""
        self.rules = rules
        self.bytes_per_token = {} if bytes_per_token is None else bytes_per_token
        self._prefill, self._link, self._local = Paces(), Paces(), Paces()
        self._broken: dict[Pair, _Broken] = {}

    def split(self, asked: Asked, facts: Facts, pair: Pair, now: float, *, must: bool) -> Split:
        """Where the prompt is computed. `must`: the decode engine cannot compute it, so there is nothing to decide."""
        if must:
            return Split(Why.ALWAYS, facts)
        paces = Measured(
            self._prefill.of(pair), self._link.of(pair), self._local.of(pair[1]), self.bytes_per_token.get(asked.request.model, 0)
        )
        return decide(self.rules.mode, self.rules.static, facts, paces, now)

    def usable(self, pair: Pair, now: float) -> bool:
        """Whether the pair is not being left alone."""
        broken = self._broken.get(pair)
        return broken is None or broken.until <= now

    def failed(self, pair: Pair, now: float) -> None:
        """A transfer between them has failed."""
        broken = self._broken.setdefault(pair, _Broken())
        least, most = LEFT_ALONE_S
        broken.until = now + min(most, least * 2**broken.times)
        broken.times = min(broken.times + 1, 10)

    def prefilled(self, pair: Pair, tokens: int, seconds: float, now: float) -> None:
        """A prompt has been computed for the pair, `tokens` having been waited for and computed."""
        self._prefill.took(pair, tokens, seconds, now)

    def transferred(self, pair: Pair, count: int, seconds: float, now: float) -> None:
        """So many bytes have been handed over."""
        self._broken.pop(pair, None)
        self._link.took(pair, count, seconds, now)

    def computed(self, decode: Endpoint, tokens: int, seconds: float, now: float) -> None:
        """A decode engine has computed a prompt itself."""
        self._local.took(decode, tokens, seconds, now)

    def forget(self, endpoint: Endpoint) -> None:
        """The endpoint has left."""
        self._broken = {pair: broken for pair, broken in self._broken.items() if endpoint not in pair}
        for paces in (self._prefill, self._link, self._local):
            paces.forget(lambda key: key == endpoint or (isinstance(key, tuple) and endpoint in key))


def undivided(asked: Asked) -> Why | None:
    """Why a request cannot be shared between two engines, whatever the engines; None when it can."""
    if asked.route.path not in SPLIT_PATHS:
        return Why.ROUTE
    if not asked.tokens:
        return Why.UNTOKENIZED
    fields = asked.fields()
    if asked.route.form is PromptForm.GENERATE and "sampling_params" in fields:
        fields = fields | _object(fields["sampling_params"])
    if any(_number(fields.get(name)) > 1 for name in ("n", "best_of")) or _says(fields.get("use_beam_search")):
        return Why.SEQUENCES
    prompts = [fields[name] for name in ("prompt", "text", "input_ids") if name in fields]
    if any(bytes(prompt[:64]).replace(b" ", b"").startswith(_MANY_OPENINGS) for prompt in map(bytes, prompts)):
        return Why.SEQUENCES
    if _says(fields.get("echo")) or _says(fields.get("prompt_logprobs")):
        return Why.PROMPT_ASKED
    return None


def same_tokens(asked: Asked, prefill: Endpoint, decode: Endpoint) -> bool:
    """Whether both engines see the same ids: only then are the blocks of one those that the other wants."""
    return asked.tokens.get(prefill.engine) is asked.tokens.get(decode.engine) is not None


def _object(raw: msgspec.Raw) -> dict[str, msgspec.Raw]:
    try:
        return msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    except msgspec.DecodeError:
        return {}


def _number(raw: msgspec.Raw | None) -> int:
    try:
        return 0 if raw is None else msgspec.json.decode(raw, type=int)
    except msgspec.DecodeError:
        return 0


def _says(raw: msgspec.Raw | None) -> bool:
    """Whether a field is there and asks for something; a 0 asks for the prompt's own log-probabilities."""
    return raw is not None and bytes(raw) not in _FALSE
