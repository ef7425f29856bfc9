"""Answers whose first marker the prompt has written: of functionary 3.2 and of GLM-4-0414."""

from __future__ import annotations

import json

import pytest
from chat_formats.families import ARGUMENTS, CALLS, NAME, Answer, calling, read
from chat_formats.test_detect import USER, rendering

from ggpy.chat_formats import (
    CallArguments,
    CallBegin,
    CallEnd,
    TextPart,
    by_name,
    detect,
    with_written_calls,
)

FUNCTIONARY = by_name("functionary-v3.2")
SOURCE = (
    "{% if tools %}<|system|>>>>${recipient}{{ tools|tojson }}<|end|>{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>"
    "{{ '>>>all\n' if m.role == 'assistant' and m.content }}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}>>>"
    + NAME
    + "{{ '\n' }}"
    + ARGUMENTS
    + "{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>>>>{% endif %}"
)
NOTE = 'add_note\n{"text": "x"}'
CALL = ("add_note", '{"text": "x"}')
ANSWERS = {
    "text": ("all\nHi\n>>> add_note\nall", Answer("Hi\n>>> add_note\nall")),
    "a call": (NOTE, Answer(calls=[CALL], ended=1)),
    "two calls": (f"{NOTE}>>>{NOTE}", Answer(calls=[CALL] * 2, ended=2)),
    "text and a call": (f"all\nHi.\n>>>{NOTE}", Answer("Hi.", calls=[CALL], ended=1)),
    "a call and text": (f"{NOTE}>>>all\nHi.", Answer("Hi.", calls=[CALL], ended=1)),
    "text that looks like a call": (f"all\n{NOTE}", Answer(NOTE)),
    "a tool that was not offered": ("rm\n{}", Answer("rm\n{}")),
    "no recipient": ('{"a": 1}', Answer('{"a": 1}')),
    "a recipient that is cut off": ("al", Answer("al")),
}


@pytest.mark.parametrize("case", ANSWERS)
def test_answers_cut_anywhere(case: str) -> None:
    text, expected = ANSWERS[case]
    for cut in range(len(text)):
        assert read(FUNCTIONARY, [text[:cut], text[cut:]]) == expected
    assert read(FUNCTIONARY, list(text)) == expected


def test_without_tools_the_recipient_is_no_text() -> None:
    assert read(FUNCTIONARY, list("all\nHi"), None) == Answer("Hi")
    assert read(FUNCTIONARY, list("all\nHi"), None, reasoning=False) == Answer("Hi")


def test_deltas_come_as_soon_as_they_are_certain() -> None:
    parser = FUNCTIONARY.parser({"add_note": {}})
    assert parser.feed("all\nHi") == [TextPart("Hi")]
    assert parser.feed(" you.>>>add_no") == [TextPart(" you.")]
    assert parser.feed('te\n{"text": "a') == [
        CallBegin(0, "add_note"),
        CallArguments(0, '{"text": "a'),
    ]
    assert parser.feed('"}') == [CallArguments(0, '"}'), CallEnd(0)]


@pytest.mark.parametrize("content", ["", "I look."])
def test_what_the_template_writes_comes_back(content: str) -> None:
    render = rendering(SOURCE)
    found = detect(render)
    assert (found.name, found.begun) == ("functionary-v3.2", ">>>")
    prompt = render([USER], None, {})
    whole = render([USER, calling(content=content), USER], None, {})
    assert whole.startswith(prompt)
    text = whole[len(prompt) : whole.index("<|end|>", len(prompt))]
    answer = read(found, list(text))
    assert (answer.text, answer.parsed()) == (content, CALLS)
    assert json.loads(answer.calls[1][1]) == CALLS[1][1]


GLM = (
    "{% if tools %}<|system|>\n# \u53ef\u7528\u5de5\u5177\n{{ tools|tojson }}{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.metadata or '' }}\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def test_glm_4_says_only_how_tools_are_listed() -> None:
    """Earlier calls are written as the model writes them, and read so."""
    found = detect(rendering(GLM))
    assert (found.name, found.begun) == ("glm-4-0414", "<|assistant|>")
    (message,) = with_written_calls([calling()], found)
    text = message["content"]
    assert text.startswith("get_weather\n{") and "}<|assistant|>add_note\n{" in text
    answer = read(found, list(text))
    assert (answer.text, answer.parsed()) == ("", CALLS)
    assert read(found, list("\nHi\nyou.")) == Answer("Hi\nyou.")
    (message,) = with_written_calls([calling(content="I look.")], found)
    answer = read(found, list(f"\n{message['content']}"))
    assert (answer.text, answer.parsed()) == ("I look.", CALLS)
