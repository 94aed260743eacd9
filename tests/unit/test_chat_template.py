"""Chat templates against transformers' renderer, and what malformed messages and templates say."""

import datetime
import enum
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wavekit.chat_template import ChatTemplate
from wavekit_engines.errors import MisuseError

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
CHAT = [
    {"role": "system", "content": "Sei kurz & <knapp>."},
    {"role": "user", "content": "Größe? 🎉"},
    {"role": "assistant", "content": "42", "reasoning": "6 * 7"},
    {"role": "assistant", "content": "42", "reasoning_content": "6 * 7", "thinking": "other"},
    {"role": "user", "content": "Danke\n"},
]
TOOLS = [{"type": "function", "function": {"name": "größe", "parameters": {"b": 1, "a": [True, None, "<&'>"]}}}]

TEMPLATES = {
    "blocks are trimmed": """
{%- for message in messages %}
    {% if message.role == 'user' %}
  {{ bos_token }}[{{ message['content'] | trim }}]
    {% else %}
{{ message.content }}{{ eos_token }}
    {% endif %}
{% endfor %}
{{ 'assistant:' if add_generation_prompt }}
""",
    "loop controls": """{% for message in messages %}{% if loop.index0 == 0 %}{% continue %}{% endif %}
{{ loop.index }} {{ message.content }}{% if message.role == 'assistant' %}{% break %}{% endif %}{% endfor %}""",
    "generation": """{% set mark = '?' %}{% for m in messages %}{% generation %}
{% set mark = '!' %}{{ loop.index }}{{ m.content }}{{ mark }}
{% endgeneration %}{{ mark }}{%- generation -%}  x  {%- endgeneration -%}{% endfor %}""",
    "json": """{% for tool in tools %}{{ tool | tojson }}|{{ tool | tojson(indent=2) }}|{{ tool | tojson(sort_keys=true,
ensure_ascii=true, separators=(',', ':')) }}{% endfor %}{{ tools is defined }}{{ documents is defined }}""",
    "namespace and slices": """{% set ns = namespace(last=-1, system='') %}{% if messages[0].role == 'system' %}
{% set ns.system = messages[0].content %}{% set messages = messages[1:] %}{% endif %}
{% for m in messages[::-1] %}{% set ns.last = loop.index %}{% endfor %}{{ ns.last }}{{ ns.system }}
{{ messages | length }}{{ dict(a=1).a }}
{% macro say(x) %}<{{ x }}>{% endmacro %}{{ say(messages[0]['content'].split()[0].upper()) }}""",
    "variables": "{{ enable_thinking }}{{ absent }}{{ absent is defined }}{{ eos_token }}{{ pad }}{{ extra.x[0] }}",
    "strings": "{{ messages[0].content.replace('&', '+').startswith('S') }}{{ '%s-%d' | format('a', 3) }}{{ 7 // 2 }}",
    "reasoning": "{% for m in messages %}{{ m | tojson }}{% endfor %}",
}


def reference(source: str, messages: list[dict[str, Any]], **variables: Any) -> str:
    """What transformers renders."""
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    ((text,), _) = utils.render_jinja_template([messages], chat_template=source, **variables)
    assert isinstance(text, str)
    return text


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("prompt", [True, False])
def test_a_template_renders_as_in_transformers(name: str, prompt: bool) -> None:
    source = TEMPLATES[name]
    variables = {"enable_thinking": False, "extra": {"x": ("y",)}, "eos_token": "<end>"}
    ours = ChatTemplate({"default": source}, SPECIAL).render(CHAT, prompt, TOOLS, **variables)
    expected = reference(source, CHAT, tools=TOOLS, add_generation_prompt=prompt, **{**SPECIAL, **variables})
    assert ours == expected


TEXT = st.text(max_size=20)


@given(st.lists(st.fixed_dictionaries({"role": TEXT, "content": TEXT}), min_size=1, max_size=4))
def test_any_messages_render_as_in_transformers(messages: list[dict[str, str]]) -> None:
    source = "{{ bos_token }}{% for m in messages %}\n{{ m.role }}: {{ m['content'] }}{{ m | tojson }}\n{% endfor %}\n"
    assert ChatTemplate({"default": source}, SPECIAL).render(messages) == reference(source, messages, **SPECIAL)


def test_the_date_is_todays() -> None:
    ours = ChatTemplate({"default": "{{ strftime_now('%Y') }}"}, {}).render(CHAT)
    assert ours == str(datetime.datetime.now().year)


