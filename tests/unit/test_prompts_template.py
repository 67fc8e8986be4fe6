from __future__ import annotations

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from router.prompts.errors import NotRenderable, PromptRejected
from router.prompts.shape import shape_of
from router.prompts.template import ChatTemplate


def render(source: str, **variables: object) -> str:
    return ChatTemplate(source, strftime=lambda form: f"<{form}>").render(variables)


def test_blocks_are_trimmed_as_hugging_face_trims_them() -> None:
    assert render("a\n  {% if true %}\nb\n  {% endif %}\nc\n") == "a\nb\nc"


def test_json_is_written_as_python_writes_it_without_escaping_html() -> None:
    value = {"b": "<ü>&'", "a": [1, 2.0, None, True]}
    assert render("{{ value | tojson }}", value=value) == '{"b": "<ü>&\'", "a": [1, 2.0, null, true]}'
    assert render("{{ value | tojson(indent=2) }}", value={"a": 1}) == '{\n  "a": 1\n}'
    assert render("{{ value | tojson(separators=(',', ':'), sort_keys=true) }}", value={"b": 1, "a": 2}) == '{"a":2,"b":1}'
    assert render("{{ value | tojson(ensure_ascii=true) }}", value="ü") == '"\\u00fc"'


def test_the_helpers_templates_expect_are_there() -> None:
    assert render("{{ strftime_now('%d %b %Y') }}") == "<%d %b %Y>"
    assert render("{% for x in [1, 2, 3] %}{% if x == 2 %}{% continue %}{% endif %}{{ x }}{% endfor %}") == "13"
    assert render("{% for x in [1, 2, 3] %}{% if x == 2 %}{% break %}{% endif %}{{ x }}{% endfor %}") == "1"
    assert render("{% set ns = namespace(n=0) %}{% for x in [1, 2] %}{% set ns.n = ns.n + x %}{% endfor %}{{ ns.n }}") == "3"


def test_a_generation_block_is_its_body() -> None:
    assert render("a{% generation %}b{{ x }}{% endgeneration %}c", x=1) == "ab1c"


def test_what_the_template_refuses_is_said_in_its_own_words() -> None:
    with pytest.raises(PromptRejected) as rejection:
        render("{{ raise_exception('Roles must alternate!') }}")
    assert rejection.value.message == "Roles must alternate!"


@pytest.mark.parametrize(
    "source",
    [
        "{{ missing.attribute.of.nothing }}",
        "{{ 1 / 0 }}",
        "{{ missing | tojson }}",
        "{{ ''.__class__.__mro__ }}",  # the sandbox
        "{% set x = messages.append(1) %}",  # and its immutability
        "{{ range(1000000) | list }}",
    ],
)
def test_a_template_that_fails_otherwise_is_not_renderable(source: str) -> None:
    with pytest.raises(NotRenderable, match="the chat template failed"):
        render(source, messages=[])


def test_a_template_that_does_not_compile_is_not_renderable() -> None:
    with pytest.raises(NotRenderable, match="does not compile"):
        ChatTemplate("{% if %}")


def test_a_template_that_explodes_is_stopped() -> None:
    source = "{% for x in range(90000) %}{% for y in range(90000) %}{{ 'x' * 1000 }}{% endfor %}{% endfor %}"
    with pytest.raises(NotRenderable, match="more than 100000 characters"):
        ChatTemplate(source, max_chars=100_000).render({})


CHATML = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>\n{% endfor %}"
STRIPPING = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</>\n{% endfor %}"
PARTS = "{% for m in messages %}<{{ m.role }}>{% for part in m.content %}{{ part.text }}{% endfor %}</>\n{% endfor %}"


def continued(source: str, content: object) -> str:
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": content}]
    return ChatTemplate(source).render({"messages": messages}, continue_final_message=True).rpartition("<assistant>")[2]


def test_a_continued_message_ends_where_its_text_ends() -> None:
    assert continued(CHATML, "It is ") == "It is "
    assert continued(CHATML, "") == ""


def test_a_continued_message_is_stripped_where_the_template_strips() -> None:
    assert continued(STRIPPING, "It is \n") == "It is"


def test_of_a_continued_message_in_parts_the_last_text_is_continued() -> None:
    assert continued(PARTS, [{"type": "text", "text": "One."}, {"type": "text", "text": "Tw"}]) == "One.Tw"


