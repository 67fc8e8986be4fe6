"""One stream from two engines: what its client gets of each, and when it gets no more."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from engines.types import EngineKind
from router.resume import Obstacle, Plan, decide
from router.routes import INFERENCE
from router.transcript import DONE, MAX_EVENT_BYTES, Transcript

PROMPT = [7, 8]
FAILED = {"error": {"message": "EngineCore encountered an issue.", "type": "InternalServerError", "param": None, "code": 500}}


def plan(*, chat: bool = True, kind: EngineKind = EngineKind.VLLM, **fields: object) -> Plan:
    body: dict[str, object] = {"stream": True, "temperature": 0, "max_tokens": 100} | fields
    body |= {"messages": [{"role": "user", "content": "x"}]} if chat else {"prompt": PROMPT}
    decided = decide(INFERENCE[b"/v1/chat/completions" if chat else b"/v1/completions"], msgspec.json.encode(body), kind)
    assert isinstance(decided, Plan)
    return decided


def event(body: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def opening(prompt: list[int] | None, name: str = "one", **fields: object) -> bytes:
    """A chat's first event."""
    choice = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    return event({"id": name, "object": "c", "created": len(name), "model": "m", "choices": [choice], "prompt_token_ids": prompt} | fields)


def said(text: str | None, ids: list[int] | None, name: str = "one", finish: str | None = None, **fields: object) -> bytes:
    """A chat's event of text."""
    choice = {"index": 0, "delta": {} if text is None else {"content": text}, "logprobs": None, "finish_reason": finish, "token_ids": ids}
    return event({"id": name, "object": "c", "created": len(name), "model": "m", "choices": [choice | fields]})


def begun(*events: bytes, **fields: object) -> Transcript:
    """A chat of which the client has the opening and these."""
    transcript = Transcript(plan(**fields))  # type: ignore[arg-type]
    transcript.feed(opening(PROMPT) + b"".join(events))
    return transcript


def asked(transcript: Transcript) -> dict[str, Any]:
    body = transcript.resume()
    assert isinstance(body, bytes), body
    fields: dict[str, Any] = msgspec.json.decode(body)
    return fields


def test_ids_are_kept_and_not_shown_even_where_a_text_looks_like_them() -> None:
    transcript = Transcript(plan())
    tricky = 'x","token_ids":[1],"prompt_token_ids":[2]'
    assert transcript.feed(opening(PROMPT)) == opening(None)
    assert transcript.feed(said(tricky, [1])) == said(tricky, None)
    assert asked(transcript)["kv_transfer_params"] == {"prompt_token_ids": [*PROMPT, 1]}


def test_an_event_is_passed_on_when_it_is_whole() -> None:
    transcript = Transcript(plan())
    stream = opening(PROMPT) + said("a", [1])
    got = [transcript.feed(stream[at : at + 1]) for at in range(len(stream))]
    assert [piece for piece in got if piece] == [opening(None), said("a", None)]
    assert transcript.feed(said("b", [2])[:-1]) == b""
    assert asked(transcript)["kv_transfer_params"] == {"prompt_token_ids": [*PROMPT, 1]}


def test_a_later_engine_speaks_under_the_first_ones_name_and_says_its_role_to_nobody() -> None:
    transcript = begun(said("a", [1]))
    assert asked(transcript)["max_tokens"] == 99
    assert transcript.feed(opening([*PROMPT, 1], "another")) == b""
    assert transcript.feed(said("b", [2], "another")) == said("b", None)
    assert transcript.feed(said("c", [3], "another", "stop") + DONE) == said("c", None, finish="stop") + DONE
    assert transcript.finished
    assert transcript.done


def test_half_a_character_is_generated_again() -> None:
    transcript = begun(said("a", [1]), said(None, [2]), said(None, [3]))
    body = asked(transcript)
    assert (body["kv_transfer_params"], body["max_tokens"]) == ({"prompt_token_ids": [*PROMPT, 1]}, 99)


def test_text_behind_the_last_mark_has_to_come_again_and_is_left_out() -> None:
    transcript = begun(said("a", [1]), said("bc", [2, 3]))
    assert asked(transcript)["kv_transfer_params"] == {"prompt_token_ids": [*PROMPT, 1]}
    assert transcript.feed(opening([*PROMPT, 1], "another") + said("b", [2], "another")) == b""
    assert transcript.feed(said("cd", [3], "another")) == said("d", None)


