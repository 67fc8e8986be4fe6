"""Distinct long prompts that begin alike within a set and differ at the end: what documents, system prompts and long chats look like."""

from __future__ import annotations

import functools
import random
from typing import NamedTuple

from tokenizers import Tokenizer

from tests.engines.environments import MODEL_SOURCE

WORDS_PER_PREFIX = 1500
PREFIXES = 12
ROOM = 7.5
"""How many of the prefixes an engine's cache is given room for: neither of two holds all, both together do."""

_WORDS = """
the of and to in a is that for it as was with be by on not he his but at are this have from or had an they which one you were all her
she there would their we him been has when who will no more if out so up said what its about than into them can only other time new some
could these two may first then do any like my now over such our man me even most made after also did many off before must well back
through years where much your way down should because long each just state people those too mister how little good world make very year
still see own work men day get here old life both between being under three never know same last another while us might great go come
since against right came take used himself few house american use place during high without again home around small however found part
school thought water
""".split()  # noqa: SIM905  a list of 168 strings is not easier to read


class Ask(NamedTuple):
    """One prompt: a prefix that others share and a question of its own."""

    prefix: int
    text: str


def prefix(name: str, number: int) -> str:
    """About 1,500 words that no other (name, number) begins with."""
    return f"{number} {name}: " + " ".join(random.Random(f"{name}/{number}").choices(_WORDS, k=WORDS_PER_PREFIX))


def tokens_of(text: str) -> int:
    """By the tiny model's tokenizer."""
    return len(ids_of(text))


def ids_of(text: str) -> list[int]:
    """By the tiny model's tokenizer."""
    return list(_tokenizer().encode(text).ids)


@functools.cache
def _tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL_SOURCE / "tokenizer.json"))


def blocks_for(prefixes: float, block_size: int) -> int:
    """KV blocks that so many prefixes take."""
    longest = max(tokens_of(prefix("size", number)) for number in range(PREFIXES))
    return round(prefixes * -(-longest // block_size))


def first_asks(name: str) -> list[Ask]:
    """Each prefix once."""
    return [Ask(number, f"{prefix(name, number)} First question.") for number in range(PREFIXES)]


def repeats(name: str, count: int) -> list[Ask]:
    """Every prefix equally often, in a mixed order that is the same for every name, each with another question."""
    order = [number % PREFIXES for number in range(count)]
    random.Random(count).shuffle(order)
    return [Ask(number, f"{prefix(name, number)} Question {turn}.") for turn, number in enumerate(order)]