@pytest.mark.parametrize(
    ("source", "content"),
    [
        ("{% for m in messages %}{{ m.role }}{% endfor %}", "x"),
        ("{% for m in messages %}{{ m.content[:3] }}{% endfor %}", "longer than that"),
        ("{% for m in messages %}{{ m.content | upper }}{% endfor %}", "lower"),
        (CHATML, None),
        (PARTS, [{"type": "image"}]),
    ],
)
def test_a_message_whose_end_is_not_shown_cannot_be_continued(source: str, content: object) -> None:
    with pytest.raises(NotRenderable):
        continued(source, content)


def test_continuing_leaves_the_clients_messages_alone() -> None:
    messages = [{"role": "assistant", "content": [{"type": "text", "text": "a"}]}]
    ChatTemplate(PARTS).render({"messages": messages}, continue_final_message=True)
    assert messages == [{"role": "assistant", "content": [{"type": "text", "text": "a"}]}]


LOOPS_FOR_BOTH = "{% for message in messages %}{% for x in message['content'] %}{{ x }}{% endfor %}{% endfor %}"
LOOPS = [
    # as vLLM tells it, as SGLang does, the template
    ("openai", "openai", LOOPS_FOR_BOTH),
    ("openai", "openai", "{% for m in messages[1:] %}{% for x in m.content | list %}{{ x }}{% endfor %}{% endfor %}"),
    ("openai", "string", "{% for turn in messages %}{% for x in turn.content %}{{ x }}{% endfor %}{% endfor %}"),
    (
        "openai",
        "string",
        "{% set a = messages %}{% set b = a[1:] %}{% for t in b %}{% for x in t['content'] %}{{ x }}{% endfor %}{% endfor %}",
    ),
    ("openai", "string", "{% for t in messages %}{% set content = t.content %}{% for x in content %}{{ x }}{% endfor %}{% endfor %}"),
    (
        "openai",
        "string",
        "{% macro show(what) %}{% for x in what %}{{ x }}{% endfor %}{% endmacro %}{% for t in messages %}{{ show(t.content) }}{% endfor %}",
    ),
    (
        "openai",
        "string",
        "{% macro show(a, what) %}{% for x in what %}{{ x }}{% endfor %}{% endmacro %}{% for t in messages %}{{ show(1, what=t.content) }}{% endfor %}",
    ),
    (
        "string",
        "string",
        "{% macro show(content) %}{% for x in content %}{{ x }}{% endfor %}{% endmacro %}{% for t in messages %}{{ show(t.name) }}{% endfor %}",
    ),
    ("string", "string", "{% for message in messages %}{{ message.content }}{% endfor %}"),
    ("string", "openai", "{% for message in messages %}{{ message.content }}{% endfor %}{# no image here #}"),
    ("string", "openai", "{% for message in others %}{% for x in message.content %}{{ x }}{% endfor %}{% endfor %}"),
    ("string", "string", "{% for a, b in messages %}{% for x in content %}{{ x }}{% endfor %}{% endfor %}"),
    ("string", "string", "{% for message in messages %}{% for call in message.tool_calls %}{{ call }}{% endfor %}{% endfor %}"),
]


@pytest.mark.parametrize(("vllm", "sglang", "source"), LOOPS)
def test_whether_a_template_loops_over_content_is_told_as_each_engine_tells_it(vllm: str, sglang: str, source: str) -> None:
    shape = shape_of(source, ImmutableSandboxedEnvironment())
    assert (shape.vllm_content, shape.sglang_content) == (vllm, sglang)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ m.a }}{{ m['a'] }}{{ m.get('a') }}{{ m.nothing }}{{ m['nothing'] }}", "111"),
        ("{% for k, v in m.items() %}{{ k }}{{ v }}{% endfor %}", "a1itemsx"),
        ("{{ m['items'] }}", "x"),
        ("{{ m.nothing is defined }}{{ m['nothing'] is defined }}{{ m.a is defined }}", "FalseFalseTrue"),
        ("{{ m.pop is defined }}{{ m.__class__ is defined }}{{ m['__class__'] is defined }}", "FalseFalseFalse"),
        ("{% for x in [1, 2] %}{{ loop.index }}{{ loop.last }}{{ loop.__class__ is defined }}{% endfor %}", "1FalseFalse2TrueFalse"),
        ("{% set ns = namespace(a=1) %}{{ ns.a }}{{ ns.b is defined }}{{ ns.__class__ is defined }}", "1FalseFalse"),
    ],
)
def test_short_cuts_through_the_sandbox_lead_where_the_long_way_does(source: str, expected: str) -> None:
    variables = {"m": {"a": 1, "items": "x"}}
    assert ChatTemplate(source).render(variables) == expected
    assert ImmutableSandboxedEnvironment().from_string(source).render(variables) == expected
