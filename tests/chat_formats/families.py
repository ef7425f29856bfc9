"""Short chat templates in the style of families of models, and answers read by a parser.

The templates are of the tests: they write calls, results and reasoning as the family does, and
nothing else of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ggpy.chat_formats import (
    CallArguments,
    CallBegin,
    CallEnd,
    ChatFormat,
    Delta,
    ReasoningPart,
    TextPart,
)

END = "<|end|>"
VALUE = "{{ v if v is string else v|tojson }}"
ITEMS = "{% for k, v in c.function.arguments.items() %}"
NAME, ARGUMENTS = "{{ c.function.name }}", "{{ c.function.arguments|tojson }}"
OBJECT = f'{{{{ \'{{"name": \' }}}}"{NAME}", "arguments": {ARGUMENTS}}}'
LLAMA = f'{{{{ \'{{"name": \' }}}}"{NAME}", "parameters": {ARGUMENTS}}}'
COMMA = "{{ ', ' if not loop.last }}"


def template(
    call: str, opener: str = "", closer: str = "", think: str = "<think>\n|\n</think>\n\n"
) -> str:
    """A template. call: Jinja for the call `c`; think: what is around reasoning, with | between."""
    before, after = think.replace("\n", "\\n").split("|" if think.count("|") == 1 else "@")
    return (
        "{% if tools %}<|system|>Tools: {{ tools|tojson }}<|end|>{% endif %}"
        "{% for m in messages %}<|{{ m.role }}|>"
        "{% if m.reasoning_content %}{{ '"
        + before
        + "' + m.reasoning_content + '"
        + after
        + "' }}{% endif %}{{ m.content }}"
        "{% if m.tool_calls %}" + opener + "{% for c in m.tool_calls %}" + call + "{% endfor %}"
        "" + closer + "{% endif %}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )


WIDE = {"|": "\uff5c", "_": "\u2581"}


def wide(text: str) -> str:
    return "".join(WIDE.get(char, char) for char in text)


XML = (
    "{{ '<tool_call>\\n<function=' }}"
    + NAME
    + "{{ '>\\n' }}"
    + ITEMS
    + ("{{ '<parameter=' + k + '>\\n' }}" + VALUE + "{{ '\\n</parameter>\\n' }}")
    + "{% endfor %}{{ '</function>\\n</tool_call>' }}{{ '\\n' if not loop.last }}"
)
GLM = (
    "{{ '<tool_call>' }}"
    + NAME
    + "{{ '\\n' }}"
    + ITEMS
    + ("<arg_key>{{ k }}</arg_key>{{ '\\n' }}<arg_value>" + VALUE + "</arg_value>{{ '\\n' }}")
    + "{% endfor %}</tool_call>{{ '\\n' if not loop.last }}"
)
INVOKE = (
    "{{ '<invoke name=\"' }}"
    + NAME
    + "{{ '\">\\n' }}"
    + ITEMS
    + '<parameter name="{{ k }}">'
    + VALUE
    + "</parameter>{{ '\\n' }}{% endfor %}</invoke>{{ '\\n' }}"
)
PYTHON = (
    NAME + "(" + ITEMS + "{{ k }}={{ v|tojson if v is string else v }}"
    "{{ ', ' if not loop.last }}{% endfor %}){{ ', ' if not loop.last }}"
)
GEMMA = (
    "<|tool_call>call:" + NAME + "{{ '{' }}" + ITEMS + "{{ k }}:"
    "{{ '<|\"|>' + v + '<|\"|>' if v is string else v|tojson }}{{ ',' if not loop.last }}"
    "{% endfor %}{{ '}' }}<tool_call|>"
)
FUNCTION_GEMMA = (
    GEMMA.replace("<|tool_call>", "<start_function_call>")
    .replace("<tool_call|>", "<end_function_call>")
    .replace('<|"|>', "<escape>")
)
HY3 = (
    "<tool_call:opensource>"
    + NAME
    + "{{ '<tool_sep:opensource>\\n' }}"
    + ITEMS
    + ("<arg_key:opensource>{{ k }}</arg_key:opensource>{{ '\\n' }}<arg_value:opensource>" + VALUE)
    + "</arg_value:opensource>{{ '\\n' }}{% endfor %}{{ '</tool_call:opensource>\\n' }}"
)
HARMONY = (
    "{% if tools %}<|start|>developer<|message|>{{ tools|tojson }}<|end|>{% endif %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% if m.reasoning_content %}"
    "<|start|>assistant<|channel|>analysis<|message|>{{ m.reasoning_content }}<|end|>{% endif %}"
    "{% if m.content %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>"
    "{% endif %}{% for c in m.tool_calls or [] %}"
    "<|start|>assistant<|channel|>commentary to=functions.{{ c.function.name }} "
    "<|constrain|>json<|message|>{{ c.function.arguments|tojson }}<|call|>{% endfor %}"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
MUSE = (
    "{% if tools %}<|start|>system<|message|>{{ tools|tojson }}<|eot|>{% endif %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% if m.reasoning_content %}"
    "<|start|>assistant to=self<|message|>{{ m.reasoning_content }}<|eom|>{% endif %}"
    "{% if m.content %}<|start|>assistant to=user<|message|>{{ m.content }}"
    "{{ '<|eom|>' if m.tool_calls else '<|eot|>' }}{% endif %}"
    "{% for c in m.tool_calls or [] %}<|start|>assistant to="
    + NAME
    + "<|message|>{{ '<atem:function_calls>\n<atem:invoke name=\"' }}"
    + NAME
    + "{{ '\">\n' }}"
    + ITEMS
    + '<atem:parameter name="{{ k }}">'
    + VALUE
    + "</atem:parameter>{{ '\n' }}{% endfor %}{{ '</atem:invoke>\n</atem:function_calls>' }}"
    "{{ '<|eot|>' if loop.last else '<|eom|>' }}{% endfor %}"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|eot|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
DEEPSEEK_CALL = (
    wide("<|tool_call_begin|>function<|tool_sep|>")
    + NAME
    + "{{ '\\n```json\\n' }}"
    + ARGUMENTS
    + "{{ '\\n```' }}"
    + wide("<|tool_call_end|>")
    + "{{ '\\n' if not loop.last }}"
)
SECTION = wide("<|tool_calls_begin|>"), wide("<|tool_calls_end|>")

FAMILIES = {  # name of the format -> template
    "hermes": template(
        "{{ '<tool_call>\\n' }}" + OBJECT + "{{ '\\n</tool_call>' }}{{ '\\n' if not loop.last }}"
    ),
    "qwen3-coder": template(XML),
    "mistral": template(OBJECT + COMMA, "[TOOL_CALLS][", "]", "[THINK]|[/THINK]"),
    "mistral-args": template(
        "[TOOL_CALLS]" + NAME + "[ARGS]" + ARGUMENTS, think="[THINK]|[/THINK]"
    ),
    "llama3": template(LLAMA + "{{ '; ' if not loop.last }}"),
    "json-list": template(OBJECT + COMMA, "[", "]"),
    "pythonic": template(PYTHON, "[", "]"),
    "llama4": template(LLAMA, "<|python_start|><|python_end|>"),
    "lfm2": template(PYTHON, "<|tool_call_start|>[", "]<|tool_call_end|>"),
    "olmo3": template(
        PYTHON.removesuffix("{{ ', ' if not loop.last }}") + "{{ '\\n' if not loop.last }}",
        "<function_calls>",
        "</function_calls>",
    ),
    "harmony": HARMONY,
    "muse-glimmer": MUSE,
    "gemma4": template(GEMMA, think="<|channel>thought\n@<channel|>"),
    "functiongemma": template(FUNCTION_GEMMA),
    "glm": template(GLM),
    "deepseek-r1": template(DEEPSEEK_CALL, *SECTION),
    "deepseek-v3.1": template(
        wide("<|tool_call_begin|>")
        + NAME
        + wide("<|tool_sep|>")
        + ARGUMENTS
        + wide("<|tool_call_end|>"),
        *SECTION,
    ),
    "kimi-k2": template(
        "<|tool_call_begin|>functions."
        + NAME
        + ":{{ loop.index0 }}<|tool_call_argument_begin|>"
        + ARGUMENTS
        + "<|tool_call_end|>",
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
    ),
    "hy3": template(
        HY3,
        "{{ '<tool_calls:opensource>\\n' }}",
        "</tool_calls:opensource>",
        "<think:opensource>@</think:opensource>",
    ),
    "hy3-preview": template(
        HY3.replace(":opensource", ""), "{{ '<tool_calls>\\n' }}", "</tool_calls>"
    ),
    "minimax-m2": template(INVOKE, "{{ '<minimax:tool_call>\\n' }}", "</minimax:tool_call>"),
    "cohere": template(
        '{{ \'{"tool_call_id": "\' }}{{ loop.index0 }}", "tool_name": "'
        + NAME
        + '", "parameters": '
        + ARGUMENTS
        + "}"
        + COMMA,
        "<|START_ACTION|>[",
        "]<|END_ACTION|>",
        "<|START_THINKING|>@<|END_THINKING|>",
    ),
    "tool-calls-list": template(OBJECT + COMMA, "<tool_calls>[", "]</tool_calls>"),
    "apertus": template(
        "{{ '{\"' }}" + NAME + '": ' + ARGUMENTS + "}" + COMMA,
        "<|tools_prefix|>[",
        "]<|tools_suffix|>",
    ),
    "functionary": template("<function=" + NAME + ">" + ARGUMENTS + "</function>"),
}
BARE = ("llama3", "json-list", "pythonic")  # calls are the whole answer

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "exact": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["city"],
}
NOTE = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
SCHEMAS: dict[str, Any] = {"get_weather": WEATHER, "add_note": NOTE}
TOOLS = [
    {"type": "function", "function": {"name": n, "description": "A tool.", "parameters": s}}
    for n, s in SCHEMAS.items()
]
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("get_weather", {"city": 'S\u00e3o "Paulo"', "days": 3, "exact": True, "tags": ["a, b", "]"]}),
    ("add_note", {"text": "12"}),
]


def calling(calls: Iterable[tuple[str, Any]] = CALLS, content: Any = None, **more: Any) -> Any:
    """A message of an assistant that calls tools, in OpenAI's form."""
    made = [
        {"id": f"call{i:05}", "type": "function",
         "function": {"name": name, "arguments": json.dumps(arguments)}}
        for i, (name, arguments) in enumerate(calls)
    ]  # fmt: skip
    return {"role": "assistant", "content": content, "tool_calls": made, **more}


