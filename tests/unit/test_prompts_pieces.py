from __future__ import annotations

import random

import pytest

from router.prompts.pieces import PROOFS, Pieces
from router.prompts.tokenizer import pack
from tests.unit.test_prompts_tokenizer import SOURCE, reference, with_beginning

PIECE = 64


def ids(text: str) -> bytes:
    """One id per character: nothing reaches across a cut."""
    return pack([ord(letter) for letter in text])


class Counted:
    """A tokenizer that says how much it had to encode."""

    def __init__(self) -> None:
        self.chars = 0

    def __call__(self, text: str, special: bool) -> bytes:
        self.chars += len(text)
        return ids(f"[{text}]" if special else text)


def words(count: int, seed: int = 0) -> str:
    return " ".join("".join(random.Random(f"{seed} {number}").choices("abcdef", k=5)) for number in range(count))


def trusted(pieces: Pieces) -> Pieces:
    """Past its proofs, on texts that do not come again."""
    for number in range(PROOFS):
        pieces.encode(words(200, -1 - number), add_special_tokens=False)
    return pieces


@pytest.mark.parametrize("special", [False, True])
def test_M11_a_text_that_has_grown_is_encoded_from_its_last_piece_on(special: bool) -> None:
    counted = Counted()
    pieces = trusted(Pieces(counted, PIECE, ()))
    text = words(1000)
    assert pieces.encode(text, add_special_tokens=special) == ids(f"[{text}]" if special else text)
    counted.chars = 0
    longer = f"{text} {words(3, 7)}"
    assert pieces.encode(longer, add_special_tokens=special) == ids(f"[{longer}]" if special else longer)
    assert 0 < counted.chars <= 3 * PIECE


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("source", [SOURCE, with_beginning()], ids=["plain", "with a beginning"])
def test_the_ids_of_pieces_are_those_of_the_whole(source: bytes, special: bool) -> None:
    slow = reference(source)

    def encode(text: str, special: bool) -> bytes:
        return pack(slow.encode(text, add_special_tokens=special).ids)

    pieces = trusted(Pieces(encode, PIECE, ()))
    assert pieces.whole == ""
    alphabet = "ab cé\nß 日本 🎉\tZ9'.,  \n\nыж"
    for seed in range(200):
        rng = random.Random(seed)
        text = "".join(rng.choices(alphabet, k=1000))
        assert pieces.encode(text, add_special_tokens=special) == encode(text, special)
        text = words(300, seed)
        assert pieces.encode(text, add_special_tokens=special) == encode(text, special)


def test_a_tokenizer_that_joins_across_words_is_never_given_pieces() -> None:
    pieces = Pieces(lambda text, _: ids(text.replace("d t", "D")), PIECE, ())
    assert "cut at" in pieces.whole
    text = "and that " * 100
    assert pieces.encode(text, add_special_tokens=False) == ids(text.replace("d t", "D"))


def test_one_that_puts_a_mark_before_each_text_is_never_given_pieces() -> None:
    assert Pieces(lambda text, _: ids("_" + text), PIECE, ()).whole


def test_one_that_is_found_out_by_a_long_text_is_believed_no_more(caplog: pytest.LogCaptureFixture) -> None:
    pieces = Pieces(lambda text, _: ids(text.replace("q x", "!")), PIECE, ())
    assert pieces.whole == ""
    text = "q xa" * 200
    assert pieces.encode(text, add_special_tokens=False) == ids(text.replace("q x", "!"))
    assert pieces.whole
    assert [record.getMessage() for record in caplog.records] == ["long prompts are encoded whole each time"]


def test_an_added_token_of_several_words_forbids_cutting() -> None:
    assert Pieces(Counted(), PIECE, ("<|end|>",)).whole == ""
    assert Pieces(Counted(), PIECE, ("<|end|>", "end of text")).whole


@pytest.mark.parametrize("text", ["", "a b", "x" * 1000, "日" * 1000, f"{'y' * 500} {'z' * 500}"])
def test_texts_with_no_place_to_cut_are_encoded_all_the_same(text: str) -> None:
    assert trusted(Pieces(Counted(), PIECE, ())).encode(text, add_special_tokens=False) == ids(text)