def test_text_that_does_not_come_again_is_the_end() -> None:
    transcript = begun(said("a", [1]), said("bc", [2, 3]))
    asked(transcript)
    assert transcript.feed(opening([*PROMPT, 1], "another") + said("x", [2], "another") + said("y", [3], "another")) == b""
    assert "repeat" in transcript.failure
    assert transcript.resume() is Obstacle.DIVERGED


def test_an_engine_that_ends_before_what_was_delivered_is_the_end() -> None:
    transcript = begun(said("a", [1]), said("bc", [2, 3]))
    asked(transcript)
    assert transcript.feed(opening([*PROMPT, 1], "another") + said("b", [2], "another", "stop")) == b""
    assert transcript.resume() is Obstacle.DIVERGED


@pytest.mark.parametrize("prompt", [PROMPT, None, [*PROMPT, 2]])
def test_an_engine_that_did_not_take_the_ids_is_never_heard(prompt: list[int] | None) -> None:
    transcript = begun(said("a", [1]))
    asked(transcript)
    assert transcript.feed(opening(prompt, "another") + said("a", [1], "another") + DONE) == b""
    assert "take up" in transcript.failure
    assert transcript.resume() is Obstacle.DIVERGED
    assert not transcript.done


def test_a_form_that_is_not_known_is_no_continuation() -> None:
    transcript = begun(said("a", [1]))
    asked(transcript)
    assert transcript.feed(b'data:{"choices":[{"text":"a"}]}\n\n') == b""
    assert transcript.resume() is Obstacle.DIVERGED


def test_sampled_text_behind_the_last_mark_is_in_the_way() -> None:
    assert begun(said("a", [1]), said("bc", [2, 3]), temperature=1).resume() is Obstacle.UNCERTAIN
    assert isinstance(begun(said("bc", [2, 3]), said("a", [1]), temperature=1).resume(), bytes)
    assert isinstance(begun(said("a", [1]), said(None, [2, 3]), temperature=1).resume(), bytes)


def test_nothing_delivered_begins_again() -> None:
    transcript = Transcript(plan())
    assert transcript.feed(opening(PROMPT)[:-5]) == b""
    assert "kv_transfer_params" not in asked(transcript)
    assert transcript.feed(opening(PROMPT, "another")) == opening(None, "another")
    assert transcript.feed(said("a", [1], "another")) == said("a", None, "another")


@pytest.mark.parametrize(
    ("bad", "obstacle"),
    [
        (said("b", None), Obstacle.NO_IDS),
        (said("b", [2], index=1), Obstacle.CHOICES),
        (said(None, [2], delta={"reasoning": "hm"}), Obstacle.PARSED),
        (said(None, [2], delta={"tool_calls": [{}]}), Obstacle.PARSED),
        (b'data: {"choices":[{"index":"x"}]}\n\n', Obstacle.UNREADABLE),
        (b'data:{"choices":[]}\n\n', Obstacle.UNREADABLE),
        (b': a comment\ndata: {"choices":[]}\n\n', Obstacle.UNREADABLE),
        (said("b", [2**32]), Obstacle.UNREADABLE),
    ],
)
def test_a_stream_that_says_more_than_its_text_passes_and_is_not_resumed(bad: bytes, obstacle: Obstacle) -> None:
    transcript = Transcript(plan())
    got = transcript.feed(opening(PROMPT) + said("a", [1]) + bad + said("c", [3]))
    assert got.startswith(opening(None) + said("a", None))
    assert got.endswith(said("c", None))
    assert b'token_ids":[' not in got
    assert transcript.resume() is obstacle
    assert transcript.failure == ""


def test_an_engine_that_tells_no_prompt_is_not_resumed() -> None:
    transcript = Transcript(plan())
    assert transcript.feed(opening(None) + said("a", None)) == opening(None) + said("a", None)
    assert transcript.resume() is Obstacle.NO_IDS


