"""Published templates: their format is found, and answers are read as the models write them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from chat_formats.families import CALLS, TOOLS, Answer, calling, read
from chat_formats.public_templates import MARK, PUBLISHED, Published

from ggpy.chat_formats import ChatFormat, by_name, detect
from ggpy.tokenizer.chat import checked_messages, form_of, render

USER = {"role": "user", "content": "Weather?"}
RESULTS = [
    {"role": "tool", "tool_call_id": f"call{i:05}", "name": name, "content": f"result {i}"}
    for i, (name, _) in enumerate(CALLS)
]


def rendering(source: str) -> Callable[..., str]:
    def rendered(messages: Any, tools: Any = TOOLS, variables: Any = None) -> str:
        adapted = form_of(source).adapted(checked_messages(messages))
        return render(source, adapted, tools=tools, variables=variables)

    return rendered


@pytest.fixture(scope="module", params=PUBLISHED)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def family(name: str) -> Published:
    return PUBLISHED[name]


@pytest.fixture(scope="module")
def found(family: Published) -> ChatFormat:
    return detect(rendering(family.source))


def test_the_format_is_found(name: str, family: Published, found: ChatFormat) -> None:
    assert found.name == name
    assert (found.reasoning_open, found.reasoning_opened) == (family.before.strip(), family.opened)
    prompt = rendering(family.source)([USER])
    assert found.opens_reasoning(prompt) == family.opened


@pytest.mark.parametrize("thought", ["", "First, <b>\nthe weather."])
@pytest.mark.parametrize("text", ["", "I look."])
@pytest.mark.parametrize("n", [0, 1, 2])
def test_answers_cut_anywhere(
    name: str, family: Published, found: ChatFormat, thought: str, text: str, n: int
) -> None:
    """Reasoning, text, and no, one or two calls."""
    text = "" if n and found.bare_calls else text
    calls = ["", _first(name, family.calls), family.calls][n]
    before = "" if family.opened else family.before
    answer = f"{before}{thought}{family.after}" if thought or family.opened else ""
    opener, closer = family.said
    if text:
        answer += opener + text + (closer if n else "")
    answer += calls
    whole = read(found, [answer])
    assert (whole.text, whole.reasoning, whole.parsed()) == (text, thought, CALLS[:n])
    assert read(found, list(answer)) == whole
    for cut in range(1, len(answer)):
        assert read(found, [answer[:cut], answer[cut:]]) == whole, (answer[:cut], answer[cut:])


def _first(name: str, calls: str) -> str:
    """The first of two calls, as it stands alone."""
    if name in ("granite", "nemotron"):
        head, _, rest = calls.partition(', {"name": "add_note"')
        return head + rest.partition("}}")[2]
    if name == "gemma3":
        return calls.replace('add_note(text="12")\n', "")
    ends = {"seed-oss": "</seed:tool_call>", "minicpm5": "</function>", "generic": "}}}"}
    ends |= {"kimi-k2": "<|tool_call_end|>", "kimi-k3": "<|close|>call<|sep|>"}
    ends |= {"minimax-m3": f"{MARK}</invoke>\n"}
    end = {**ends, "solar": "<|tool_call:end|>"}.get(name, "</\uff5cDSML\uff5cinvoke>\n")
    head, _, rest = calls.partition(end)
    section = rest.rpartition("\n")[2] if name.startswith("deepseek") else ""
    closers = {"kimi-k2": "<|tool_calls_section_end|>", "kimi-k3": "<|close|>tools<|sep|>"}
    closers |= {"minimax-m3": f"{MARK}</tool_call>"}
    section = closers.get(name, section)
    return head + end + section


def test_calls_in_the_history_are_those_of_an_answer(family: Published, found: ChatFormat) -> None:
    """What the prompt says of earlier calls, the parser reads; results stand after it."""
    messages = [USER, calling(content="I look."), *RESULTS, {"role": "user", "content": "And?"}]
    prompt = rendering(family.source)(messages)
    results = [prompt.index(f"result {i}") for i in range(2)]
    assert prompt.index("I look.") < results[0] < results[1] < prompt.rindex("And?")
    if family.in_words:
        said = [json.dumps({"tool_call": {"name": n, "arguments": a}}) for n, a in CALLS]
        assert json.loads(said[1])["tool_call"]["name"] == "add_note"
        assert all(line in prompt.replace("\u00e3", "\\u00e3") for line in said)
        return
    written = prompt[prompt.index("I look.") + len("I look.") : results[0]]
    assert family.calls in written
    plain = detect(rendering(family.source)).parser
    assert plain is not None and read(found, list(family.calls), reasoning=False).parsed() == CALLS


def test_values_in_cdata() -> None:
    """MiniCPM's way to write what XML would take for markup, streamed as it comes."""
    found = by_name("minicpm5")
    arguments = {"text": 'a <b> & "c"\n</param> ]]'}
    source = PUBLISHED["minicpm5"].source
    prompt = rendering(source)([USER, calling([("add_note", arguments)])])
    start = prompt.rindex("<function name=")
    text = prompt[start : prompt.index("</function>", start) + len("</function>")]
    assert "<![CDATA[" in text
    whole = read(found, [text])
    assert (whole.parsed(), whole.text) == ([("add_note", arguments)], "")
    assert read(found, list(text)) == whole
    number = '<function name="get_weather"><param name="days"><![CDATA[3]]></param></function>'
    assert read(found, list(number)).parsed() == [("get_weather", {"days": 3})]


