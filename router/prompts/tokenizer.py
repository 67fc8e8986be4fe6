"""Which ids does a model's tokenizer make of a text?

Two libraries read `tokenizer.json`. `fastokens` is some thirty times faster; `tokenizers` is what the engine's answer is defined by.
The fast one is used where it agrees with the other on a fixed set of awkward texts.

Special tokens written in the text (`<|im_end|>`) become those tokens, as in the engines: neither tells them from the template's.
"""

from __future__ import annotations

import array
import sys
from collections.abc import Callable, Sequence
from typing import Literal

import fastokens
import tokenizers

from router.prompts.errors import TokenizerNotFound
from router.prompts.pieces import Pieces

Backend = Literal["fastokens", "tokenizers"]

LONG_CHARS: dict[Backend, int] = {"fastokens": 64 * 1024, "tokenizers": 4 * 1024}
"""Longer texts are encoded in a thread, so that the loop is not kept for more than some 10 ms (measured, see docs/prompts.md)."""

PIECE_CHARS: dict[Backend, int] = {"fastokens": 16 * 1024, "tokenizers": 4 * 1024}
"""Twice as long texts are encoded in pieces of about this length."""

CHECKED = (
    "",
    " ",
    "Hello, world! It's 3.14159 o'clock; don't we'll they're I'D.",
    "  leading and trailing   \n\n\t tabs\tand \r\n lines \n",
    "def f(x: int) -> str:\n    return f'{x:>10}'  # comment\n\n\nclass A:\n\tpass\n",
    '{"a": [1, 2.5e-3, null, true], "ключ": "значение"}',
    "naïve café, ½ ﬁ ligature, e\u0301 combining, İstanbul, ǅ, ß",
    "日本語のテキスト、한국어 텍스트, 中文文本。ไทย עברית العربية हिन्दी",
    "👩‍👩‍👧‍👦 🏳️‍🌈 🇩🇪 \u200b zero \u00a0 width \ufeff marks \x00\x07\x7f",
    "supercalifragilisticexpialidocious" * 4 + " " + "0123456789" * 5 + "=" * 70,
    "AbCdEf_snake_case-kebab-case.path/to/file https://example.org/?q=a%20b&c=d",
)
"""Texts on which the two libraries are compared when a tokenizer is loaded."""


class Tokenizer:
    """One model's tokenizer. Encoding is safe from several threads at once."""

    def __init__(self, source: bytes) -> None:
        """From the content of `tokenizer.json`. Raises `TokenizerNotFound` when no library can read it."""
        slow = _tokenizers(source)
        self.backend: Backend
        self.why: str = ""
        """Why the fast library is not used; empty when it is."""
        try:
            fast = _fastokens(source)
            self.why = _difference(fast, slow, _probes(slow))
        except Exception as error:  # noqa: BLE001 - a Rust library: a model it does not support can fail with anything
            fast, self.why = None, f"fastokens cannot read it: {error}"
        if fast is None or self.why:
            self.backend, pack_ = "tokenizers", _pack_slow(slow)
        else:
            self.backend, pack_ = "fastokens", _pack_fast(fast)
        self.pieces = Pieces(pack_, PIECE_CHARS[self.backend], _added(slow))
        self.special_ids: Callable[[str], int | None] = slow.token_to_id if fast is None or self.why else fast.token_to_id

    def stalls(self, chars: int) -> bool:
        """Whether encoding a text of this length here would keep the loop from other work for too long."""
        return chars > LONG_CHARS[self.backend]

    def encode(self, text: str, *, add_special_tokens: bool) -> bytes:
        """The ids as little-endian u32. Raises `UnicodeEncodeError` for a lone surrogate.

        About linear in the length of what of a text has not been encoded lately.
        """
        return self.pieces.encode(text, add_special_tokens=add_special_tokens)


def pack(ids: Sequence[int]) -> bytes:
    """Ids as little-endian u32. Raises `ValueError` when one is not a u32."""
    try:
        packed = array.array("I", ids)
    except (OverflowError, TypeError) as error:
        raise ValueError("a token id is not a number from 0 to 2³² − 1") from error
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack(packed: bytes) -> list[int]:
    """The ids again."""
    ids = array.array("I", packed)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tolist()


_Pack = Callable[[str, bool], bytes]


def _fastokens(source: bytes) -> fastokens.Tokenizer:
    made = fastokens.Tokenizer.from_json_str(source.decode())
    made.no_truncation()  # the file may carry the settings of some training run; engines switch both off
    made.no_padding()
    return made


def _tokenizers(source: bytes) -> tokenizers.Tokenizer:
    try:
        made = tokenizers.Tokenizer.from_buffer(source)
    except Exception as error:  # the binding raises plain Exception for every malformed file
        raise TokenizerNotFound(f"tokenizer.json cannot be read: {error}") from error
    made.no_truncation()
    made.no_padding()
    return made


def _pack_fast(made: fastokens.Tokenizer) -> _Pack:
    # One flat buffer, no Python object per token, and the GIL is free meanwhile.
    return lambda text, special: made.encode_batch_flat([text], add_special_tokens=special)[0]


def _pack_slow(made: tokenizers.Tokenizer) -> _Pack:
    # encode() keeps the GIL all the time; the batch call only while it makes the Python objects.
    return lambda text, special: pack(made.encode_batch_fast([text], add_special_tokens=special)[0].ids)


def _probes(slow: tokenizers.Tokenizer) -> list[str]:
    """The fixed texts, and the same with the tokenizer's own added tokens in the midst."""
    added = _added(slow)[:64]
    mixed = ["a".join(added), *(f"x{token} {token}\n{token}y" for token in added[:16])]
    return [*CHECKED, *mixed]


def _added(slow: tokenizers.Tokenizer) -> list[str]:
    """Its added tokens, in the order of their ids."""
    return [token.content for _, token in sorted(slow.get_added_tokens_decoder().items())]


def _difference(fast: fastokens.Tokenizer, slow: tokenizers.Tokenizer, texts: Sequence[str]) -> str:
    ours, theirs = _pack_fast(fast), _pack_slow(slow)
    for text in texts:
        for special in (False, True):
            if ours(text, special) != theirs(text, special):
                return f"fastokens differs from tokenizers on {text[:40]!r}"
    return ""
