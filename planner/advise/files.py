"""Which model is meant, and what does its `config.json` say? A file, a folder that holds one, or a name of ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import msgspec

from discovery.config import nearest
from planner.advise.models import MODELS, known_model

MOST_BYTES: Final = 16 << 20


class ModelNotFound(Exception):
    """There is no such model, or its `config.json` cannot be read; the message says what was looked for."""


def find_model(model: str) -> tuple[str, dict[str, Any]]:
    """The model's name and its `config.json`'s object. A path wins over a name. Raises ModelNotFound."""
    path = Path(model)
    if path.is_dir():
        return path.resolve().name, _read(path / "config.json")
    if path.exists():
        return (path.resolve().parent.name if path.name == "config.json" else path.name), _read(path)
    if found := known_model(model):
        return found
    close = nearest(model.rpartition("/")[2], MODELS)
    raise ModelNotFound(f"no file or folder {model!r}, and no model is known by that name{close}; known are: {', '.join(MODELS)}")


def _read(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise ModelNotFound(f"{path} cannot be read: {error.strerror or error}") from error
    if len(content) > MOST_BYTES:
        raise ModelNotFound(f"{path} is no model's config: it is larger than {MOST_BYTES >> 20} MiB")
    try:
        return msgspec.json.decode(content, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ModelNotFound(f"{path} is no model's config: {error}") from error
