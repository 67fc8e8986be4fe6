"""What is an engine asked to continue, and how far has it come? A prompt, and the sequence that grows from it."""

from __future__ import annotations

from array import array

import msgspec

from engines.simulator.handover import Contents, Fetch, Handover, Never, contents, difference
from engines.simulator.hashes import Chain
from engines.simulator.words import Words


class Prompt(msgspec.Struct, frozen=True):
    """What is to be continued, and how far."""

    tokens: list[int]
    limit: int
    """Tokens to generate."""
    ending: str = "length"
    """The finish reason once they are generated."""
    seed: int = 0
    salt: str | None = None
    adapter: str | None = None
    session: str | None = None
    tells_hits: bool = False
    """Blocks found in the cache are announced again (vLLM's `kv_cache_report_mode: full`)."""
    handover: Handover | None = None


class Sequence:
    """One prompt under way, of which only the length and the names of its blocks are known: its blocks, and how far it has come.

    That is all there is in virtual time. Where tokens are to be told, it is a `Spoken` one.
    """

    __slots__ = (
        "blocks",
        "cached",
        "computed",
        "done",
        "fetches",
        "length",
        "names",
        "preempted",
        "prompt",
        "prompt_length",
        "spoiled",
        "stored",
    )

    def __init__(self, prompt: Prompt, length: int, names: list[int]) -> None:
        """`names` are those of all full blocks it comes to have, generated ones included, or grow with it."""
        self.prompt = prompt
        self.prompt_length = length
        self.length = length
        """Tokens of the prompt, and those generated."""
        self.names = names
        self.blocks: list[int] = []
        self.computed = 0
        """Tokens whose KV is there."""
        self.stored = 0
        """Leading blocks that were hits or have been announced."""
        self.cached = 0
        """Prompt tokens found in the cache when it was first scheduled."""
        self.preempted = False
        self.fetches = isinstance(prompt.handover, Fetch | Never)
        """Whether KV from another engine is awaited."""
        self.spoiled = 0
        """Not 0 where some of its KV is that of other tokens, and how; see `handover.difference`."""
        self.done = False

    @property
    def generated(self) -> int:
        """Tokens generated so far."""
        return self.length - self.prompt_length

    @property
    def prefilled(self) -> bool:
        """Whether the whole prompt has been computed."""
        return self.computed >= self.prompt_length

    def gain(self) -> int:
        """One more token is generated; which."""
        self.length += 1
        return 0

    def told(self, first: int, last: int) -> tuple[int, ...]:  # noqa: ARG002 - they have no tokens
        """The tokens from position `first` to before `last`, as events tell them."""
        return ()

    def difference(self, given: Contents, size: int) -> int:  # noqa: ARG002 - nothing is given
        """How what is `given` for the last blocks of its prompt differs from what they are: see `handover.difference`."""
        return 0


class Spoken(Sequence):
    """A sequence with its tokens."""

    __slots__ = ("_words", "chain", "tokens")

    def __init__(self, prompt: Prompt, chain: Chain, words: Words) -> None:
        super().__init__(prompt, len(prompt.tokens), chain.names)
        self.chain = chain
        self.tokens = array("I", prompt.tokens)
        """The prompt and what has been generated."""
        self._words = words
        chain.extend(self.tokens)

    def gain(self) -> int:
        """The token that follows from all before it."""
        token = self._words.following(self.tokens, self.prompt.seed ^ self.spoiled)
        self.tokens.append(token)
        self.length += 1
        self.chain.extend(self.tokens)
        return token

    def told(self, first: int, last: int) -> tuple[int, ...]:
        """See `Sequence.told`."""
        return tuple(self.tokens[first:last])

    def difference(self, given: Contents, size: int) -> int:
        """See `Sequence.difference`."""
        return difference(given, contents(self.prompt.tokens, size, self.prompt.adapter)[self.stored :])