def test_lines_that_end_otherwise_pass_at_once_and_are_not_resumed() -> None:
    transcript = Transcript(plan())
    stream = opening(PROMPT).replace(b"\n", b"\r\n")
    assert transcript.feed(stream[:-1]) + transcript.feed(stream[-1:]) == opening(None).replace(b"\n", b"\r\n") + b""
    assert transcript.resume() is Obstacle.UNREADABLE


def test_an_event_without_an_end_is_not_kept_for_ever() -> None:
    transcript = Transcript(plan())
    assert transcript.feed(b"data: " + b"x" * MAX_EVENT_BYTES).startswith(b"data: xxx")
    assert transcript.resume() is Obstacle.UNREADABLE


def test_comments_pass() -> None:
    transcript = begun()
    assert transcript.feed(b": ping\n\n" + said("a", [1])) == b": ping\n\n" + said("a", None)
    assert isinstance(transcript.resume(), bytes)


def test_an_engine_whose_core_has_died_says_so_in_order_and_is_not_heard_if_another_goes_on() -> None:
    transcript = begun(said("a", [1]))
    assert transcript.feed(event(FAILED) + DONE) == b""
    assert "EngineCore encountered" in transcript.failure
    assert not transcript.done
    assert asked(transcript)["max_tokens"] == 99
    assert transcript.failure == ""
    assert transcript.feed(opening([*PROMPT, 1], "another") + said("b", [2], "another")) == said("b", None)
    assert transcript.rest() == b""


def test_a_request_that_an_engine_gave_up_may_go_on_elsewhere() -> None:
    transcript = begun(said("a", [1]))
    assert transcript.feed(said("", [], finish="abort") + DONE) == b""
    assert transcript.failure
    assert isinstance(transcript.resume(), bytes)


def test_an_error_that_is_the_clients_passes() -> None:
    told = event({"error": {"message": "too long", "type": "BadRequestError", "code": 400}})
    transcript = Transcript(plan())
    assert transcript.feed(told + DONE) == told + DONE
    assert transcript.failure == ""


def test_where_it_will_not_go_on_an_engines_error_passes() -> None:
    transcript = begun(said("b", None))
    assert transcript.feed(event(FAILED) + DONE) == event(FAILED) + DONE


def test_a_text_that_was_complete_is_ended_from_here() -> None:
    transcript = begun(said("a", [1]), said("b", [2], finish="stop"))
    assert transcript.finished
    assert transcript.closing() == DONE
    transcript = begun(said("a", [1]), said("b", [2], finish="stop"), stream_options={"include_usage": True})
    usage = {"prompt_tokens": 2, "total_tokens": 4, "completion_tokens": 2}
    assert transcript.closing() == event({"id": "one", "object": "c", "created": 3, "model": "m", "choices": [], "usage": usage}) + DONE
    transcript.feed(DONE)
    assert transcript.closing() == b""


def test_usage_is_that_of_the_whole() -> None:
    transcript = begun(said("a", [1]), stream_options={"include_usage": True})
    asked(transcript)
    transcript.feed(opening([*PROMPT, 1], "another") + said("b", [2], "another", "length"))
    details = {"cached_tokens": 3, "created_cache_tokens": 0}
    usage = {"prompt_tokens": 3, "total_tokens": 4, "completion_tokens": 1, "prompt_tokens_details": details}
    got = transcript.feed(event({"id": "another", "created": 7, "choices": [], "usage": usage}))
    summed = {"prompt_tokens": 2, "total_tokens": 4, "completion_tokens": 2, "prompt_tokens_details": details | {"cached_tokens": 2}}
    assert got == event({"id": "one", "created": 3, "choices": [], "usage": summed})


@pytest.mark.parametrize(("text", "certain"), [("a", True), ("é", False), ("a ", False), ("\n", False), ("語", False), (" .", True)])
def test_sglang_may_give_a_part_of_what_a_token_says(text: str, certain: bool) -> None:
    transcript = Transcript(plan(chat=False, kind=EngineKind.SGLANG, temperature=1))
    choice = {"index": 0, "text": text, "finish_reason": None}
    got = transcript.feed(event({"id": "one", "created": 3, "choices": [choice | {"token_ids": [1], "prompt_token_ids": PROMPT}]}))
    assert got == event({"id": "one", "created": 3, "choices": [choice]})
    body = transcript.resume()
    assert isinstance(body, bytes) if certain else body is Obstacle.UNCERTAIN
