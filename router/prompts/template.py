"""What text does a model's chat template make of a conversation?

The same environment that Hugging Face renders with: Jinja, sandboxed, with the few helpers templates rely on. A template comes
with the model and is trusted no further than the sandbox; what it says through `raise_exception` is for the client.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from router.prompts.errors import NotRenderable, PromptRejected
from router.prompts.shape import TemplateShape, shape_of

MAX_RENDERED_CHARS = 64 * 1024 * 1024
"""A template that loops without end is stopped here: far above any prompt, far below this machine's memory."""

_MARK = "COMMUTATOR_CONTINUES_HERE "
"""Put at the end of the final message and cut off with all that follows. The trailing space shows whether the template strips."""


class ChatTemplate:
    """One chat template, compiled. Rendering is safe from several threads at once."""

    def __init__(self, source: str, *, strftime: Callable[[str], str] = time.strftime, max_chars: int = MAX_RENDERED_CHARS) -> None:
        """`strftime` tells templates the local time in a format. Raises `NotRenderable` when the source does not compile."""
        environment = _environment(strftime)
        try:
            self.shape: TemplateShape = shape_of(source, environment)
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, SyntaxError, RecursionError) as error:
            raise NotRenderable(f"the chat template does not compile: {error}") from error
        # A ChainMap, which each rendering copies twice; nobody adds to it any more. Takes half off the cost of a short template.
        self._template.globals = dict(self._template.globals)
        self.source = source
        self._max_chars = max_chars

    def render(self, variables: Mapping[str, Any], *, continue_final_message: bool = False) -> str:
        """The prompt's text. With `continue_final_message` it ends where the last message's text ends.

        Raises `PromptRejected` with the template's own words, `NotRenderable` for anything else that goes wrong.
        """
        if not continue_final_message:
            return self._run(variables)
        text, messages = self._marked(variables.get("messages", ()))
        return _cut(self._run({**variables, "messages": messages}), text)

    def _run(self, variables: Mapping[str, Any]) -> str:
        pieces: list[str] = []
        room = self._max_chars
        try:
            for piece in self._template.generate(variables):
                pieces.append(piece)
                room -= len(piece)
                if room < 0:
                    break
        except _RefusedByTemplateError as error:
            raise PromptRejected(str(error)) from error
        except Exception as error:  # a template is a program: it can fail with anything, and never fails the request
            raise NotRenderable(f"the chat template failed: {type(error).__name__}: {error}") from error
        if room < 0:
            raise NotRenderable(f"the chat template makes more than {self._max_chars} characters")
        return "".join(pieces)

    def _marked(self, messages: Sequence[Any]) -> tuple[str, list[Any]]:
        """(the text to continue, the messages with the mark at its end)."""
        if not self.shape.continues_content:
            raise NotRenderable("the chat template does not use content, so it cannot be continued", ask_engine=False)
        final = dict(messages[-1])
        content = final.get("content")
        if isinstance(content, str):
            final["content"] = content + _MARK
            return content, [*messages[:-1], final]
        parts = list(content or ())
        for index in reversed(range(len(parts))):
            text = parts[index].get("text")
            if isinstance(text, str):
                parts[index] = {**parts[index], "text": text + _MARK}
                return text, [*messages[:-1], {**final, "content": parts}]
        raise NotRenderable("the final message has no text to continue", ask_engine=False)


def _cut(rendered: str, text: str) -> str:
    at = rendered.rfind(_MARK.rstrip())
    if at < 0 or text.strip() not in rendered:
        raise NotRenderable("the chat template drops part of the message to continue", ask_engine=False)
    return rendered[:at] if rendered.startswith(_MARK, at) else rendered[:at].rstrip()


class _RefusedByTemplateError(jinja2.TemplateError):
    """The template called `raise_exception`."""


class _GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}` marks what the assistant said, for training; here it is just its body."""

    tags = {"generation"}  # noqa: RUF012 - declared so by jinja2

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        # In a block of its own, as where it is tracked: names set inside stay inside.
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return [nodes.Scope(body)]


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with short cuts for what templates do all the time; what they give is what the long way gives.

    The long way takes 1.5 µs a look-up, mostly for proving that `message.role` is safe: 41 turns took 0.9 to 1.7 ms.
    """

    def getattr(self, obj: Any, attribute: str) -> Any:  # noqa: ANN401 - as jinja2 has it
        kind = type(obj)
        if kind is dict and attribute not in _DICT_METHODS:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if (kind is LoopContext or kind is Namespace) and not attribute.startswith("_"):
            with contextlib.suppress(AttributeError):
                return getattr(obj, attribute)
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:  # noqa: ANN401 - as jinja2 has it
        if type(obj) is dict and type(argument) is str and argument not in _DICT_METHODS:
            return obj[argument] if argument in obj else self.undefined(obj=obj, name=argument)
        return super().getitem(obj, argument)


_DICT_METHODS = frozenset(dir(dict))
"""For these the methods win over the items, and the sandbox has its say."""


def _environment(strftime: Callable[[str], str]) -> _Environment:
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = strftime
    return environment


def _tojson(
    value: object,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002 - the signature templates call
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object = "") -> None:
    raise _RefusedByTemplateError(str(message))
