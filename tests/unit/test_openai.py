"""A body that is not what it says is the client's mistake, found before anything is made of it."""

import pytest

from router import openai


@pytest.mark.parametrize(
    "body",
    [b'{"\xff":1}', b'{"user":"\xff"}', b'{"cache_salt":"\xff"}', b'{"prompt":"a \xff b"}', b'{"unread":{"deep":["\xff"]}}', b'{"a":'],
    ids=repr,
)
def test_bytes_that_are_no_json_are_refused_wherever_they_stand(body: bytes) -> None:
    with pytest.raises(openai.BadBody, match="not valid JSON") as refused:
        openai.parse(body)
    assert refused.value.status == 400


@pytest.mark.parametrize("number", [b"1e999", b"9" * 5000], ids=["float", "int"])
def test_a_number_that_is_too_large_is_for_the_engine_to_complain_about(number: bytes) -> None:
    body = openai.parse(b'{"user":%b,"cache_salt":%b,"priority":%b,"prompt":[%b],"previous_response_id":%b}' % ((number,) * 5))
    assert (body.session, body.salt, body.urgency, body.goes_on_from) == (None, None, 0, None)
    assert openai.completion_prompt(body) is None


def test_text_beyond_ascii_is_text() -> None:
    body = openai.parse('{"user":"Zoë","prompt":"日本語"}'.encode())
    assert (body.session, openai.completion_prompt(body)) == ("Zoë", openai.Prompt(text="日本語"))
