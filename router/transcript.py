"""What has a client been given of a text that two engines may have to tell it? The tokens behind it, and what it must not see twice.

Text lags behind tokens: an engine holds back a character whose last byte has not come, and whatever may begin a stop string. So a stream
goes on from a *mark*: a token with which all text up to it was out, but for what is held back by count. That is certain only where an
event brought one token and some text.

    tokens     t1   t2   t3   t4 t5   t6          t4, t5 in one event, t6 half a character
    delivered  Hel  lo   ,    wor
    mark                 ▲                        "wor" is generated again, compared, and left out

Text delivered behind the mark has to come again the same, which only temperature 0 promises: without it, such a break is not resumed.
An event is passed on when it is whole, so that what breaks off within one was never given.
"""

from __future__ import annotations

from array import array
from collections import deque
from typing import Annotated, Any, Final, NamedTuple

import msgspec
from msgspec import Meta, Raw

from engines.types import EngineKind
from router.resume import Obstacle, Plan
from router.routes import PromptForm

DONE: Final = b"data: [DONE]\n\n"
END: Final = b"\n\n"
MAX_EVENT_BYTES: Final = 16 * 1024 * 1024
"""The ids of a million tokens of prompt fit; what is longer is passed on unread."""

_IDS: Final = b'token_ids":['
"""The end of a field's name, with what follows: within a JSON string its quote would be escaped."""

_Id = Annotated[int, Meta(ge=0, lt=2**32)]


class _Delta(msgspec.Struct, frozen=True):
    content: str | None = None
    reasoning: Any = None
    reasoning_content: Any = None
    tool_calls: Any = None
    function_call: Any = None


_NO_DELTA: Final = _Delta()


class _Choice(msgspec.Struct):
    index: int = 0
    text: str | None = None
    delta: _Delta = _NO_DELTA
    finish_reason: str | None = None
    token_ids: list[_Id] | None = None
    prompt_token_ids: list[_Id] | None = None


class _Error(msgspec.Struct):
    message: str = ""
    code: int | str | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    prompt_token_ids: list[_Id] | None = None
    usage: dict[str, Any] | None = None
    error: _Error | None = None


class _Mark(NamedTuple):
    tokens: int
    """Of the answer, up to here."""
    chars: int
    """Of its text that they make."""


_event_decoder = msgspec.json.Decoder(_Event)
_fields_decoder = msgspec.json.Decoder(dict[str, Raw])
_choices_decoder = msgspec.json.Decoder(list[dict[str, Any]])


