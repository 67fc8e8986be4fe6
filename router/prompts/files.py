"""Where are a model's tokenizer and chat template on this machine? Never over the network.

A folder is read as it is; a hub name leads through the Hugging Face cache: models--org--name/refs/main → snapshots/<commit>/.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from router.prompts.errors import TokenizerNotFound

_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_ADVICE = "give a folder or a name in the Hugging Face cache with --tokenizer"
_MAX_FILE_BYTES = 256 * 1024 * 1024


class ModelFiles(msgspec.Struct, frozen=True):
    """What prompts need of a model's folder."""

    folder: str
    tokenizer: bytes
    """`tokenizer.json`, with the tokens that only `tokenizer_config.json` adds."""
    templates: dict[str, str]
    """Chat templates by name: `default`, `tool_use`, …; empty when the model has none."""
    special_tokens: dict[str, str]
    """`bos_token`, `eos_token`, …: variables of the template."""
    model_type: str = ""
    """From `config.json`."""

    @property
    def digest(self) -> bytes:
        """Equal when prompts come out equal, wherever the files lie."""
        told = msgspec.json.encode((self.templates, self.special_tokens, self.model_type), order="sorted")
        return hashlib.blake2b(told + self.tokenizer, digest_size=16).digest()


def hub_cache(environ: Mapping[str, str] | None = None) -> Path:
    """The folder Hugging Face's tools keep models in."""
    environ = os.environ if environ is None else environ
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if given := environ.get(name):
            return Path(given).expanduser()
    if home := environ.get("HF_HOME"):
        return Path(home).expanduser() / "hub"
    cache = Path(environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return cache / "huggingface" / "hub"


def find_model_files(where: str, *, cache: Path | None = None) -> ModelFiles:
    """Reads the tokenizer's files from a folder, or for a hub name from `cache` (by default `hub_cache()`).

    Raises `TokenizerNotFound`, saying where was looked and what to do.
    """
    cache = hub_cache() if cache is None else cache
    looked: list[str] = []
    for folder in _folders(where, cache):
        if (folder / "tokenizer.json").is_file():
            return _read(folder)
        looked.append(str(folder))
    places = ", ".join(looked)
    raise TokenizerNotFound(f"no tokenizer.json for {where!r}: looked in {places}; {_ADVICE}")


def _folders(where: str, cache: Path) -> Iterator[Path]:
    folder = Path(where).expanduser()
    if folder.is_absolute() or folder.is_dir() or where.startswith("."):
        yield folder if folder.suffix != ".json" else folder.parent
        return
    kept = cache / f"models--{where.replace('/', '--')}"
    snapshots = kept / "snapshots"
    try:
        yield snapshots / (kept / "refs" / "main").read_text(encoding="utf-8").strip()
    except OSError:
        yield snapshots
        if snapshots.is_dir():  # pulled by commit: no refs/main
            yield from sorted(snapshots.iterdir(), key=lambda found: found.stat().st_mtime, reverse=True)


def _read(folder: Path) -> ModelFiles:
    config = _json(folder / "tokenizer_config.json")
    return ModelFiles(
        folder=str(folder),
        tokenizer=_with_added_tokens(_bytes(folder / "tokenizer.json"), config),
        templates=_templates(folder, config),
        special_tokens=_special_tokens(folder, config),
        model_type=str(_json(folder / "config.json").get("model_type", "")),
    )


def _bytes(path: Path) -> bytes:
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise TokenizerNotFound(f"{path} is larger than {_MAX_FILE_BYTES} bytes; {_ADVICE}")
        return path.read_bytes()
    except OSError as error:
        raise TokenizerNotFound(f"{path} cannot be read: {error.strerror}; {_ADVICE}") from error


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = msgspec.json.decode(_bytes(path))
    except msgspec.DecodeError as error:
        raise TokenizerNotFound(f"{path} is not JSON: {error}; {_ADVICE}") from error
    return found if isinstance(found, dict) else {}


def _templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Files win over the configuration, as since they exist; the processor's `chat_template.json` is the last resort."""
    found = {path.stem: _text(path) for path in sorted((folder / "chat_templates").glob("*.jinja"))}
    if (single := folder / "chat_template.jinja").is_file():
        found["default"] = _text(single)
    return found or _named(config.get("chat_template")) or _named(_json(folder / "chat_template.json").get("chat_template"))


def _named(given: object) -> dict[str, str]:
    if isinstance(given, str):
        return {"default": given}
    if isinstance(given, dict):
        return {name: text for name, text in given.items() if isinstance(text, str)}
    if isinstance(given, list):
        pairs = ((entry.get("name"), entry.get("template")) for entry in given if isinstance(entry, dict))
        return {name: text for name, text in pairs if isinstance(name, str) and isinstance(text, str)}
    return {}


def _text(path: Path) -> str:
    try:
        return _bytes(path).decode()
    except UnicodeDecodeError as error:
        raise TokenizerNotFound(f"{path} is not UTF-8; {_ADVICE}") from error


def _special_tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """A token is given as a string or as an object with `content`; models may name further ones (`image_token`)."""
    extra = config.get("extra_special_tokens")
    given = _json(folder / "special_tokens_map.json") | dict(config) | (extra if isinstance(extra, dict) else {})
    named = [name for name in given if name.endswith("_token") or (isinstance(extra, dict) and name in extra)]
    texts = {name: _content(given[name]) for name in dict.fromkeys((*_SPECIAL, *named)) if name in given}
    return {name: text for name, text in texts.items() if text is not None}


def _content(token: object) -> str | None:
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _with_added_tokens(tokenizer: bytes, config: Mapping[str, Any]) -> bytes:
    """Old models list some special tokens only in `added_tokens_decoder`; the engine's tokenizer has them too."""
    listed = config.get("added_tokens_decoder")
    if not isinstance(listed, dict):
        return tokenizer
    wanted = {text: (number, token) for number, token in listed.items() if (text := _content(token)) is not None}
    missing = [text for text in wanted if msgspec.json.encode(text) not in tokenizer and text.encode() not in tokenizer]
    if not missing:  # the usual case, told without decoding some 10 MB
        return tokenizer
    try:
        whole = msgspec.json.decode(tokenizer)
        whole["added_tokens"] = [*(whole.get("added_tokens") or []), *(_added(*wanted[text]) for text in missing)]
    except (msgspec.DecodeError, TypeError, ValueError):
        return tokenizer  # the tokenizer's own loading says better what is wrong
    return msgspec.json.encode(whole)


def _added(number: str, token: Mapping[str, Any]) -> dict[str, Any]:
    flags = {name: bool(token.get(name, False)) for name in ("single_word", "lstrip", "rstrip", "normalized", "special")}
    return {"id": int(number), "content": token["content"], **flags}
