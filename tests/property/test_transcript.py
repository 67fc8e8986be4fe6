"""However often engines die, wherever in a byte, and however they cut their events: the client reads what one engine would have told."""

from __future__ import annotations

import random
from typing import NamedTuple

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.types import EngineKind
from router.resume import Obstacle, Plan, decide
from router.routes import INFERENCE
from router.transcript import Transcript
from tests.talking import END_TOKEN, Asked, events, heard, read_back, text_of

CHAT, COMPLETION = INFERENCE[b"/v1/chat/completions"], INFERENCE[b"/v1/completions"]


NO_STOPS: st.SearchStrategy[tuple[str, ...]] = st.just(())


def requests(*, stops: st.SearchStrategy[tuple[str, ...]] = NO_STOPS) -> st.SearchStrategy[Asked]:
    return st.builds(
        Asked,
        prompt=st.lists(st.integers(0, 255), min_size=1, max_size=5).map(tuple),
        limit=st.integers(1, 40),
        stop=stops,
        chat=st.booleans(),
        usage=st.booleans(),
        continuous=st.booleans(),
        ends=st.booleans(),
        draw=st.just(0),
    )


def planned(asked: Asked, temperature: float) -> Plan:
    body: dict[str, object] = {"stream": True, "temperature": temperature, "max_tokens": asked.limit}
    body |= {"messages": [{"role": "user", "content": "x"}]} if asked.chat else {"prompt": list(asked.prompt)}
    body |= {"stop": list(asked.stop), "stream_options": {"include_usage": asked.usage, "continuous_usage_stats": asked.continuous}}
    plan = decide(CHAT if asked.chat else COMPLETION, msgspec.json.encode(body), EngineKind.VLLM)
    assert isinstance(plan, Plan), plan
    return plan


def cut_up(stream: bytes, rng: random.Random) -> list[bytes]:
    pieces = []
    while stream:
        size = rng.choice([1, 7, 100, 1000, 5000])
        pieces.append(stream[:size])
        stream = stream[size:]
    return pieces


class Told(NamedTuple):
    """What a client gets from engines that die, one after the other."""

    stream: bytes
    tokens: list[int]
    """Behind the text, as far as they are known."""


def told(asked: Asked, temperature: float, breaks: list[float], seed: int) -> Told | Obstacle:
    """Each engine dies after such a part of what it would have said."""
    rng = random.Random(seed)
    transcript = Transcript(planned(asked, temperature))
    given, now = b"", asked
    for number, part in enumerate([*breaks, None]):
        now = now._replace(draw=number if temperature else 0)
        stream = b"".join(events(now, rng=rng, name=f"engine {number}"))
        for piece in cut_up(stream if part is None else stream[: int(part * len(stream))], rng):
            given += transcript.feed(piece)
            assert not transcript.failure
        if part is None or transcript.done or transcript.finished:
            break
        body = transcript.resume()
        if isinstance(body, Obstacle):
            return body
        if transcript._prompt is not None:
            now = read_back(body, now)
    return Told(given + transcript.closing(), transcript._ids.tolist())


def undisturbed(asked: Asked) -> bytes:
    return b"".join(events(asked, rng=random.Random(0), ids=False, merge=0))


BREAKS = st.lists(st.floats(0, 1), max_size=4)


@settings(max_examples=400)
@given(
    asked=requests(stops=st.lists(st.text("ab é語\n", min_size=1, max_size=4), max_size=2).map(tuple)), breaks=BREAKS, seed=st.integers()
)
def test_at_temperature_0_the_text_is_the_same_with_stop_strings_and_half_characters(asked: Asked, breaks: list[float], seed: int) -> None:
    answer = told(asked, 0, breaks, seed)
    assert isinstance(answer, Told), answer
    client, expected = heard(answer.stream), heard(undisturbed(asked))
    assert client._replace(heads=set()) == expected._replace(heads=set())
    assert len(client.heads) == 1


@settings(max_examples=400)
@given(asked=requests(), breaks=BREAKS, seed=st.integers())
def test_sampled_text_goes_on_from_the_tokens_behind_what_was_delivered_or_not_at_all(asked: Asked, breaks: list[float], seed: int) -> None:
    answer = told(asked, 1, breaks, seed)
    if isinstance(answer, Obstacle):
        assert answer is Obstacle.UNCERTAIN
        return
    client = heard(answer.stream)
    assert client.done
    assert client.text.rstrip("\ufffd") == text_of(answer.tokens)
    assert client.finish == ("stop" if END_TOKEN in answer.tokens else "length")
    if asked.usage:
        assert client.usage is not None
        assert (client.usage["prompt_tokens"], client.usage["completion_tokens"]) == (len(asked.prompt), len(answer.tokens))


@given(asked=requests(), seed=st.integers())
def test_a_stream_that_does_not_break_is_the_one_that_had_not_been_asked_for_ids(asked: Asked, seed: int) -> None:
    transcript = Transcript(planned(asked, 0))
    with_ids = b"".join(events(asked, rng=random.Random(seed)))
    without = b"".join(events(asked, rng=random.Random(seed), ids=False))
    assert b"".join(map(transcript.feed, cut_up(with_ids, random.Random(seed)))) == without
    assert transcript.done
    assert transcript.rest() == b""
