"""Grammars that force calls: llguidance accepts what the format writes, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
from chat_formats.families import SCHEMAS, read

from ggpy.chat_formats import NAMES, by_name
from ggpy.chat_formats.constraint import (
    call_grammar,
    can_answer_after_reasoning,
    can_answer_instead,
    json_grammar,
)

llguidance = pytest.importorskip("llguidance", reason="needs the extra 'grammar'")
BYTES = llguidance.LLTokenizer("byte")
STRICT = {name: {**schema, "additionalProperties": False} for name, schema in SCHEMAS.items()}
CALLING = [name for name in NAMES if name != "content"]

MUSE = (' to=add_note<|message|><atem:function_calls>\n<atem:invoke name="add_note">\n'
        '<atem:parameter name="text">x</atem:parameter>\n</atem:invoke>\n'
        "</atem:function_calls>")  # fmt: skip
SOLAR = ('<|tool_calls|><|tool_call:begin|>call<|tool_call:name|>add_note<|tool_call:args|>'
         '{"text": "x"}<|tool_call:end|>')  # fmt: skip
K3 = ('<|open|>tools<|sep|><|open|>call tool="add_note" index="1"<|sep|>'
      '<|open|>argument key="text" type="string"<|sep|>x<|close|>argument<|sep|>'
      "<|close|>call<|sep|><|close|>tools<|sep|>")  # fmt: skip
K3_THOUGHT = ("<|open|>think<|sep|>Hm.<|close|>think<|sep|><|open|>response<|sep|>"
              "<|close|>response<|sep|>")  # fmt: skip
HY3 = ("<tool_calls:opensource>\n<tool_call:opensource>add_note<tool_sep:opensource>\n"
       "<arg_key:opensource>text</arg_key:opensource>\n"
       "<arg_value:opensource>x</arg_value:opensource>\n</tool_call:opensource>\n"
       "</tool_calls:opensource>")  # fmt: skip
M3 = '@<tool_call>\n@<invoke name="add_note">@<text>x@</text>@</invoke>\n@</tool_call>'
M3 = M3.replace("@", "]<]minimax[>[")
FUNCTIONARY = 'add_note\n{"text": "x"}'
NEXT = "<|eom|><|start|>assistant"
NOTE = '{"name": "add_note", "arguments": {"text": "x"}}'
ACCEPTED = {
    "hermes": [f"<tool_call>\n{NOTE}\n</tool_call>", f"<think>a</think>\n\n<tool_call>\n{NOTE}\n"
               "</tool_call>"],
    "llama3": ['{"name": "add_note", "parameters": {"text": "x"}}'],
    "mistral": [f"[TOOL_CALLS][{NOTE}]",
                f'[TOOL_CALLS][{NOTE[:-1]}, "id": "abcd12345"}}]'],
    "mistral-args": ['[TOOL_CALLS]add_note[ARGS]{"text": "x"}'],
    "qwen3-coder": ["<tool_call>\n<function=add_note>\n<parameter=text>\nx\n</parameter>\n"
                    "</function>\n</tool_call>"],
    "glm": ["<tool_call>add_note\n<arg_key>text</arg_key>\n<arg_value>x</arg_value>\n</tool_call>"],
    "pythonic": ['[add_note(text="x")]'],
    "json-list": [f"[{NOTE}]"],
    "gemma4": ['<|tool_call>call:add_note{text:<|"|>x<|"|>}<tool_call|>'],
    "harmony": ['<|channel|>commentary to=functions.add_note <|constrain|>json<|message|>'
                '{"text": "x"}',
                '<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant to=functions.add_note'
                '<|channel|>commentary json<|message|>{"text": "x"}'],
    "muse-glimmer": [MUSE, f" to=self<|message|>Hm.{NEXT}{MUSE}"],
    "generic": ['{"tool_call": {"name": "add_note", "arguments": {"text": "x"}}}'],
    "minicpm5": ['<function name="add_note"><param name="text">x</param></function>'],
    "solar": [SOLAR, f"<|think|>Hm.<|end|><|begin|>assistant{SOLAR}"],
    "kimi-k3": [K3, K3_THOUGHT + K3],
    "hy3": [HY3],
    "minimax-m3": [M3, f"<mm:think>Hm.</mm:think>{M3}", M3.replace("\n", "")],
    "functiongemma": ["<start_function_call>call:add_note{text:<escape>x<escape>}"
                      "<end_function_call>"],
    "functionary-v3.2": [FUNCTIONARY],
}  # fmt: skip
REFUSED = {
    "hermes": ["Hello", NOTE, '<tool_call>\n{"name": "rm", "arguments": {}}\n</tool_call>',
               '<tool_call>\n{"name": "add_note", "arguments": {"text": 3}}\n</tool_call>',
               '<tool_call>\n{"name": "add_note", "arguments": {}}\n</tool_call>'],
    "llama3": ['{"name": "add_note", "arguments": {"text": "x"}}', "Hello"],
    "muse-glimmer": [" to=user<|message|>Hello", MUSE.replace("add_note", "rm"),
                     MUSE.replace("</atem:invoke>", ""), MUSE.replace('"text"', '"t"')],
    "solar": [f"<|think|>Hm.<|end|>{SOLAR}", SOLAR.replace("add_note", "rm")],
    "kimi-k3": [K3.replace("add_note", "rm"), K3.replace("string", "number"),
                K3.replace('index="1"', 'index="x"'), K3.replace("<|close|>call<|sep|>", "")],
    "hy3": [HY3.replace("add_note", "rm"), HY3.replace("<tool_sep:opensource>", "")],
    "minimax-m3": [M3.replace("add_note", "rm"), M3.replace("</text>", "</t>"), M3[:-1], "x"],
    "functionary-v3.2": [f">>>{FUNCTIONARY}", "all\nHello", FUNCTIONARY.replace("note", "n")],
    "mistral": ["[TOOL_CALLS][]", f"[TOOL_CALLS]{NOTE}"],
    "mistral-args": ["[TOOL_CALLS]rm[ARGS]{}", '[TOOL_CALLS]add_note[ARGS]{"t": "x"}'],
    "qwen3-coder": ["<tool_call>\n<function=add_note>\n</function>\n</tool_call>",
                    "<tool_call>\n<function=rm>\n</function>\n</tool_call>",
                    "<tool_call>\n<function=get_weather>\n<parameter=city>\nx\n</parameter>\n"
                    "<parameter=days>\nmany\n</parameter>\n</function>\n</tool_call>"],
}  # fmt: skip
CASES = [(name, text, True) for name, texts in ACCEPTED.items() for text in texts]
CASES += [(name, text, False) for name, texts in REFUSED.items() for text in texts]


def accepts(grammar: str, text: str) -> bool:
    lark = llguidance.LLMatcher.grammar_from_lark(grammar)
    matcher = llguidance.LLMatcher(BYTES, lark)
    assert not matcher.get_error(), matcher.get_error()
    ids = BYTES.tokenize_str(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize("name", CALLING)
@pytest.mark.parametrize("parallel", [False, True])
def test_every_format_has_a_valid_grammar(name: str, parallel: bool) -> None:
    lark = call_grammar(by_name(name), STRICT, parallel)
    grammar = llguidance.LLMatcher.grammar_from_lark(lark)
    assert llguidance.LLMatcher.validate_grammar(grammar, BYTES) == ""


@pytest.mark.parametrize(("name", "text", "good"), CASES)
def test_calls_as_the_format_writes_them(name: str, text: str, good: bool) -> None:
    assert accepts(call_grammar(by_name(name), STRICT), text) == good


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_the_grammar_accepts_the_parser_reads(name: str) -> None:
    for text in ACCEPTED[name]:
        assert read(by_name(name), [text]).parsed() == [("add_note", {"text": "x"})]


@pytest.mark.parametrize(
    ("name", "two"),
    [
        ("hermes", "\n".join([f"<tool_call>\n{NOTE}\n</tool_call>"] * 2)),
        ("mistral", f"[TOOL_CALLS][{NOTE}, {NOTE}]"),
        ("llama3", "; ".join(ACCEPTED["llama3"] * 2)),
        ("qwen3-coder", "\n".join(ACCEPTED["qwen3-coder"] * 2)),
        ("muse-glimmer", f"{MUSE}{NEXT}{MUSE}"),
        (
            "kimi-k3",
            K3.removesuffix("<|close|>tools<|sep|>")
            + K3.removeprefix("<|open|>tools<|sep|>").replace('"1"', '"2"'),
        ),
        (
            "hy3",
            HY3.removesuffix("</tool_calls:opensource>")
            + HY3.removeprefix("<tool_calls:opensource>\n"),
        ),
        ("functionary-v3.2", f"{FUNCTIONARY}>>>{FUNCTIONARY}"),
        ("pythonic", '[add_note(text="x"), add_note(text="x")]'),
    ],
)
def test_several_calls_only_if_parallel(name: str, two: str) -> None:
    assert accepts(call_grammar(by_name(name), STRICT, True), two)
    assert not accepts(call_grammar(by_name(name), STRICT, False), two)
    assert len(read(by_name(name), [two]).calls) == 2


INSTEAD = [name for name in CALLING if can_answer_instead(by_name(name), {})]


@pytest.mark.parametrize("name", INSTEAD)
@pytest.mark.parametrize("schema", [{"type": "object"}, {"enum": ["a", 1, None]}])
def test_json_may_come_instead_of_calls(name: str, schema: dict[str, Any]) -> None:
    grammar = call_grammar(by_name(name), STRICT, reasoning_limit=0, answer=schema)
    for text, good in {
        '{"city": "Oslo", "n": [1]}': "type" in schema, "{}": "type" in schema,
        "1": "enum" in schema, "null": "enum" in schema, "Hello": False, "": False,
    }.items():  # fmt: skip
        assert accepts(grammar, text) == good, text
    for text in ACCEPTED.get(name, [])[:1]:
        assert accepts(grammar, text)
        assert not accepts(grammar, text + "{}")


def test_where_json_and_calls_begin_alike() -> None:
    assert {"hermes", "qwen3-coder", "glm", "deepseek-r1"} <= {*INSTEAD}
    apart = {"llama3", "pythonic", "generic", "harmony", "mistral", "functionary-v3.2"}
    assert not apart & {*INSTEAD}
    assert can_answer_instead(by_name("mistral"), {"[TOOL_CALLS]": 7})


def test_only_the_tools_that_are_given_may_be_called() -> None:
    grammar = call_grammar(by_name("hermes"), {"get_weather": STRICT["get_weather"]})
    assert not accepts(grammar, ACCEPTED["hermes"][0])


def test_reasoning_that_is_open_is_closed_first() -> None:
    grammar = call_grammar(by_name("hermes"), STRICT, reasoning_open=True)
    call = f"<tool_call>\n{NOTE}\n</tool_call>"
    assert accepts(grammar, f"I think.\n</think>\n\n{call}")
    assert not accepts(grammar, call)


def test_control_tokens_are_named_by_their_ids() -> None:
    grammar = call_grammar(by_name("hermes"), STRICT, special={"<tool_call>": 7, "</think>": 9})
    assert r"<[7]> /\n?/ call" in grammar and "/(?s:.*)/ <[9]>" in grammar
    assert '"<tool_call>' not in grammar


def test_optional_arguments_of_python_calls() -> None:
    schema = {"type": "object", "properties": {k: {"type": "integer"} for k in "abc"}}
    grammar = call_grammar(by_name("pythonic"), {"f": {**schema, "required": ["b"]}})
    for text, good in {
        "[f(b=1)]": True, "[f(b=1, a=2, c=3)]": True, "[f(b=1, c=3)]": True,
        "[f(a=2)]": False, "[f()]": False, "[f(b=1, d=4)]": False,
    }.items():  # fmt: skip
        assert accepts(grammar, text) == good, text
    free = call_grammar(by_name("pythonic"), {"f": schema})
    assert accepts(free, "[f()]") and accepts(free, "[f(b=1, c=3)]")


def test_definitions_reach_the_arguments_that_refer_to_them() -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/small"}},
        "required": ["a"],
        "$defs": {"small": {"type": "integer", "maximum": 9}},
    }
    grammar = call_grammar(by_name("qwen3-coder"), {"f": schema})
    text = "<tool_call>\n<function=f>\n<parameter=a>\n{}\n</parameter>\n</function>\n</tool_call>"
    assert accepts(grammar, text.format(9)) and not accepts(grammar, text.format(10))


def test_no_grammar_without_calls_or_tools() -> None:
    with pytest.raises(ValueError, match="'content' has no tool calls"):
        call_grammar(by_name("content"), STRICT)
    with pytest.raises(ValueError, match="no tool may be called"):
        call_grammar(by_name("hermes"), {})


def test_reasoning_before_a_call_has_a_limit() -> None:
    call = f"<tool_call>\n{NOTE}\n</tool_call>"
    ten = call_grammar(by_name("hermes"), STRICT, reasoning_limit=10)
    assert accepts(ten, call)
    assert accepts(ten, f"<think>{'x' * 10}</think>{call}")
    assert not accepts(ten, f"<think>{'x' * 11}</think>{call}")
    none = call_grammar(by_name("hermes"), STRICT, reasoning_limit=0)
    assert accepts(none, call)
    assert not accepts(none, f"<think>x</think>{call}")
    opened = call_grammar(by_name("hermes"), STRICT, reasoning_open=True, reasoning_limit=10)
    assert accepts(opened, f"{'x' * 10}</think>{call}")
    assert not accepts(opened, f"{'x' * 11}</think>{call}")
    long = call_grammar(by_name("hermes"), STRICT, reasoning_limit=10**6)
    assert accepts(long, f"<think>{'x' * 30_000}</think>{call}")


def test_blanks_between_arguments_have_a_limit() -> None:
    grammar = call_grammar(by_name("mistral-args"), STRICT)
    assert accepts(grammar, '[TOOL_CALLS]add_note[ARGS]{ "text" :\n\n  "x" }')
    assert not accepts(grammar, '[TOOL_CALLS]add_note[ARGS]{  "text": "x"}')
    assert not accepts(grammar, '[TOOL_CALLS]add_note[ARGS]{\n\n\n"text": "x"}')


def test_nested_values_are_written_as_gemma_writes_them() -> None:
    inner = {"type": "object", "properties": {"a b": {"type": "string"}, "n": {"type": "number"}}}
    properties = {
        "one": {**inner, "required": ["a b"]},
        "many": {"type": "array", "items": inner},
        "short": {"type": "array", "items": {"type": "string"}, "maxItems": 1},
    }
    grammar = call_grammar(by_name("gemma4"), {"f": {"type": "object", "properties": properties}})
    for arguments, value in {
        'one:{a b:<|"|>x, "y"<|"|>,n:1}': {"one": {"a b": 'x, "y"', "n": 1}},
        'many:[{},{n:2,a b:<|"|><|"|>}]': None,
        'many:[{},{a b:<|"|><|"|>,n:2}]': {"many": [{}, {"a b": "", "n": 2}]},
        "many:[]": {"many": []},
        "one:{n:1}": None,
        'one:{"a b": "x"}': None,
        'short:["x"]': {"short": ["x"]},
        'short:["x","y"]': None,
    }.items():
        text = f"<|tool_call>call:f{{{arguments}}}<tool_call|>"
        assert accepts(grammar, text) == (value is not None), text
        if value is not None:
            assert read(by_name("gemma4"), [text], {"f": {}}).parsed() == [("f", value)]


def test_many_keys_that_may_be_missing_make_no_large_grammar() -> None:
    schema: dict = {"type": "object", "properties": {}}
    for _ in range(4):
        schema = {"type": "object", "properties": {f"k{i}": schema for i in range(6)}}
    assert len(call_grammar(by_name("gemma4"), {"f": schema})) < 1_000_000


def test_forms_that_templates_of_one_format_have() -> None:
    for name, text in {
        "hermes": f"<tool_call>{NOTE}</tool_call>",
        "mistral-args": '[TOOL_CALLS]add_note[CALL_ID]abcd12345[ARGS]{"text": "x"}',
        "olmo3": '<function_calls>\nadd_note(text="x")\n</function_calls>',
        "cohere": '<|START_ACTION|>[\n    {"tool_call_id": "3", "tool_name": "add_note", '
        '"parameters": {"text": "x"}}\n]<|END_ACTION|>',
    }.items():
        assert accepts(call_grammar(by_name(name), STRICT), text), name
        assert read(by_name(name), [text]).parsed() == [("add_note", {"text": "x"})]
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}}
    for name, text in {
        "seed-oss": "<seed:tool_call>\n<function=f>\n<parameter=a>True</parameter>\n</function>\n"
        "</seed:tool_call>",
        "lfm2": "<|tool_call_start|>[f(a=True)]<|tool_call_end|>",
    }.items():
        assert accepts(call_grammar(by_name(name), {"f": schema}), text), name
        assert read(by_name(name), [text], {"f": schema}).parsed() == [("f", {"a": True})]


def test_a_schema_that_is_too_deep_is_an_error() -> None:
    schema: dict = {"type": "object"}
    for _ in range(20_000):
        schema = {"properties": {"a": schema}}
    with pytest.raises(ValueError, match="too deep"):
        call_grammar(by_name("hermes"), {"f": schema})
    with pytest.raises(ValueError, match="too deep"):
        call_grammar(by_name("gemma4"), {"f": schema})


def test_nested_tags_follow_the_schema() -> None:
    entry = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    properties = {"list": {"type": "array", "items": entry}, "flag": {"type": "boolean"}}
    properties |= {"kind": {"enum": ["a", "b"]}, "any": {"type": "object"}}
    schema = {"type": "object", "properties": properties, "required": ["list"]}
    grammar = call_grammar(by_name("minimax-m3"), {"make": schema})
    n, texts = "@<item>@<n>%s@</n>@</item>", {"[1, 2]": True, "[]": True, "[x]": False}
    for shown, good in texts.items():
        items = "".join(n % x for x in shown[1:-1].split(", ") if x)
        inside = f"@<list>{items}@</list>@<flag>true@</flag>@<kind>b@</kind>@<any>{{}}@</any>"
        call = f'@<tool_call>\n@<invoke name="make">{inside}@</invoke>\n@</tool_call>'
        assert accepts(grammar, call.replace("@", "]<]minimax[>[")) == good, shown


REASONED = {
    "hermes": ("<think>a {</think>\n\n", ""),
    "harmony": ("<|channel|>analysis<|message|>a {<|end|><|start|>assistant",
                "<|channel|>final<|message|>"),
    "muse-glimmer": (" to=self<|message|>a {<|eom|><|start|>assistant", " to=user<|message|>"),
    "minimax-m3": ("<mm:think>a {</mm:think>", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", REASONED)
def test_json_after_reasoning(name: str) -> None:
    """Reasoning may be missing, or may have begun in the prompt; the parser reads the same."""
    thought, header = REASONED[name]
    chat_format, answer = by_name(name), header + '{"n": [1, 2]}'
    assert can_answer_after_reasoning(chat_format, {})
    grammar = json_grammar(chat_format, {"type": "object"})
    for text, good in (
        *((answer, True), (thought + answer, True), (thought + thought + answer, False)),
        *((thought + header + "Hello", False), (thought, False), (thought + answer + "}", False)),
    ):
        assert accepts(grammar, text) == good, text
    found = read(chat_format, [thought + answer], None)
    assert (found.text, found.reasoning) == (answer.removeprefix(header), "a {")
    if chat_format.channels is None:
        opened = json_grammar(chat_format, {"type": "object"}, reasoning_open=True)
        begun = thought.removeprefix(chat_format.reasoning_open)
        assert accepts(opened, begun + answer) and not accepts(opened, answer)


def test_blanks_behind_reasoning_end() -> None:
    grammar = json_grammar(by_name("hermes"), {"type": "object"})
    assert accepts(grammar, "<think>a</think>" + 18 * "\n" + "{}")
    assert not accepts(grammar, "<think>a</think>" + 200 * "\n" + "{}")


def test_reasoning_that_begins_like_json_must_have_a_token_for_that() -> None:
    chat_format = by_name("mistral")
    assert not can_answer_after_reasoning(chat_format, {})
    assert can_answer_after_reasoning(chat_format, {"[THINK]": 7})
    assert not can_answer_after_reasoning(by_name("solar"), {}), "whose text has a marker before it"