def test_values_in_nested_tags() -> None:
    """Lists and objects of any depth, with a schema or without; a string has any text in it."""
    found = detect(rendering(PUBLISHED["minimax-m3"].source))
    entry = {"type": "object", "properties": {"x": {"type": "integer"}, "t": {"type": "string"}}}
    told = {"list": {"type": "array", "items": entry}, "none": {"type": "array"}}
    told |= {"empty": {"type": "object"}, "either": {"type": ["string", "null"]}}
    schemas = {"make": {"type": "object", "properties": {"o": {"properties": told}}}}
    value = {"list": [{"x": 1, "t": "5"}, {"x": 2, "t": "<b>\n]"}], "none": [], "empty": {}}
    arguments = {"o": {**value, "either": "7"}, "free": {"k": [1, {"q": "w"}, "x y"]}}
    prompt = rendering(PUBLISHED["minimax-m3"].source)([USER, calling([("make", arguments)])])
    text = prompt[prompt.rindex(f"{MARK}<tool_call>") : prompt.rindex("[e~[")]
    whole = read(found, [text], schemas)
    assert (whole.parsed(), whole.text) == ([("make", arguments)], "")
    assert read(found, list(text), schemas) == whole
    cut = text[: text.index("<b>") + 4]
    assert read(found, [cut], schemas).calls[0][1].endswith('"t": "<b>\\n'), "as far as it came"
    empty = f'{MARK}<tool_call>{MARK}<invoke name="make">{MARK}</invoke>{MARK}</tool_call>Hi'
    assert read(found, list(empty), schemas) == Answer("Hi", calls=[("make", "{}")], ended=1)
    other = empty.replace("make", "rm")
    assert read(found, list(other), schemas).text == other, "which is no tool"


def test_an_answer_may_begin_with_the_end_of_no_reasoning() -> None:
    found = detect(rendering(PUBLISHED["minimax-m3"].source))
    assert read(found, list("</mm:think>Hi.")) == Answer("Hi.")
    assert read(found, ["</mm:think>Hi."], reasoning=False) == Answer("</mm:think>Hi.")
    variables = {"thinking_mode": "enabled"}
    prompt = rendering(PUBLISHED["minimax-m3"].source)([USER], TOOLS, variables)
    assert found.opens_reasoning(prompt)
    assert read(found, list("Hm.</mm:think>Hi."), reasoning_open=True) == Answer("Hi.", "Hm.")


def test_a_format_without_calls_leaves_them_in_the_text() -> None:
    """`content` is chosen by its name; reasoning is still told apart."""
    found = detect(rendering(PUBLISHED["minicpm5"].source), "content")
    calls = PUBLISHED["minicpm5"].calls
    answer = read(found, list(f"<think>\nHm.\n</think>\n\n{calls}"))
    assert answer == Answer(calls, "Hm.")
    assert found.instructions(TOOLS) == "" and not found.openers


def test_a_template_without_tools_has_instructions() -> None:
    found = detect(rendering(PUBLISHED["generic"].source))
    assert all(tool["function"]["name"] in found.instructions(TOOLS) for tool in TOOLS)


def test_solar_says_nothing_of_its_markers() -> None:
    """Its answers are messages, each with a marker, and end with one of two tokens."""
    found = detect(rendering(PUBLISHED["solar"].source))
    text = "<|think|>Hm.<|end|><|begin|>assistant<|content|>Hi <b>.<|flush|>"
    assert read(found, list(text)) == Answer("Hi <b>.", "Hm.")
    effort = {"reasoning_effort": "low"}
    prompt = rendering(PUBLISHED["solar"].source)([USER], None, effort)
    assert prompt.endswith("<|think|><|end|><|begin|>assistant")
    assert not found.opens_reasoning(prompt)
    assert read(found, list("<|content|>Hi.<|end|>")) == Answer("Hi.")
    calls = PUBLISHED["solar"].calls + "<|calls|>"
    assert read(found, list(calls)).text == ""
