"""Formats found where a template's calls are in no row, are not written, or are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from chat_formats.families import ARGUMENTS, COMMA, NAME, TOOLS, read, template

from ggpy.chat_formats import detect
from ggpy.tokenizer.chat import checked_messages, form_of, render

USER = {"role": "user", "content": "Weather?"}


def rendering(source: str) -> Callable[..., str]:
    def rendered(messages: Any, tools: Any, variables: Any) -> str:
        adapted = form_of(source).adapted(checked_messages(messages))
        return render(source, adapted, tools=tools, variables=variables)

    return rendered


PLAIN = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def test_unknown_markers_around_json_are_taken_over() -> None:
    call = '{{ \'{"fn": "\' }}' + NAME + '", "args": ' + ARGUMENTS + "}" + COMMA
    found = detect(rendering(template(call, "<calls>[", "]</calls>")))
    assert (found.name, found.section_open, found.section_close) == (
        "derived", "<calls>", "</calls>"
    )  # fmt: skip
    text = 'So: <calls>[{"fn": "add_note", "args": {"text": "x"}}, {"fn": "add_note"}]</calls>'
    answer = read(found, list(text))
    assert answer.text == "So:"
    assert answer.parsed() == [("add_note", {"text": "x"}), ("add_note", {})]


@pytest.mark.parametrize(
    ("says", "name"),
    [
        ("Answer with <tool_call>JSON</tool_call>.", "hermes"),
        ("List: <|tool_list_start|>", "lfm2"),
        ("Use <|tool_call|>.", "granite"),
        ("Use <tool_calls>[...]</tool_calls>.", "tool-calls-list"),
        ("", "generic"),
    ],
)
def test_a_prompt_with_tools_may_show_the_format(says: str, name: str) -> None:
    source = "{% if tools %}<|system|>" + says + "<|end|>{% endif %}" + PLAIN
    assert detect(rendering(source)).name == name


def test_templates_that_refuse_have_the_generic_format() -> None:
    assert detect(rendering("{{ raise_exception('no') }}")).name == "generic"


@pytest.mark.parametrize(
    ("opening", "opened"),
    [
        ("<|assistant|><think>\\n", True),
        ("<|assistant|>{% if enable_thinking %}<think>{% endif %}", False),
        ("<|assistant|>{{ '[THINK]' if not off }}", True),
    ],
)
def test_reasoning_that_the_prompt_opens(opening: str, opened: bool) -> None:
    source = PLAIN.replace("<|assistant|>", opening).replace("\\n", "\n")
    found = detect(rendering(source))
    marker = "[THINK]" if "THINK" in opening else "<think>"
    assert (found.reasoning_open, found.reasoning_opened) == (marker, opened)
    parser = found.parser(None)
    deltas = parser.feed("Rr" + found.reasoning_close + "Text")
    assert len(deltas) == (2 if opened else 1)


def test_unknown_tags_of_reasoning_are_taken_over() -> None:
    found = detect(rendering(template("", think="<musing>@</musing>")))
    assert (found.reasoning_open, found.reasoning_close) == ("<musing>", "</musing>")


def test_a_format_by_name_keeps_the_reasoning_of_the_template() -> None:
    found = detect(rendering(PLAIN.replace("<|assistant|>", "<|assistant|>[THINK]")), "mistral")
    assert (found.name, found.reasoning_open, found.reasoning_opened) == (
        "mistral", "[THINK]", True
    )  # fmt: skip
    assert TOOLS and read(found, ["a[/THINK]b"]).reasoning == "a"


@pytest.mark.parametrize(
    ("content", "marker"),
    [
        ("<response>\n{{ m.content }}\n</response>", "response"),
        ("{{ m.content.split('<answer>')[-1].split('</answer>')[0].strip() }}", "answer"),
    ],
    ids=["ernie", "hunyuan"],
)
def test_markers_around_the_text_are_no_text(content: str, marker: str) -> None:
    source = PLAIN.replace("{{ m.content }}", content).replace("\\n", "\n")
    found = detect(rendering(source))
    text = f"<think>\nRr\n</think>\n\n<{marker}>\nHi <b>you</b>.\n</{marker}>\n"
    answer = read(found, list(text))
    assert (answer.reasoning, answer.text) == ("Rr", "Hi <b>you</b>.")
    assert detect(rendering(PLAIN)).dropped == ()
