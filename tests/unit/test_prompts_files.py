from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from router.prompts.errors import TokenizerNotFound
from router.prompts.files import find_model_files, hub_cache


def write(folder: Path, **files: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    names = {"tokenizer": "tokenizer.json", "config": "tokenizer_config.json", "special": "special_tokens_map.json"}
    for name, content in ({"tokenizer": {"added_tokens": []}} | files).items():
        path = folder / names.get(name, name)
        path.parent.mkdir(exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return folder


def test_a_folder_is_read_where_it_lies(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", **{"config.json": {"model_type": "llama"}})
    found = find_model_files(str(folder), cache=tmp_path)
    assert (found.folder, found.model_type) == (str(folder), "llama")
    assert find_model_files(str(folder / "tokenizer.json"), cache=tmp_path).folder == str(folder)


def test_a_hub_name_is_read_from_the_snapshot_that_main_names(tmp_path: Path) -> None:
    kept = tmp_path / "models--org--name"
    write(kept / "snapshots" / "old")
    write(kept / "snapshots" / "new")
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text("old\n")
    assert find_model_files("org/name", cache=tmp_path).folder == str(kept / "snapshots" / "old")


def test_a_hub_name_pulled_by_commit_is_found_without_a_ref(tmp_path: Path) -> None:
    only = write(tmp_path / "models--org--name" / "snapshots" / "abc")
    assert find_model_files("org/name", cache=tmp_path).folder == str(only)


@pytest.mark.parametrize("where", ["org/name", "/no/such/folder", "./here"])
def test_what_is_not_found_says_where_was_looked_and_what_to_do(tmp_path: Path, where: str) -> None:
    with pytest.raises(TokenizerNotFound, match="--tokenizer") as problem:
        find_model_files(where, cache=tmp_path)
    assert where in str(problem.value)
    if where == "org/name":
        assert str(tmp_path / "models--org--name") in str(problem.value)


def test_a_folder_with_another_kind_of_tokenizer_is_not_found(tmp_path: Path) -> None:
    (tmp_path / "tekken.json").write_text("{}")
    with pytest.raises(TokenizerNotFound, match=r"no tokenizer\.json"):
        find_model_files(str(tmp_path), cache=tmp_path)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"HF_HUB_CACHE": "/a"}, "/a"),
        ({"HUGGINGFACE_HUB_CACHE": "/b", "HF_HOME": "/c"}, "/b"),
        ({"HF_HOME": "/c"}, "/c/hub"),
        ({"XDG_CACHE_HOME": "/d"}, "/d/huggingface/hub"),
    ],
)
def test_the_cache_is_where_hugging_faces_tools_put_it(environ: dict[str, str], expected: str) -> None:
    assert str(hub_cache(environ)) == expected


def test_by_default_the_cache_is_in_the_home_folder() -> None:
    assert hub_cache({}) == Path.home() / ".cache" / "huggingface" / "hub"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, {}),
        ({"config": {"chat_template": "one"}}, {"default": "one"}),
        (
            {"config": {"chat_template": [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]}},
            {"default": "a", "tool_use": "b"},
        ),
        ({"config": {"chat_template": "old"}, "chat_template.jinja": "new"}, {"default": "new"}),
        ({"chat_template.jinja": "a", "chat_templates/tool_use.jinja": "b"}, {"default": "a", "tool_use": "b"}),
        ({"chat_template.json": {"chat_template": "processor's"}}, {"default": "processor's"}),
        ({"config": {"chat_template": "tokenizer's"}, "chat_template.json": {"chat_template": "processor's"}}, {"default": "tokenizer's"}),
    ],
)
def test_the_chat_template_is_found_in_every_place_models_keep_it(tmp_path: Path, files: dict[str, Any], expected: dict[str, str]) -> None:
    assert find_model_files(str(write(tmp_path, **files))).templates == expected


def test_special_tokens_are_variables_whether_given_as_text_or_as_object(tmp_path: Path) -> None:
    config = {
        "bos_token": "<s>",
        "eos_token": {"content": "</s>", "lstrip": False},
        "pad_token": None,
        "image_token": "<img>",
        "extra_special_tokens": {"think": "<think>"},
        "add_bos_token": True,
    }
    found = find_model_files(str(write(tmp_path, config=config, special={"unk_token": {"content": "<unk>"}, "bos_token": "old"})))
    assert found.special_tokens == {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "image_token": "<img>",
        "think": "<think>",
    }


def test_tokens_that_only_the_configuration_adds_are_added(tmp_path: Path) -> None:
    config = {"added_tokens_decoder": {"7": {"content": "<new>", "special": True}, "3": {"content": "<known>"}}}
    found = find_model_files(str(write(tmp_path, config=config, tokenizer={"added_tokens": [{"id": 3, "content": "<known>"}]})))
    added = json.loads(found.tokenizer)["added_tokens"]
    assert [(token["id"], token["content"]) for token in added] == [(3, "<known>"), (7, "<new>")]
    assert added[1]["special"]


def test_equal_files_have_one_digest_wherever_they_lie(tmp_path: Path) -> None:
    first, second = (find_model_files(str(write(tmp_path / name, config={"chat_template": "x"}))) for name in ("a", "b"))
    other = find_model_files(str(write(tmp_path / "c", config={"chat_template": "y"})))
    assert first.digest == second.digest != other.digest


@pytest.mark.parametrize("name", ["config", "special"])
def test_a_file_that_is_not_json_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(TokenizerNotFound, match="not JSON"):
        find_model_files(str(write(tmp_path, **{name: "{"})))
