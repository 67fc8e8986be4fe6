from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor  # noqa: TID251  that encoding is safe from several threads is the point
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from router.prompts import tokenizer as module
from router.prompts.errors import TokenizerNotFound
from router.prompts.files import find_model_files
from router.prompts.tokenizer import CHECKED, Tokenizer, pack, unpack

MODEL = Path(__file__).parents[2] / "engines" / "simulator" / "model"
SOURCE = find_model_files(str(MODEL)).tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(SOURCE)


def reference(source: bytes = SOURCE) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_buffer(source)


def with_beginning(source: bytes = SOURCE) -> bytes:
    """The same tokenizer, made to put its first special token before every text."""
    whole: dict[str, Any] = json.loads(source)
    token = whole["added_tokens"][0]
    whole["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": token["content"], "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {token["content"]: {"id": token["content"], "ids": [token["id"]], "tokens": [token["content"]]}},
    }
    return json.dumps(whole).encode()


def test_the_fast_library_is_used_where_it_agrees(tokenizer: Tokenizer) -> None:
    assert (tokenizer.backend, tokenizer.why) == ("fastokens", "")


@pytest.mark.parametrize("text", [*CHECKED, "<|im_start|>user\nhi<|im_end|> <|im_end|>x", "\n".join(CHECKED) * 20])
@pytest.mark.parametrize("special", [False, True])
def test_ids_are_those_of_the_reference(tokenizer: Tokenizer, text: str, special: bool) -> None:
    assert unpack(tokenizer.encode(text, add_special_tokens=special)) == reference().encode(text, add_special_tokens=special).ids


def test_special_tokens_in_a_text_are_those_tokens(tokenizer: Tokenizer) -> None:
    assert unpack(tokenizer.encode("<|im_end|>", add_special_tokens=False)) == [reference().token_to_id("<|im_end|>")]


def test_special_tokens_are_added_only_when_asked_for() -> None:
    added = Tokenizer(with_beginning())
    without, with_ = (unpack(added.encode("hello", add_special_tokens=special)) for special in (False, True))
    assert with_ == [0, *without]


def test_a_file_that_carries_truncation_or_padding_truncates_and_pads_nothing() -> None:
    whole = json.loads(SOURCE)
    whole["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    whole["padding"] = {
        "strategy": {"Fixed": 10},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "x",
    }
    ids = Tokenizer(json.dumps(whole).encode()).encode("one two three four five", add_special_tokens=True)
    assert unpack(ids) == reference().encode("one two three four five").ids


def test_a_tokenizer_the_fast_library_reads_otherwise_is_left_to_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tokenizer is known on which the two differ, so the check is given a text that one of them gets wrong."""
    pack_fast = module._pack_fast
    monkeypatch.setattr(module, "_pack_fast", lambda made: lambda text, special: pack_fast(made)(text.replace("½", "?"), special))
    fallen_back = Tokenizer(SOURCE)
    assert fallen_back.backend == "tokenizers"
    assert "fastokens differs from tokenizers on 'naïve café, ½" in fallen_back.why
    assert unpack(fallen_back.encode("½ <|im_end|>", add_special_tokens=False)) == reference().encode("½ <|im_end|>").ids


def test_a_model_the_fast_library_does_not_support_is_left_to_the_other() -> None:
    vocabulary = {"[UNK]": 0, "hello": 1, "world": 2}
    source: dict[str, Any] = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"}, "post_processor": None, "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "[UNK]"},
    }  # fmt: skip
    made = Tokenizer(json.dumps(source).encode())
    assert made.backend == "tokenizers"
    assert "fastokens" in made.why
    assert unpack(made.encode("hello there world", add_special_tokens=True)) == [1, 0, 2]


@pytest.mark.parametrize("source", [b"", b"{}", b"[]", b"\xff", b'{"model": 1}'])
def test_a_file_nobody_can_read_is_not_found(source: bytes) -> None:
    with pytest.raises(TokenizerNotFound, match="cannot be read"):
        Tokenizer(source)


def test_several_threads_may_encode_at_once(tokenizer: Tokenizer) -> None:
    texts = [f"{n} " * 500 + text for n, text in enumerate(CHECKED * 8)]
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda text: tokenizer.encode(text, add_special_tokens=True), texts))
    assert found == [tokenizer.encode(text, add_special_tokens=True) for text in texts]


def test_half_a_surrogate_pair_is_an_error_of_its_own(tokenizer: Tokenizer) -> None:
    with pytest.raises(UnicodeEncodeError):
        tokenizer.encode("\ud800", add_special_tokens=False)


def test_ids_are_packed_little_endian() -> None:
    assert pack([1, 256, 2**32 - 1]) == b"\x01\0\0\0\0\x01\0\0\xff\xff\xff\xff"
    assert unpack(pack([0, 5, 2**32 - 1])) == [0, 5, 2**32 - 1]


@pytest.mark.parametrize("ids", [[-1], [2**32], ["1"], [1.5], [None]])
def test_what_is_no_id_is_not_packed(ids: list[Any]) -> None:
    with pytest.raises(ValueError, match="token id"):
        pack(ids)


def test_only_long_texts_would_stall_the_loop(tokenizer: Tokenizer) -> None:
    assert not tokenizer.stalls(10_000)
    assert tokenizer.stalls(1_000_000)