def test_tools_choose_the_template_made_for_them() -> None:
    template = ChatTemplate({"default": "plain", "tool_use": "with tools"}, {})
    assert template.render(CHAT) == "plain"
    assert template.render(CHAT, tools=TOOLS) == "with tools"
    assert ChatTemplate({"default": "plain"}, {}).render(CHAT, tools=TOOLS) == "plain"


def test_none_counts_as_absent_and_tool_calls_stand_in_for_content() -> None:
    source = "{% for m in messages %}{{ 'content' in m }}{{ m.tool_calls is defined }};{% endfor %}"
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": {}}], "name": None}
    assert ChatTemplate({"default": source}, {}).render([call, CHAT[1]]) == "FalseTrue;TrueFalse;"


def test_messages_are_not_changed() -> None:
    messages = [{"role": "user", "content": "a", "name": None}]
    ChatTemplate({"default": "{% set _ = messages[0].update({'content': 'b'}) if false %}"}, {}).render(messages)
    assert messages == [{"role": "user", "content": "a", "name": None}]


def test_subclasses_of_plain_values_reach_the_template_as_plain_values() -> None:
    class Role(str, enum.Enum):
        USER = "user"

    source = "{{ messages[0].role }}{{ messages[0].role.name }}{{ temperature }}"
    template = ChatTemplate({"default": source}, {})
    assert template.render([{"role": Role.USER, "content": ""}], temperature=np.float64(0.5)) == "user0.5"


@pytest.mark.parametrize(
    ("messages", "line"),
    [
        ([], "the list of messages is empty"),
        ("hello", "messages must be a list"),
        ({"role": "user", "content": "x"}, "messages must be a list"),
        (["hello"], "message 0 must be a dict"),
        ([CHAT[0], {"content": "x"}], "message 1 has no 'role'"),
        ([{"role": None, "content": "x"}], "message 0 has no 'role'"),
        ([{"role": 3, "content": "x"}], "message 0 has no 'role'"),
        ([{"role": "user"}], "message 0 has no 'content'"),
        ([{"role": "user", "content": None}], "message 0 has no 'content'"),
        ([{"role": "user", "content": object()}], "message 0 must hold plain JSON values .* object"),
    ],
)
def test_malformed_messages_are_named(messages: Any, line: str) -> None:
    with pytest.raises(MisuseError, match=line) as error:
        ChatTemplate({"default": "x"}, {}).render(messages)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("tools", ["f", ["f"], [lambda: None], {"name": "f"}])
def test_tools_that_are_not_schemas_are_refused(tools: Any) -> None:
    with pytest.raises(MisuseError, match="tools must be a list of JSON schemas"):
        ChatTemplate({"default": "x"}, {}).render(CHAT, tools=tools)


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("{{ raise_exception('Only user and\n assistant roles are supported!') }}", "Only user and assistant roles"),
        ("{{ messages[0].absent.deep }}", "has no attribute 'absent'"),
        ("{{ 'a' + 1 }}", "concatenate"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ messages[0].content.format }}{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% set _ = messages.append(1) %}", "unsafe|not safely callable"),
        ("{% for x in range(10 ** 9) %}{% endfor %}", "range"),
        ("{% include 'x' %}", "no loader"),
        ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", "recursion"),
        ("{{ messages | tojson(indent='x', sort_keys=3, separators=4) }}", "."),
    ],
)
def test_what_a_template_refuses_is_said_in_one_line(source: str, line: str) -> None:
    with pytest.raises(MisuseError, match=line) as error:
        ChatTemplate({"default": source}, {}).render(CHAT)
    assert str(error.value).startswith("the model's chat template does not accept these messages: ")
    assert "\n" not in str(error.value)


def test_a_template_that_is_not_jinja_names_its_line_and_the_way_out() -> None:
    with pytest.raises(MisuseError, match=r"not valid Jinja \(line 2: .*plain text"):
        ChatTemplate({"default": "\n{% if %}"}, {}).render(CHAT)


@pytest.mark.parametrize(
    ("templates", "line"), [({}, "no chat template"), ({"rag": "x"}, r"\(rag\) is named 'default'")]
)
def test_without_a_template_plain_text_is_asked_for(templates: dict[str, str], line: str) -> None:
    with pytest.raises(MisuseError, match=f"{line}.*plain text"):
        ChatTemplate(templates, {}).render(CHAT)
