"""What a scanner finds in answers as the two engines, and three APIs, send them."""

from __future__ import annotations

import pytest

from router.sse import Scanner, Usage

ROLE = b'data: {"id":"c","choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}'
ROLE_SGLANG = (
    b'data: {"id":"c","choices":[{"delta":{"role":"assistant","content":"","reasoning_content":null,"tool_calls":null}}],"usage":null}'
)
TOKEN = b'data: {"id":"c","choices":[{"index":0,"delta":{"content":"Hel"},"finish_reason":null}]}'
FIRST_WITH_ROLE = b'data: {"id":"c","choices":[{"index":0,"delta":{"role":"assistant","content":"Hel"}}]}'
COMPLETION = b'data: {"id":"c","object":"text_completion","choices":[{"index":0,"text":" a"}]}'
GENERATE = b'data: {"text": "Hel", "meta_info": {"id": "x"}}'
USAGE = b'data: {"id":"c","choices":[],"usage":{"prompt_tokens":7,"total_tokens":9,"completion_tokens":2}}'
DONE = b"data: [DONE]"
ERROR = b'data: {"error": {"message": "no", "code": 500}}'


def scanned(*lines: bytes, streamed: bool = True) -> tuple[Scanner, list[bool]]:
    scanner = Scanner(streamed=streamed)
    return scanner, [scanner.feed(line + b"\n\n") for line in lines]


@pytest.mark.parametrize(
    ("lines", "at"),
    [
        ([ROLE, TOKEN, TOKEN, DONE], 1),
        ([ROLE_SGLANG, TOKEN], 1),
        ([FIRST_WITH_ROLE, TOKEN], 0),
        ([b": keep-alive", b"retry: 3000", COMPLETION], 2),
        ([GENERATE], 0),
        ([ROLE, USAGE, DONE], None),
        ([ERROR, DONE], None),
        ([b'data: {"object":"error","message":"no","code":400}'], None),
        ([b"data:", b"data: ", b"event: x"], None),
        ([b'event: own\ndata: {"x":1}'], 0),
        (
            [
                b'event: message_start\ndata: {"type":"message_start","message":{"usage":{"input_tokens":3}}}',
                b'event: content_block_start\ndata: {"type":"content_block_start"}',
                b'event: ping\ndata: {"type": "ping"}',
                b'event: content_block_delta\ndata: {"type":"content_block_delta","delta":{"text":"H"}}',
            ],
            3,
        ),
        (
            [
                b'data: {"type":"message_start"}',
                b'data: {"type":"message_delta","usage":{"output_tokens":1}}',
                b'data: {"type":"content_block_delta"}',
            ],
            2,
        ),
        (
            [
                b'event: response.created\ndata: {"response":{"error":null},"type":"response.created"}',
                b'event: response.output_item.added\ndata: {"item":{},"type":"response.output_item.added"}',
                b'event: response.output_text.delta\ndata: {"delta":"H","type":"response.output_text.delta"}',
            ],
            2,
        ),
        ([b'event: error\ndata: {"type":"error","error":{"type":"overloaded_error"}}'], None),
    ],
)
def test_the_first_token_is_the_first_generated_output(lines: list[bytes], at: int | None) -> None:
    scanner, told = scanned(*lines)
    assert [number for number, first in enumerate(told) if first] == ([] if at is None else [at])
    assert scanner.first_token is (at is not None)


@pytest.mark.parametrize(
    ("line", "failed"),
    [
        (ERROR, True),
        (b'data: {"object": "error", "message": "no"}', True),
        (b'event: error\ndata: {"x":1}', True),
        (b'data: {"type":"error","error":{}}', True),
        (b'event: response.failed\ndata: {"response":{"error":{"code":"server_error"}}}', True),
        (b'data: {"choices":[{"delta":{"content":"an error: {\\"error\\": 1}"}}]}', False),
        (b'data: {"response":{"error":null},"type":"response.created"}', False),
        (b": error", False),
    ],
)
def test_an_error_inside_a_stream_is_noticed(line: bytes, failed: bool) -> None:
    assert scanned(ROLE, line)[0].failed is failed


@pytest.mark.parametrize(
    ("lines", "usage"),
    [
        ([TOKEN, DONE], None),
        ([TOKEN, USAGE, DONE], Usage(7, 2, None)),
        ([b'data: {"usage":{"prompt_tokens":7,"completion_tokens":1}}', b'data: {"usage": null}'], Usage(7, 1, None)),
        ([b'data: {"usage":{"prompt_tokens":7,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":5}}}'], Usage(7, 2, 5)),
        ([b'data: {"usage":{"input_tokens":7,"output_tokens":2,"cache_read_input_tokens":4}}'], Usage(11, 2, 4)),
        ([b'data: {"usage":{"input_tokens":7,"input_tokens_details":{"cached_tokens":3},"output_tokens":2}}'], Usage(7, 2, 3)),
        ([b'data: {"usage":{"prompt_tokens":"seven"}}'], None),
        ([b'data: {"choices":[{"delta":{"content":"{\\"usage\\":{\\"prompt_tokens\\":1}}"}}]}'], None),
    ],
)
def test_usage_is_the_last_object_of_that_name(lines: list[bytes], usage: Usage | None) -> None:
    assert scanned(*lines)[0].usage() == usage


def test_usage_is_found_in_json_with_much_before_and_behind_it() -> None:
    scanner = Scanner(streamed=False)
    body = (
        b'{"choices":["'
        + b"x" * 100_000
        + b'"],"usage":{"prompt_tokens":7,"completion_tokens":2},"prompt_token_ids":['
        + b"1," * 100_000
        + b"1]}"
    )
    for at in range(0, len(body), 1000):
        assert scanner.feed(body[at : at + 1000]) is False
    assert scanner.usage() == Usage(7, 2, None)
    assert (scanner.first_token, scanner.failed) == (False, False)


@pytest.mark.parametrize("ending", [b"\n", b"\r\n", b"\r"])
def test_an_event_keeps_its_name_wherever_its_lines_are_cut(ending: bytes) -> None:
    stream = ending.join([b"event: response.created", b'data: {"response":{"id":"r"}}', b"", b":"])
    for at in range(1, len(stream)):
        scanner = Scanner(streamed=True)
        assert not scanner.feed(stream[:at])
        assert not scanner.feed(stream[at:]), at


def test_a_line_longer_than_is_kept_still_carries_its_token_and_its_usage() -> None:
    scanner = Scanner(streamed=True)
    line = b'data: {"choices":[{"delta":{"audio":"' + b"A" * 300_000 + b'"}}],"usage":{"prompt_tokens":7,"completion_tokens":2}}\n\n'
    told = [scanner.feed(line[at : at + 4000]) for at in range(0, len(line), 4000)]
    assert sum(told) == 1
    assert scanner.usage() == Usage(7, 2, None)