@dataclass
class Answer:
    """What deltas add up to."""

    text: str = ""
    reasoning: str = ""
    calls: list[tuple[str, Any]] = field(default_factory=list)  # arguments as text
    ended: int = 0

    def parsed(self) -> list[tuple[str, Any]]:
        return [(name, json.loads(arguments)) for name, arguments in self.calls]


def added(deltas: Iterable[Delta]) -> Answer:
    """The answer of deltas, whose order is checked."""
    answer = Answer()
    for delta in deltas:
        if isinstance(delta, TextPart):
            assert delta.text and answer.ended == len(answer.calls)
            answer.text += delta.text
        elif isinstance(delta, ReasoningPart):
            assert delta.text and answer.ended == len(answer.calls)
            answer.reasoning += delta.text
        elif isinstance(delta, CallBegin):
            assert delta.index == answer.ended == len(answer.calls)
            answer.calls.append((delta.name, ""))
        elif isinstance(delta, CallArguments):
            assert delta.text and delta.index == answer.ended == len(answer.calls) - 1
            name, text = answer.calls[-1]
            answer.calls[-1] = (name, text + delta.text)
        elif isinstance(delta, CallEnd):
            assert delta.index == answer.ended
            answer.ended += 1
    assert answer.ended == len(answer.calls)
    return answer


def read(
    chat_format: ChatFormat,
    pieces: Iterable[str],
    tools: Mapping[str, Any] | None = SCHEMAS,
    **options: Any,
) -> Answer:
    """The answer that a parser makes of pieces of text."""
    parser = chat_format.parser(tools, **options)
    deltas: list[Delta] = []
    for piece in pieces:
        deltas += parser.feed(piece)
    return added(deltas + parser.finish())


def without_reasoning(chat_format: ChatFormat) -> ChatFormat:
    return replace(chat_format, reasoning_open="", reasoning_close="")
