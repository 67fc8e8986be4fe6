"""How is a long text that is known but for its end encoded without encoding it again? In pieces, cut where no token can reach across.

    "… so the last of | them came to | an end …"       cut before a space or line feed between two letters, every few thousand characters

Where a piece ends depends only on what comes before, so a conversation that has grown by a turn has the same pieces as before, but for the
last ones. Tokenizers of today part words before they join anything, but not all of them need do so: cutting is tried out when a
tokenizer is loaded, and its first long texts are encoded whole as well. One that differs anywhere is not cut again.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from discovery.logs import event

PIECES: Final = 2048
"""Pieces remembered per tokenizer: of English, some 8 M tokens in 64 MB; each takes at most `MOST_CHARS` characters and their ids."""
MOST_CHARS: Final = 4
"""How many times longer than meant a piece may be and still be remembered: there is not always a place to cut."""
PROOFS: Final = 8
"""Long texts that are encoded whole as well before the pieces are trusted."""

Pack = Callable[[str, bool], bytes]
"""A text and whether special tokens are added to its packed ids."""

_CUT: Final = re.compile(r"(?<=[^\W\d_])[ \n](?=[^\W\d_])")
_TRIED: Final = (
    "A word then another one and more\nof them on a new line\nand\nso on Until THE End",
    "naïve café Straße İstanbul ǅ und so weiter\nключ значение слово 한국어 텍스트 문장 हिन्दी पाठ العربية نص",
    "don't we'll they're I'D say so\n\n  def f(x) return x if y else z\n\tpass  now",
    "snake_case and CamelCase words x\ny z\n a b\n\nc d   e f",
)

_log = logging.getLogger(__name__)


class Pieces:
    """One tokenizer's memory of pieces. Safe from several threads at once."""

    def __init__(self, pack: Pack, piece_chars: int, added_tokens: Iterable[str]) -> None:
        """`added_tokens` are found in a text before it is parted into words: one with a place to cut in it forbids cutting."""
        self._pack = pack
        self._piece_chars = piece_chars
        self._remembered = functools.lru_cache(PIECES)(self._plain)
        self._proofs = PROOFS
        self._around = _around(pack)
        self._whole = "an added token has words in it" if any(map(_CUT.search, added_tokens)) else self._difference(_TRIED)

    @property
    def whole(self) -> str:
        """Why texts are never cut; empty when they are."""
        return self._whole

    def encode(self, text: str, *, add_special_tokens: bool) -> bytes:
        """The packed ids of a text, the same as those of the whole text."""
        around = self._around if add_special_tokens else (b"", b"")
        if self._whole or around is None or len(text) < 2 * self._piece_chars:
            return self._pack(text, add_special_tokens)
        ids = b"".join((around[0], *map(self._encode_piece, self._cut(text)), around[1]))
        if self._proofs > 0:
            self._proofs -= 1
            whole = self._pack(text, add_special_tokens)
            if whole != ids:
                self._whole = "a text in pieces has other ids than the whole"
                event(_log, logging.WARNING, "long prompts are encoded whole each time", reason=self._whole)
                return whole
        return ids

    def _encode_piece(self, piece: str) -> bytes:
        if len(piece) > MOST_CHARS * self._piece_chars:
            return self._plain(piece)
        return self._remembered(piece)

    def _plain(self, text: str) -> bytes:
        return self._pack(text, False)  # noqa: FBT003  a lambda has no keywords

    def _cut(self, text: str) -> Iterator[str]:
        start, end = 0, len(text)
        while end - start > self._piece_chars:
            found = _CUT.search(text, start + self._piece_chars)
            if found is None:
                break
            yield text[start : found.start()]
            start = found.start()
        yield text[start:]

    def _difference(self, texts: Iterable[str]) -> str:
        for text in texts:
            whole = self._plain(text)
            for place in _CUT.finditer(text):
                if self._plain(text[: place.start()]) + self._plain(text[place.start() :]) != whole:
                    return f"cut at {place.start()}, {text[:40]!r} has other ids"
        return ""


def _around(pack: Pack) -> tuple[bytes, bytes] | None:
    """The packed special tokens before and behind a text; None where they depend on it."""
    found = set()
    for text in ("a", "Two words", "3 + 4"):
        plain, marked = pack(text, False), pack(text, True)  # noqa: FBT003  a lambda has no keywords
        before, inside, behind = marked.partition(plain)
        if not inside or len(before) % 4 or len(behind) % 4:
            return None
        found.add((before, behind))
    return found.pop() if len(found) == 1 else None
