"""What can be told of a chat template without rendering it?

Engines look at a template's syntax tree to decide how it wants a message's content: as one string, or as the list of parts
that OpenAI clients send. The question is the same, "does it loop over the content?", the ways of asking differ by engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec
from jinja2 import Environment, meta, nodes

ContentFormat = Literal["string", "openai"]

_SGLANG_MEDIA_WORDS = ("image", "audio", "video", "vision")
_SGLANG_MESSAGE_NAMES = ("message", "msg", "m")


class TemplateShape(msgspec.Struct, frozen=True):
    """What the dialects need to know of a template."""

    variables: frozenset[str]
    """Names it reads and does not define."""
    vllm_content: ContentFormat
    sglang_content: ContentFormat
    knows_developer: bool
    """It mentions the role "developer"."""
    low_effort: bool
    """SGLang's `low_effort` switch (Nemotron 3) exists in it."""
    continues_content: bool
    """It mentions `content` at all: without it a final message cannot be continued."""


def shape_of(source: str, environment: Environment) -> TemplateShape:
    """Raises `jinja2.TemplateSyntaxError`."""
    tree = environment.parse(source)
    return TemplateShape(
        variables=frozenset(meta.find_undeclared_variables(tree)),
        vllm_content=_vllm_content(tree),
        sglang_content=_sglang_content(source, tree),
        knows_developer='"developer"' in source or "'developer'" in source,
        low_effort="low_effort" in source and "truncate_history_thinking" in source,
        continues_content="content" in source,
    )


def _sglang_content(source: str, tree: nodes.Template) -> ContentFormat:
    """As SGLang 0.5.23: a template that speaks of media, or loops over the content of a message under one of three names."""
    if any(word in source for word in _SGLANG_MEDIA_WORDS):
        return "openai"
    loops = (loop.iter for loop in tree.find_all(nodes.For))
    return "openai" if any(_reads(over, name, "content") for over in loops for name in _SGLANG_MESSAGE_NAMES) else "string"


def _vllm_content(tree: nodes.Template) -> ContentFormat:
    """As vLLM 0.32, which follows `messages` through assignments and loops, and `content` into macros' parameters."""
    try:
        return "openai" if next(_content_loops(tree), None) is not None else "string"
    except _UnpackingError:
        return "string"


class _UnpackingError(Exception):
    """`for a, b in messages`: vLLM's detection gives up and takes content for a string."""


def _content_loops(tree: nodes.Template) -> Iterator[nodes.For]:
    messages = set(_message_names(tree))
    in_macros: set[int] = set()
    parameters: dict[int, set[str]] = {}
    for macro in tree.find_all(nodes.Macro):
        passed = _content_parameters(tree, macro, messages)
        for loop in macro.find_all(nodes.For):
            in_macros.add(id(loop))
            if passed:
                parameters[id(loop)] = passed
    for loop in tree.find_all(nodes.For):
        over = loop.iter
        named = over.name if isinstance(over, nodes.Name) else None
        if (
            any(_reads(over, name, "content") for name in messages)
            or (named is not None and named in parameters.get(id(loop), ()))
            or (named == "content" and id(loop) not in in_macros)
        ):
            _target(loop.target)
            yield loop


def _message_names(tree: nodes.Template) -> Iterator[str]:
    """The loop variables that stand for one message."""
    lists = ["messages"]
    for known in lists:  # grows while it is read: an alias of an alias counts
        for assign in tree.find_all(nodes.Assign):
            if _reads(assign.node, known) and (name := _target(assign.target)) not in lists:
                lists.append(name)
    for loop in tree.find_all(nodes.For):
        if any(_reads(loop.iter, name) for name in lists):
            yield _target(loop.target)


def _content_parameters(tree: nodes.Template, macro: nodes.Macro, messages: set[str]) -> set[str]:
    """The macro's parameters that are somewhere given a message's content."""
    names = [argument.name for argument in macro.args]
    found: set[str] = set()
    for call in tree.find_all(nodes.Call):
        if not (isinstance(call.node, nodes.Name) and call.node.name == macro.name):
            continue
        given = [*zip(names, call.args, strict=False), *((kw.key, kw.value) for kw in call.kwargs if kw.key in names)]
        found.update(name for name, value in given if any(_reads(value, message, "content") for message in messages))
    return found


def _target(node: nodes.Node) -> str:
    if not isinstance(node, nodes.Name):
        raise _UnpackingError
    return node.name


def _reads(node: nodes.Node | None, name: str, key: str | None = None) -> bool:
    """Whether an expression is the variable (or its item `key`), possibly filtered, tested or sliced."""
    match node:
        case nodes.Filter() | nodes.Test():
            return _reads(node.node, name, key)
        case nodes.Getitem(arg=nodes.Slice()):
            return _reads(node.node, name, key)
        case nodes.Getitem(arg=nodes.Const(value=value)) if key is not None:
            return value == key and _reads(node.node, name) and isinstance(node.node, nodes.Name)
        case nodes.Getattr(attr=attr) if key is not None:
            return attr == key and _reads(node.node, name) and isinstance(node.node, nodes.Name)
        case nodes.Name(name=found, ctx="load") if key is None:
            return bool(found == name)
        case _:
            return False
