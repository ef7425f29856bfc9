"""Muse Glimmer's messages to itself, to the user and to tools, cut anywhere."""

from __future__ import annotations

import pytest
from chat_formats.families import SCHEMAS, Answer, read

from ggpy.chat_formats import CallArguments, CallBegin, CallEnd, ReasoningPart, by_name

MUSE = by_name("muse-glimmer")
NEXT = "<|eom|><|start|>assistant"
THOUGHT = f" to=self<|message|>Hm, <atem:invoke>?{NEXT}"
DONE = "</atem:invoke>\n</atem:function_calls>"
NOTE = ("add_note", '{"text": "x"}')


def invoked(text: str = "x", name: str = "add_note") -> str:
    value = f'<atem:parameter name="text">{text}</atem:parameter>\n'
    return f'<atem:invoke name="{name}">\n{value}</atem:invoke>\n'


def block(*calls: str) -> str:
    return f"<atem:function_calls>\n{''.join(calls)}</atem:function_calls>"


def message(*calls: str, to: str = "add_note") -> str:
    return f" to={to}<|message|>{block(*calls)}"


ANSWERS = {
    "text": (" to=user<|message|>Hi\n<|eot|>", Answer("Hi")),
    "to nobody": ("<|message|>Hi", Answer("Hi")),
    "no header": ("Hi, to=you <there>", Answer("Hi, to=you <there>")),
    "reasoning": (
        f"{THOUGHT} to=user<|message|>Hi<|eot|>",
        Answer("Hi", "Hm, <atem:invoke>?"),
    ),
    "a call": (f"{message(invoked())}<|eot|>", Answer(calls=[NOTE], ended=1)),
    "reasoning and calls": (
        THOUGHT + message(invoked()) + NEXT + message(invoked(), to="other") + "<|eot|>",
        Answer("", "Hm, <atem:invoke>?", [NOTE, NOTE], 2),
    ),
    "text and a call": (
        f" to=user<|message|>I look.{NEXT}{message(invoked())}",
        Answer("I look.", "", [NOTE], 1),
    ),
    "several calls in a message": (
        message(invoked(), invoked()),
        Answer(calls=[NOTE, NOTE], ended=2),
    ),
    "strings are as they are": (
        message(invoked(' \n a "</b>" \n')),
        Answer(calls=[("add_note", '{"text": " \\n a \\"</b>\\" \\n"}')], ended=1),
    ),
    "no arguments": (
        f' to=add_note<|message|><atem:function_calls>\n<atem:invoke name="add_note">\n{DONE}',
        Answer(calls=[("add_note", "{}")], ended=1),
    ),
    "text after a call is none of the answer": (
        f"{message(invoked())}\nand so on<|eot|>",
        Answer(calls=[NOTE], ended=1),
    ),
    "a tool that was not offered": (
        f"{message(invoked(name='rm'), to='rm')}<|eot|>",
        Answer(block(invoked(name="rm"))),
    ),
    "one of two that was not offered": (
        f"{message(invoked(), invoked(name='rm'))}<|eot|>",
        Answer(block(invoked(name="rm")).removeprefix("<atem:function_calls>\n"), "", [NOTE], 1),
    ),
    "text to a tool": (" to=add_note<|message|>Well.<|eot|>", Answer("Well.")),
    "a call that is cut off": (
        message(invoked()).partition("x</")[0] + "ab",
        Answer(calls=[("add_note", '{"text": "ab')], ended=1),
    ),
    "a header that is cut off": (
        f" to=user<|message|>Hi{NEXT} to=ad",
        Answer("Hi"),
    ),
}


@pytest.mark.parametrize("case", ANSWERS)
def test_answers_cut_anywhere(case: str) -> None:
    text, expected = ANSWERS[case]
    assert read(MUSE, [text]) == expected
    assert read(MUSE, list(text)) == expected
    for cut in range(len(text)):
        assert read(MUSE, [text[:cut], text[cut:]]) == expected


def test_without_tools_messages_to_them_are_text() -> None:
    text = f"{message(invoked())}<|eot|>"
    assert read(MUSE, list(text), None) == Answer(block(invoked()))


def test_reasoning_may_stay_in_the_text() -> None:
    text = f" to=self<|message|>Hm.{NEXT} to=user<|message|>Hi<|eot|>"
    kept = Answer(" to=self<|message|>Hm.<|eom|>Hi")
    assert read(MUSE, list(text), reasoning=False) == kept


def test_deltas_come_as_soon_as_they_are_certain() -> None:
    parser = MUSE.parser(SCHEMAS)
    assert parser.feed(" to=self<|message|>Let me") == [ReasoningPart("Let me")]
    assert parser.feed(" see<|eo") == [ReasoningPart(" see")]
    head = 'm|><|start|>assistant to=add_note<|message|><atem:function_calls>\n<atem:invoke name="'
    assert parser.feed(head + "add_no") == []
    assert parser.feed('te">\n<atem:para') == [CallBegin(0, "add_note")]
    assert parser.feed('meter name="text">a "b') == [CallArguments(0, '{"text": "a \\"b')]
    assert parser.feed(" </atem:par") == [CallArguments(0, " ")]
    assert parser.feed(f"ameter>\n{DONE}<|eot|>") == [CallArguments(0, '"}'), CallEnd(0)]
    assert parser.finish() == []