class Transcript:
    """One stream, from however many engines."""

    def __init__(self, plan: Plan) -> None:
        self.obstacle: Obstacle | None = None
        """Why it will not go on elsewhere."""
        self.failure = ""
        """What is wrong with the engine that is speaking, though its connection is not broken: nothing more of it is passed on."""
        self.finished = False
        """All text has been given."""
        self.done = False
        """So has everything else."""
        self._plan = plan
        self._partial = b""
        """The beginning of an event."""
        self._unframed = False
        """Where its events end is not known."""
        self._head: dict[str, Raw] = {}
        """By what the client knows the answer: its id, and when it was made."""
        self._prompt: list[int] | None = None
        self._ids = array("I")
        """Of the answer, in events that were whole."""
        self._before = 0
        """How many of them came from earlier engines."""
        self._resumed = False
        self._introduced = False
        """The engine that is speaking has told which prompt it goes on from."""
        self._said = 0
        """Characters of the text up to which the engine that is speaking has come."""
        self._delivered = 0
        """Characters of the text that the client has."""
        self._marks = deque([_Mark(0, 0)])
        """The last mark within what was delivered, and those behind it."""
        self._behind: list[str] = []
        """What was delivered behind the first mark."""

    def feed(self, data: bytes) -> bytes:
        """Read a piece of the stream; what the client gets of it."""
        data = self._partial + data
        end = data.rfind(END) + len(END)
        if end < len(END):
            if len(data) > MAX_EVENT_BYTES or b"\r" in data or self._unframed:
                return self._pass_unframed(data)
            end = 0
        self._partial = data[end:]
        return b"".join([self._event(event) for event in data[:end].split(END) if event])

    def rest(self) -> bytes:
        """What came last, where a stream has ended within an event."""
        return self._without_ids(self._partial)

    @property
    def tokens(self) -> list[int]:
        """The prompt's ids and the answer's, as far as another engine is asked to take them up; empty when the prompt's are not known."""
        return [] if self._prompt is None else self._prompt + self._ids.tolist()

    def resume(self) -> bytes | Obstacle:
        """The body for another engine, whose stream is to be fed next; or why there is none."""
        mark = self._marks[0]
        if self.obstacle is not None:
            return self.obstacle
        if self._behind and not self._plan.greedy:
            return Obstacle.UNCERTAIN
        self.failure = ""
        self._partial = b""
        self._resumed, self._introduced = self._prompt is not None, False
        if self._prompt is None:  # nothing has come yet
            return self._plan.first()
        del self._ids[mark.tokens :]
        self._before = mark.tokens
        self._marks = deque([mark])
        self._said = mark.chars
        return self._plan.continued(self.tokens, mark.tokens)

    def closing(self) -> bytes:
        """The end of a stream whose text is complete, from what is known here."""
        if self.done or self._prompt is None:
            return b""
        if not self._plan.wants_usage:
            return DONE
        prompt, answer = len(self._prompt), len(self._ids)
        usage = {"prompt_tokens": prompt, "total_tokens": prompt + answer, "completion_tokens": answer}
        return _written(self._head | {"choices": Raw(b"[]"), "usage": Raw(msgspec.json.encode(usage))}) + DONE

    # inside

    def _pass_unframed(self, data: bytes) -> bytes:
        self._unframed, self._partial = True, b""
        return self._unreadable(data, b"")

    def _event(self, event: bytes) -> bytes:
        """One event, without its end."""
        if self.failure:
            return b""
        if not event.startswith(b"data: {"):
            self.done = self.done or event == b"data: [DONE]"
            return self._unreadable(event) if b'"choices"' in event else event + END
        try:
            read = _event_decoder.decode(memoryview(event)[6:])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return self._unreadable(event)
        if self.obstacle is None and (failure := _failure(read)):
            self.failure = failure
            return b""
        if not self._introduced and self.obstacle is None and read.error is None and not self._introduces(event, read):
            return self._diverged("does not take up the tokens that were delivered")
        return self._passed(event, read)

    def _unreadable(self, event: bytes, end: bytes = END) -> bytes:
        if self._resumed:
            return self._diverged("tells its stream in a form that is not known")
        self.obstacle = self.obstacle or Obstacle.UNREADABLE
        return self._without_ids(event) + end

    def _introduces(self, event: bytes, read: _Event) -> bool:
        """Take the prompt's ids from an engine's first event, or compare them."""
        self._introduced = True
        ids = read.choices[0].prompt_token_ids if self._plan.form is not PromptForm.CHAT and read.choices else read.prompt_token_ids
        if self._prompt is None:
            fields = _fields_decoder.decode(memoryview(event)[6:])
            self._head = {name: fields[name] for name in ("id", "object", "created", "model") if name in fields}
            self._prompt = ids
            if ids is None:
                self.obstacle = Obstacle.NO_IDS
            return True
        return ids == self.tokens

    def _passed(self, event: bytes, read: _Event) -> bytes:
        """An event of text, of usage, or of none of both."""
        choice = read.choices[0] if read.choices else None
        if self.obstacle is not None or choice is None:
            return self._adapted(event, read, None) if self._resumed else self._without_ids(event) + END
        text = (choice.delta.content if choice.text is None else choice.text) or ""
        self.obstacle = _unusual(read, choice, text)
        if self.obstacle is not None and self._said < self._delivered:
            return self._diverged("tells its stream in a form that is not known")
        self._ids.extend(choice.token_ids or ())
        again = min(self._delivered - self._said, len(text))
        if again and text[:again] != self._expected(again):
            return self._diverged("does not repeat what was delivered")
        self._note(text[again:], len(text), len(choice.token_ids or ()))
        self.finished = choice.finish_reason is not None
        if self.finished and self._said < self._delivered:
            return self._diverged("ends before what was delivered")
        if not self._resumed:
            return self._without_ids(event) + END
        opens = read.prompt_token_ids is not None and not choice.token_ids  # a chat's first event, which the client has
        if opens or (again == len(text) > 0 and not self.finished):
            return b""
        return self._adapted(event, read, text[again:] if again else None)

    def _expected(self, count: int) -> str:
        """The next characters that the engine has to say again."""
        start = self._said - self._marks[0].chars
        return "".join(self._behind)[start : start + count]

    def _note(self, new: str, chars: int, tokens: int) -> None:
        """The engine has said `chars` characters more, of which `new` are delivered, with so many tokens."""
        self._said += chars
        if not new:
            return
        self._delivered += len(new)
        if certain := tokens == 1 and (self._plan.kind is EngineKind.VLLM or _ends_clean(new)):
            self._marks.append(_Mark(len(self._ids), self._said + self._plan.held_back))
        if certain and not self._plan.held_back:  # as usual
            self._marks.popleft()
            self._behind.clear()
            return
        self._behind.append(new)
        while len(self._marks) > 1 and self._marks[1].chars <= self._delivered:
            cut = self._marks[1].chars - self._marks.popleft().chars
            self._behind = [left] if (left := "".join(self._behind)[cut:]) else []

    def _diverged(self, how: str) -> bytes:
        self.obstacle = Obstacle.DIVERGED
        self.failure = f"another engine was to go on, but {how}"
        return b""

    def _adapted(self, event: bytes, read: _Event, text: str | None) -> bytes:
        """An event of a later engine, as the first one would have said it; with another text, where one is given."""
        fields = _fields_decoder.decode(memoryview(event)[6:])
        fields.update((name, value) for name, value in self._head.items() if name in fields)
        if text is not None:
            choices = _choices_decoder.decode(fields["choices"])
            if "delta" in choices[0]:
                choices[0]["delta"]["content"] = text
            else:
                choices[0]["text"] = text
            fields["choices"] = Raw(msgspec.json.encode(choices))
        if read.usage is not None and self._prompt is not None:
            fields["usage"] = Raw(msgspec.json.encode(self._summed(read.usage, len(self._prompt))))
        return self._without_ids(_written(fields))

    def _without_ids(self, event: bytes) -> bytes:
        """The event as it had been if nobody had asked for ids: vLLM then says null, and SGLang nothing."""
        at = event.rfind(_IDS)
        while at >= 0:
            end = event.find(b"]", at) + 1
            if not end:
                break  # cut off
            if self._plan.kind is EngineKind.VLLM:
                event = b"%bnull%b" % (event[: at + len(_IDS) - 1], event[end:])
            else:
                event = event[: event.rfind(b",", 0, at)] + event[end:]
            at = event.rfind(_IDS, 0, at)
        return event

    def _summed(self, usage: dict[str, Any], prompt: int) -> dict[str, Any]:
        """Token counts of a later engine, whose prompt was longer and whose answer shorter, as those of the whole."""
        answer = self._before + _count(usage.get("completion_tokens"))
        counts: dict[str, Any] = {"prompt_tokens": prompt, "total_tokens": prompt + answer, "completion_tokens": answer}
        details = usage.get("prompt_tokens_details")
        if isinstance(details, dict) and "cached_tokens" in details:
            counts["prompt_tokens_details"] = details | {"cached_tokens": min(prompt, _count(details["cached_tokens"]))}
        return usage | counts


def _unusual(read: _Event, choice: _Choice, text: str) -> Obstacle | None:
    """What makes the ids not tell the whole state."""
    delta = choice.delta
    if len(read.choices) > 1 or choice.index:
        return Obstacle.CHOICES
    if delta.reasoning or delta.reasoning_content or delta.tool_calls or delta.function_call:
        return Obstacle.PARSED
    return Obstacle.NO_IDS if text and not choice.token_ids else None


def _failure(read: _Event) -> str:
    """What an engine reports that has failed in the midst of a stream; empty for what is the client's fault, and for a good event."""
    if read.error is not None and isinstance(read.error.code, int) and read.error.code >= 500:
        return f"the engine reported an error in its stream: {read.error.message}"
    if read.choices and read.choices[0].finish_reason == "abort":
        return "the engine gave the request up"
    return ""


def _ends_clean(text: str) -> bool:
    """Whether SGLang has nothing left of a token: of an unfinished character it gives what stands before, up to a space or an ideograph."""
    return text[-1].isascii() and not text[-1].isspace()


def _count(value: object) -> int:
    return value if isinstance(value, int) else 0


def _written(fields: dict[str, Raw]) -> bytes:
    return b"data: " + msgspec.json.encode(fields) + END
