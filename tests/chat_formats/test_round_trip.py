"""What a template writes of calls and reasoning, the parser of its format reads in any pieces."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chat_formats.families import BARE, CALLS, END, FAMILIES, SCHEMAS, TOOLS, Answer, calling, read

from ggpy.chat_formats import ChatFormat, detect
from ggpy.tokenizer import Tokenizer

USER = {"role": "user", "content": "Weather?"}


@pytest.fixture(scope="module")
def tokenizer(tiny_path: Callable[[str], Path]) -> Tokenizer:
    return Tokenizer.from_gguf(tiny_path("llama"))


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def render(tokenizer: Tokenizer, family: str) -> Callable[..., str]:
    def rendered(messages: Any, tools: Any = TOOLS, variables: Any = None, **more: Any) -> str:
        return tokenizer.apply_chat_template(
            messages, FAMILIES[family], tools=tools, variables=variables, **more
        )

    return rendered


@pytest.fixture(scope="module")
def found(render: Callable[..., str]) -> ChatFormat:
    return detect(render)


def answered(render: Callable[..., str], message: Any) -> str:
    """What the model would have generated of a message."""
    prompt = render([USER])
    whole = render([USER, message], add_generation_prompt=False)
    assert whole.startswith(prompt)
    return whole[len(prompt) :].removesuffix(END)


def test_the_format_is_found(family: str, found: ChatFormat) -> None:
    assert found.name == family


def test_markers_of_reasoning_are_found(found: ChatFormat, render: Callable[..., str]) -> None:
    if found.channels is None:
        written = answered(render, {"role": "assistant", "content": "x", "reasoning_content": "Rr"})
        before, after = written.split("Rr")
        assert before.strip() == found.reasoning_open
        assert after.strip().removesuffix("x").strip() == found.reasoning_close


@pytest.mark.parametrize("reasoning", ["", "First,\nthe <weather>."])
@pytest.mark.parametrize("content", ["", "I look."])
def test_calls_come_back(
    family: str, found: ChatFormat, render: Callable[..., str], reasoning: str, content: str
) -> None:
    content = "" if family in BARE else content
    more = {"reasoning_content": reasoning} if reasoning else {}
    text = answered(render, calling(content=content, **more))
    expected = Answer(content, reasoning, read(found, [text]).calls, len(CALLS))
    assert expected.parsed() == CALLS
    assert read(found, list(text)) == expected
    rng = random.Random(text)
    for _ in range(8):
        cuts = sorted(rng.sample(range(len(text)), 6))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert read(found, pieces) == expected
    for cut in range(1, len(text) - 1, 4):
        assert read(found, [text[:cut], text[cut:]]) == expected


def test_text_alone_comes_back(found: ChatFormat, render: Callable[..., str]) -> None:
    end = "" if found.channels else "\n"  # a message of harmony ends at a marker
    text = 'Sunny:\n\n* 3 < 4 [ok]\n* `{"a": 1}`' + end
    written = answered(render, {"role": "assistant", "content": text})
    assert read(found, list(written)) == Answer(text)


def test_a_call_that_is_cut_off_ends(found: ChatFormat, render: Callable[..., str]) -> None:
    text = answered(render, calling(CALLS[:1]))
    for cut in range(len(text)):
        answer = read(found, [text[:cut]])
        assert len(answer.calls) <= 1
        if answer.calls:
            whole = read(found, [text]).calls[0][1]
            assert answer.calls[0][0] == "get_weather"
            assert whole.startswith(answer.calls[0][1])


def test_arguments_come_before_the_call_ends(found: ChatFormat, render: Callable[..., str]) -> None:
    text = answered(render, calling([("add_note", {"text": "a b c d e f"}), CALLS[0]]))
    parser = found.parser(SCHEMAS)
    steps = [len(parser.feed(char)) for char in text]
    first_end = max(text.index("f", text.index("e f")), 1)
    assert sum(steps[:first_end]) > (0 if family_waits(found) else 3)


def family_waits(found: ChatFormat) -> bool:
    """Whether arguments come one by one, when each is complete."""
    return found.name in ("pythonic", "olmo3", "lfm2", "gemma4", "functiongemma")


def test_results_of_tools_are_rendered(render: Callable[..., str]) -> None:
    result = {"role": "tool", "tool_call_id": "call00000", "content": "22 degrees"}
    rendered = render([USER, calling(CALLS[:1]), result])
    assert rendered.index("get_weather") < rendered.index("22 degrees")
    assert rendered.startswith(render([USER], add_generation_prompt=False)[: len("<|s")])
