"""What can be set? A settings Struct, flattened.

Key, environment variable and flag are all derived from a field's path, so none of them is ever written down twice:

    class BlocksSettings:    overlap_score_credit: float        key       blocks.overlap_score_credit      ([blocks] overlap_score_credit = … in TOML)
    class ServeSettings: blocks: BlocksSettings                     variable  COMMUTATOR_BLOCKS_OVERLAP_SCORE_CREDIT
                                                            flag      --blocks-overlap-score-credit
"""

from __future__ import annotations

import enum
import types
import typing
from collections.abc import Iterator

import msgspec
from msgspec import Meta

PREFIX = "COMMUTATOR_"
_TABLE = "a table (outside of the file: JSON)"


class Option(msgspec.Struct, frozen=True):
    """One leaf field of a settings Struct."""

    path: tuple[str, ...]
    type: object
    """The annotation as written, `Annotated` included: what `msgspec.convert` checks values against."""
    default: object
    description: str
    secret: bool
    positional: bool = False
    """Whether it may also be given without its flag, as the one argument that has no name."""

    @property
    def key(self) -> str:
        """`blocks.overlap_score_credit`."""
        return ".".join(self.path)

    @property
    def variable(self) -> str:
        """`COMMUTATOR_BLOCKS_OVERLAP_SCORE_CREDIT`."""
        return PREFIX + "_".join(self.path).upper()

    @property
    def flag(self) -> str:
        """`--blocks-overlap-score-credit`."""
        return "--" + "-".join(self.path).replace("_", "-")

    @property
    def negated_flag(self) -> str | None:
        """`--no-…` for a switch, None for what takes a value."""
        return f"--no-{self.flag[2:]}" if self.is_switch else None

    @property
    def is_switch(self) -> bool:
        """Whether the flag stands alone."""
        return bool in alternatives(self.type)

    @property
    def item_type(self) -> object | None:
        """What a list holds; None for anything else."""
        for alternative in alternatives(self.type):
            if typing.get_origin(alternative) in (list, tuple):
                return typing.get_args(alternative)[0]  # type: ignore[no-any-return]  # typing's own answer is untyped
        return None


def options(settings: type[msgspec.Struct]) -> tuple[Option, ...]:
    """Every leaf of `settings`, in the order written, nested Structs in their place."""
    return tuple(_leaves(settings, ()))


def _leaves(settings: type[msgspec.Struct], path: tuple[str, ...]) -> Iterator[Option]:
    for field in msgspec.structs.fields(settings):
        here = (*path, field.name)
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            yield from _leaves(field.type, here)
            continue
        metas = tuple(_metas(field.type))
        yield Option(
            path=here,
            type=field.type,
            default=field.default_factory() if field.default is msgspec.NODEFAULT else field.default,
            description=next((meta.description for meta in reversed(metas) if meta.description), ""),
            secret=any(meta.extra is not None and meta.extra.get("secret") for meta in metas),
            positional=any(meta.extra is not None and meta.extra.get("positional") for meta in metas),
        )


def alternatives(annotation: object) -> tuple[object, ...]:
    """The members of a union, with `Annotated` taken off: `Annotated[int, …] | None` has `int` and `NoneType`."""
    while typing.get_origin(annotation) is typing.Annotated:
        annotation = typing.get_args(annotation)[0]
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return tuple(inner for arm in typing.get_args(annotation) for inner in alternatives(arm))
    return (annotation,)


def allowed(annotation: object) -> str:
    """What values are taken, in words: `a whole number, at least 0, at most 65535`."""
    parts = [_name(alternative) for alternative in alternatives(annotation) if alternative is not types.NoneType]
    text = " or ".join(parts)
    bounds = [bound for meta in _metas(annotation) for bound in _bounds(meta)]
    return ", ".join([text, *bounds])


def _name(alternative: object) -> str:
    if typing.get_origin(alternative) is typing.Literal:
        return "one of " + ", ".join(str(choice) for choice in typing.get_args(alternative))
    if typing.get_origin(alternative) in (list, tuple):
        return "a list, each item " + allowed(typing.get_args(alternative)[0])
    if isinstance(alternative, type) and issubclass(alternative, enum.Enum):
        return "one of " + ", ".join(str(member.value) for member in alternative)
    names: dict[object, str] = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
    if isinstance(alternative, type) and issubclass(alternative, msgspec.Struct):
        return "an engine" if alternative.__name__ == "EngineSpec" else _TABLE
    if typing.get_origin(alternative) is dict:
        return _TABLE
    return names.get(alternative, str(alternative))


def _bounds(meta: Meta) -> Iterator[str]:
    words = {"gt": "more than", "ge": "at least", "lt": "less than", "le": "at most", "pattern": "matching"}
    for attribute, word in words.items():
        if (limit := getattr(meta, attribute)) is not None:
            yield f"{word} {limit}"
    if meta.min_length is not None:
        yield "not empty" if meta.min_length == 1 else f"at least {meta.min_length} long"
    if meta.max_length is not None:
        yield f"at most {meta.max_length} long"


def _metas(annotation: object) -> Iterator[Meta]:
    """All `Meta`s of an annotation, innermost first."""
    if typing.get_origin(annotation) is typing.Annotated:
        inner, *metas = typing.get_args(annotation)
        yield from _metas(inner)
        yield from (meta for meta in metas if isinstance(meta, Meta))
    elif typing.get_origin(annotation) in (typing.Union, types.UnionType):
        for arm in typing.get_args(annotation):
            yield from _metas(arm)
