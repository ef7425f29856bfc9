"""Messages in OpenAI's form: what is wrong with them, and the form that a template wants."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ggpy.tokenizer import Tokenizer
from ggpy.tokenizer.chat import ChatTemplateError, form_of
from ggpy.tokenizer.message_form import checked_messages
from tools import make_tiny

USER = {"role": "user", "content": "Weather?"}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
CALLER = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "22"}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def tokenizer(tiny_path: Callable[[str], Path]) -> Tokenizer:
    return Tokenizer.from_gguf(tiny_path("llama"))


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ("hi", r"messages\[1\] is 'hi': give a dict"),
        ({"role": "judge", "content": ""}, r"messages\[1\] has the role 'judge'.*developer"),
        ({"role": "user"}, r"messages\[1\] has the content None: it must be a text"),
        ({"role": "assistant", "content": None}, r"messages\[1\] has the content None"),
        ({"role": "tool", "content": 5}, r"messages\[1\] has the content 5"),
        (
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]},
            r"messages\[1\] has the content of type 'image_url': content\[1\] must be",
        ),
        ({"role": "user", "content": ["a"]}, r"has the content \['a'\]: content\[0\] must be"),
        ({**CALLER, "tool_calls": "f"}, r"messages\[1\]\.tool_calls is 'f': it must be a list"),
        ({**CALLER, "tool_calls": [3]}, r"messages\[1\]\.tool_calls\[0\] is 3: it must be"),
        (
            {**CALLER, "tool_calls": [CALL, {"function": {"arguments": "{}"}}]},
            r"messages\[1\]\.tool_calls\[1\]\.function\.name is None",
        ),
        (
            {**CALLER, "tool_calls": [{"function": {"name": "f", "arguments": 3}}]},
            r"tool_calls\[0\]\.function\.arguments is 3: it must be a JSON text",
        ),
        ({**CALLER, "reasoning_content": 3}, r"messages\[1\]\.reasoning_content is 3"),
        ({**RESULT, "tool_call_id": 3}, r"messages\[1\]\.tool_call_id is 3: it must be a text"),
    ],
)
def test_what_is_wrong_is_told_with_its_place(message: Any, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        checked_messages([USER, message])


def test_what_checking_makes_of_messages() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    odd = {"function": {"name": "g", "arguments": "no JSON"}}
    found = checked_messages(
        [
            {"role": "developer", "content": parts, "name": None},
            {**CALLER, "tool_calls": [CALL, odd]},
            RESULT,
        ]
    )
    assert found[0] == {"role": "developer", "content": "a\nb"}
    assert [c["function"]["arguments"] for c in found[1]["tool_calls"]] == [{"a": 1}, "no JSON"]
    assert found[1]["tool_calls"][1]["type"] == "function"
    assert found[2]["name"] == "f"
    assert CALL["function"]["arguments"] == '{"a": 1}', "the caller's messages are left alone"


MANY = "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
LOOP = MANY + "{% for c in m.tool_calls or [] %}{{ c.function.name }}"
ENDS = "{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "prompt"),
    [
        (LOOP + "{{ c.function.arguments|tojson }}" + ENDS, '[assistant]f{"a": 1}[tool]22'),
        (LOOP + "({{ '' + c.function.arguments }})" + ENDS, '[assistant]f({"a": 1})[tool]22'),
        (
            "{% for m in messages %}[{{ m.role }}]{% if m.content is none %}"
            "{% for c in m.tool_calls %}{{ c.function.name }}{{ c.function.arguments|tojson }}"
            "{% endfor %}{% else %}{{ m.content }}{% endif %}{% endfor %}",
            '[assistant]f{"a": 1}[tool]22',
        ),
        (
            MANY + "{% endfor %}",
            '[assistant]{"tool_call": {"name": "f", "arguments": {"a": 1}}}'
            '[user]{"tool_response": {"name": "f", "content": "22"}}',
        ),
        (
            "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}"
            "{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}",
            '[assistant]{"tool_call": {"name": "f", "arguments": {"a": 1}}}'
            '[user]{"tool_response": {"name": "f", "content": "22"}}',
        ),
    ],
)
def test_templates_get_calls_as_they_want_them(
    tokenizer: Tokenizer, template: str, prompt: str
) -> None:
    rendered = tokenizer.apply_chat_template([USER, CALLER, RESULT], template, tools=TOOLS)
    assert rendered == "[user]Weather?" + prompt


def test_templates_that_iterate_over_parts_get_parts(tokenizer: Tokenizer) -> None:
    template = "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
    assert tokenizer.apply_chat_template([USER], template) == "Weather?"


def test_a_developer_is_the_system_where_the_template_knows_none(tokenizer: Tokenizer) -> None:
    messages = [{"role": "developer", "content": "x"}]
    assert tokenizer.apply_chat_template(messages, "{{ messages[0].role }}") == "system"
    knows = "{% if messages[0].role == 'developer' %}yes{% endif %}"
    assert tokenizer.apply_chat_template(messages, knows) == "yes"


def test_reasoning_has_the_name_that_the_template_uses(tokenizer: Tokenizer) -> None:
    message = {"role": "assistant", "content": "x", "reasoning_content": "Hm."}
    assert tokenizer.apply_chat_template([message], "{{ messages[0].thinking }}") == "Hm."
    assert tokenizer.apply_chat_template([message], "{{ messages[0].reasoning }}") == "Hm."
    assert tokenizer.apply_chat_template([message], "{{ messages[0]['reasoning'] }}") == "Hm."
    assert tokenizer.apply_chat_template([message], "{{ messages[0].reasoning_content }}") == "Hm."


def test_variables_and_tools_reach_the_template(tokenizer: Tokenizer) -> None:
    template = "{{ tools|tojson }} {{ enable_thinking }} {{ effort }}"
    rendered = tokenizer.apply_chat_template(
        [USER], template, tools=TOOLS, variables={"enable_thinking": False, "effort": "low"}
    )
    assert rendered == f"{json.dumps(TOOLS)} False low"
    assert tokenizer.apply_chat_template([USER], "{{ tools is none }}", tools=[]) == "True"


@pytest.mark.parametrize("name", ["messages", "tools", "bos_token", "eos_token"])
def test_variables_replace_nothing(tokenizer: Tokenizer, name: str) -> None:
    with pytest.raises(ValueError, match=f"the template variable '{name}' cannot be set"):
        tokenizer.apply_chat_template([USER], "x", variables={name: "y"})


def test_a_template_that_needs_too_much_is_not_probed_again_and_again() -> None:
    loops = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %} tool"
    with pytest.raises(ChatTemplateError, match="processor time"):
        form_of(loops)


SYSTEM = {"role": "system", "content": "Be brief."}
AT_THE_START = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}{# tool_calls #}"
)
NONE_AT_ALL = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}"
    "{% elif (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('alternate') }}"
    "{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
)
LEFT_OUT = (
    "{% for m in messages %}{% if m.role != 'system' or loop.first %}[{{ m.role }}]{{ m.content }}"
    "{% endif %}{% endfor %}"
)
ALTERNATES = (  # a system message is counted as an answer
    "{% for m in messages %}{% if not (loop.first and m.role == 'system') and (m.role == 'user')"
    " != ((loop.index0 - (messages[0].role == 'system')) % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}[{{ m.role }}]{{ m.content }}"
    "{% endfor %}"
)
LAST_ONE_WINS = (  # as DeepSeek-R1's distilled models
    "{% set ns = namespace(text='') %}{% for m in messages if m.role == 'system' %}"
    "{% set ns.text = m.content %}{% endfor %}{{ ns.text }}"
    "{% for m in messages if m.role != 'system' %}[{{ m.role }}]{{ m.content }}{% endfor %}"
)
ANSWER = {"role": "assistant", "content": "Why?"}
BOTH = "Weather?\n\nBe brief."


@pytest.mark.parametrize(
    ("template", "messages", "prompt"),
    [
        (MANY + "{% endfor %}", [USER, SYSTEM], "[user]Weather?[system]Be brief."),
        (AT_THE_START, [SYSTEM, USER], "[system]Be brief.[user]Weather?"),
        (AT_THE_START, [SYSTEM, SYSTEM, USER], "[system]Be brief.\n\nBe brief.[user]Weather?"),
        (AT_THE_START, [USER, SYSTEM], "[user]" + BOTH),
        (AT_THE_START, [USER, {**SYSTEM, "role": "developer"}], "[user]" + BOTH),
        (AT_THE_START, [USER, SYSTEM, ANSWER, USER], f"[user]{BOTH}[assistant]Why?[user]Weather?"),
        (
            AT_THE_START,
            [USER, ANSWER, SYSTEM, USER],
            "[user]Weather?[assistant]Why?[user]Be brief.\n\nWeather?",
        ),
        (
            AT_THE_START,
            [USER, ANSWER, SYSTEM],
            "[user]Weather?[assistant]Why?[user]Be brief.",
        ),
        (NONE_AT_ALL, [SYSTEM, USER, ANSWER], "[user]Be brief.\n\nWeather?[assistant]Why?"),
        (NONE_AT_ALL, [SYSTEM], "[user]Be brief."),
        (ALTERNATES, [SYSTEM, USER, SYSTEM], "[system]Be brief.[user]" + BOTH),
        (ALTERNATES, [USER, SYSTEM, ANSWER], f"[user]{BOTH}[assistant]Why?"),
        (LAST_ONE_WINS, [{**SYSTEM, "content": "Hi"}, USER, SYSTEM], "Hi[user]" + BOTH),
        (LEFT_OUT, [SYSTEM, USER, SYSTEM], "[system]Be brief.[user]" + BOTH),
    ],
)
def test_a_system_message_stands_where_the_template_knows_it(
    tokenizer: Tokenizer, template: str, messages: list[Any], prompt: str
) -> None:
    before = [dict(message) for message in messages]
    assert tokenizer.apply_chat_template(messages, template) == prompt
    assert messages == before, "the caller's messages are left alone"


def test_a_late_system_message_may_follow_a_result(tokenizer: Tokenizer) -> None:
    shown = "[{{ m.role }}]{{ m.content }}{{ m.tool_calls|tojson if m.tool_calls }}{% endfor %}"
    refuses = "{% if m.role == 'system' and loop.index0 and loop.previtem.role == 'tool' %}"
    refuses += "{{ raise_exception('no system here') }}{% endif %}"
    template = "{% for m in messages %}" + refuses + shown
    prompt = tokenizer.apply_chat_template([USER, CALLER, RESULT, SYSTEM], template, tools=TOOLS)
    assert prompt.endswith("[tool]22\n\nBe brief.")
    assert form_of(template).knows_system and not form_of(template).knows_late_system


AFTER_ANSWERS = (  # as Mistral's models: calls and results are no turns
    "{% set ns = namespace(n=0) %}{% for m in messages %}"
    "{% if m.role in ('user', 'assistant') and not m.tool_calls %}"
    "{% if (m.role == 'user') != (ns.n % 2 == 0) %}{{ raise_exception('alternate') }}{% endif %}"
    "{% set ns.n = ns.n + 1 %}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{{ m.tool_calls|tojson if m.tool_calls }}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "end"),
    [
        (AFTER_ANSWERS, "[tool]22\n\nWeather?"),
        (NONE_AT_ALL, '"content": "22"}}\n\nWeather?'),
        (MANY + "{% endfor %}", '"content": "22"}}[user]Weather?'),
        (AT_THE_START, "[tool]22[user]Weather?"),
    ],
)
def test_a_question_behind_a_result(tokenizer: Tokenizer, template: str, end: str) -> None:
    messages = [USER, CALLER, RESULT, USER]
    assert tokenizer.apply_chat_template(messages, template, tools=TOOLS).endswith(end)
    later = tokenizer.apply_chat_template([*messages, ANSWER, USER], template, tools=TOOLS)
    assert later.endswith(end + "[assistant]Why?[user]Weather?")


def test_two_results_where_the_template_knows_none(tokenizer: Tokenizer) -> None:
    messages = [USER, {**CALLER, "tool_calls": [CALL, {**CALL, "id": "c2"}]}, RESULT, RESULT]
    prompt = tokenizer.apply_chat_template(messages, NONE_AT_ALL)
    assert prompt.count("[user]") == 2 and prompt.count('"content": "22"') == 2


ONE_CALL = (
    "{% for m in messages %}{% if m.tool_calls %}"
    "{% if m.content and m.thinking %}{{ raise_exception('both') }}{% endif %}"
    "<{{ m.content or m.thinking }}>{% for c in m.tool_calls %}{% if MORE %}"
    "{{ c.function.name }} {{ c.function.arguments|tojson }};{% endif %}{% endfor %}"
    "{% else %}{{ m.content }};{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    "more",
    ["loop.first", "loop.length == 1 or raise_exception('one')"],
    ids=["gpt-oss", "llama 3"],
)
def test_a_template_of_one_call_gets_several_one_by_one(tokenizer: Tokenizer, more: str) -> None:
    """The first beside text and reasoning, which the template does not take together."""
    calls = [{**CALL, "id": id, "function": {"name": id, "arguments": "{}"}} for id in "abc"]
    asked = {**CALLER, "content": "T", "reasoning_content": "R", "tool_calls": calls}
    results = [{**RESULT, "tool_call_id": id, "content": f"of {id}"} for id in "ba"]
    given = tokenizer.apply_chat_template(
        [USER, asked, *results, USER], ONE_CALL.replace("MORE", more), tools=TOOLS
    )
    assert given == "Weather?;<R\n\nT>a {};of a;<>b {};of b;<>c {};Weather?;"


def test_a_file_may_have_a_template_for_tools() -> None:
    templates = {"": "plain", ".tool_use": "with tools", ".rag": "with documents"}
    named = {f"tokenizer.chat_template{name}": text for name, text in templates.items()}
    tokenizer = Tokenizer({**make_tiny.tokenizer("spm"), **named})
    assert tokenizer.apply_chat_template([USER]) == "plain"
    assert tokenizer.apply_chat_template([USER], tools=TOOLS) == "with tools"
    assert tokenizer.apply_chat_template([USER], "given", tools=TOOLS) == "given"
