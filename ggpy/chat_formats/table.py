"""The table of chat formats: a row for each way in which families of models write calls.

A further format is a row here. Rows that come first are preferred where two read the same calls.
"""

from __future__ import annotations

from dataclasses import replace

from .channels.harmony import Harmony
from .channels.recipients import ATEM, CALLS_OPEN, Recipients
from .chat_format import ChatFormat
from .json_calls import JsonObjects, NameThenJson
from .nested_tags import NestedTags
from .python_calls import GemmaCalls, JsonOrPython, PythonCalls
from .xml_calls import KeyedTags, Tags

_BAR = "\uff5c"  # DeepSeek's markers have a wide one


def _wide(marker: str) -> str:
    """A marker of DeepSeek, with | for the wide bar."""
    return marker.replace("|", _BAR)


_OBJECTS = JsonObjects()
_LINES = Tags(">", "<parameter=", ">", "</parameter>", ("</function>",), lines=True)
_GLM = KeyedTags("", "<arg_key>", "</arg_key>", "</arg_value>", ("</tool_call>",),
                 value_open="<arg_value>", bare_name=True)  # fmt: skip
_DSML = Tags(
    '">',
    _wide('<|DSML|parameter name="'),
    ">",
    _wide("</|DSML|parameter>"),
    (_wide("</|DSML|invoke>"),),
    key=r'(?P<key>[^"]*)"(?: string="(?P<string>true|false)")?\s*',
    written_key='{key}" string="{string}"',
)


def _xtml(tag: str, close: bool = False) -> str:
    """A tag of Kimi K3."""
    return f"<|{'close' if close else 'open'}|>{tag}<|sep|>"


_XTML = Tags(
    "<|sep|>",
    '<|open|>argument key="',
    "<|sep|>",
    _xtml("argument", True),
    (_xtml("call", True),),
    key=r'(?P<key>[^"]*)"(?: type="(?P<string>\w+)")?\s*',
    written_key='{key}" type="{type}"',
    name=r'(?P<name>[^"]*)".*',
    after_name=r'"\" index=\"" /[1-9][0-9]?/ "\""',
)


def _hunyuan(name: str, suffix: str) -> ChatFormat:
    """Hunyuan 3, all of whose tags have a suffix."""

    def tag(text: str) -> str:
        return f"<{text}{suffix}>"

    syntax = KeyedTags(
        tag("tool_sep"),
        *(tag("arg_key"), tag("/arg_key"), tag("/arg_value"), (tag("/tool_call"),)),
        value_open=tag("arg_value"),
        bare_name=True,
    )
    return ChatFormat(
        name,
        syntax,
        *(tag("tool_calls"), tag("/tool_calls"), tag("tool_call")),
        section_gap="\n",
        between="\n",
        reasoning_open=tag("think"),
        reasoning_close=tag("/think"),
    )


def _deepseek(name: str, syntax: NameThenJson, before_close: str, between: str) -> ChatFormat:
    return ChatFormat(
        name,
        syntax,
        _wide("<|tool\u2581calls\u2581begin|>"),
        _wide("<|tool\u2581calls\u2581end|>"),
        _wide("<|tool\u2581call\u2581begin|>"),
        _wide("<|tool\u2581call\u2581end|>"),
        call_gap=("", before_close),
        between=between,
        also=(_wide("<|tool\u2581sep|>"),),
    )


def _dsml(name: str, section: str) -> ChatFormat:
    return ChatFormat(
        name,
        _DSML,
        _wide(f"<|DSML|{section}>"),
        _wide(f"</|DSML|{section}>"),
        _wide('<|DSML|invoke name="'),
        section_gap="\n",
        between="\n",
        also=(_wide("|DSML|"),),
    )


def _json_list(name: str, opener: str, closer: str, **more: object) -> ChatFormat:
    return replace(
        ChatFormat(name, _OBJECTS, opener, closer, listed=True, between=", "),
        **more,  # type: ignore[arg-type]
    )


_HEADER_MISTRAL = r"\s*(?P<name>[^\s\[]+)\s*(?:\[CALL_ID\].*)?"
_HEADER_KIMI = r"\s*(?:functions\.)?(?P<name>\S+?)(?::\d+)?\s*"
_HEADER_SOLAR = r".*<\|tool_call:name\|>\s*(?P<name>\S+)\s*"
_GLM_TOOLS = "# \u53ef\u7528\u5de5\u5177"  # tools that can be used
_M3 = "]<]minimax[>["  # before every tag of a call
_MISTRAL = {"reasoning_open": "[THINK]", "reasoning_close": "[/THINK]"}

_ROWS = (
    ChatFormat("hermes", _OBJECTS, call_open="<tool_call>", call_close="</tool_call>",
               call_gap=("\n", "\n"), between="\n"),
    ChatFormat("qwen3-coder", replace(_LINES, closers=("</function>", "</tool_call>")),
               "<tool_call>", "</tool_call>", "<function=", section_gap="\n", between="\n",
               section_each=True),
    ChatFormat("seed-oss", replace(_LINES, lines=False),
               "<seed:tool_call>", "</seed:tool_call>", "<function=",
               section_gap="\n", between="\n", section_each=True,
               reasoning_open="<seed:think>", reasoning_close="</seed:think>"),
    _json_list("mistral", "[TOOL_CALLS]", "", **_MISTRAL,
               syntax=JsonObjects(after=r'(", \"id\": \"" /[a-zA-Z0-9]{9}/ "\"")?')),
    ChatFormat("mistral-args", NameThenJson("[ARGS]", _HEADER_MISTRAL, id_open="[CALL_ID]"),
               call_open="[TOOL_CALLS]", also=("[CALL_ID]",), **_MISTRAL),  # type: ignore[arg-type]
    ChatFormat("llama3",
               JsonObjects(arguments=("parameters", "arguments"),
                           first=("name", "type", "function", "id", "parameters", "arguments")),
               call_open="<|python_tag|>", bare_calls="{", between="; "),
    _json_list("json-list", "", "", bare_calls="["),
    ChatFormat("pythonic", PythonCalls(), "<|python_start|>", "<|python_end|>",
               bare_calls="[", listed=True, between=", "),
    ChatFormat("llama4",
               JsonOrPython(arguments=("parameters", "arguments"),
                            first=("name", "type", "function", "id", "parameters", "arguments")),
               bare_calls="{[", between="\n", dropped=("<|python_start|>", "<|python_end|>")),
    ChatFormat("lfm2", PythonCalls(), "<|tool_call_start|>", "<|tool_call_end|>",
               listed=True, between=", ", hints=("<|tool_list_start|>", "List of tools: [")),
    ChatFormat("olmo3", PythonCalls(), "<function_calls>", "</function_calls>",
               section_gap="\n", between="\n"),
    ChatFormat("harmony", _OBJECTS, reasoning_open="", reasoning_close="", channels=Harmony()),
    ChatFormat("muse-glimmer", ATEM, reasoning_open="", reasoning_close="", channels=Recipients(),
               hints=(CALLS_OPEN,)),
    ChatFormat("gemma3", PythonCalls(), "```tool_code", "```", section_gap="\n",
               between="\n", hints=("tool_code",)),
    ChatFormat("gemma4", GemmaCalls(), call_open="<|tool_call>", call_close="<tool_call|>",
               reasoning_open="<|channel>thought", reasoning_close="<channel|>",
               reasoning_anywhere=True, also=("<|channel>",), dropped=("<|tool_response>",)),
    ChatFormat("functiongemma", GemmaCalls("<escape>"), call_open="<start_function_call>",
               call_close="<end_function_call>", dropped=("<start_function_response>",)),
    ChatFormat("glm", _GLM, call_open="<tool_call>", between="\n"),
    _deepseek("deepseek-r1",
              NameThenJson("\n```json\n", rf"\w*<{_BAR}tool\u2581sep{_BAR}>(?P<name>\S+)",
                           _wide("function<|tool\u2581sep|>") + "{name}"),
              "\n```", "\n"),
    _deepseek("deepseek-v3.1", NameThenJson(_wide("<|tool\u2581sep|>")), "", ""),
    _dsml("deepseek-v3.2", "function_calls"),
    _dsml("deepseek-v4", "tool_calls"),
    ChatFormat("kimi-k2",
               NameThenJson("<|tool_call_argument_begin|>", _HEADER_KIMI, "functions.{name}:0"),
               "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>",
               "<|tool_call_begin|>", "<|tool_call_end|>"),
    ChatFormat("kimi-k3", _XTML, _xtml("tools"), _xtml("tools", True), '<|open|>call tool="',
               reasoning_open=_xtml("think"), reasoning_close=_xtml("think", True),
               after_reasoning=_xtml("response") + _xtml("response", True),
               dropped=(_xtml("response"), _xtml("response", True), _xtml("message", True))),
    _hunyuan("hy3", ":opensource"),
    ChatFormat("minimax-m2",
               Tags('">', '<parameter name="', '">', "</parameter>", ("</invoke>",)),
               "<minimax:tool_call>", "</minimax:tool_call>", '<invoke name="',
               section_gap="\n", between="\n"),
    ChatFormat("minimax-m3", NestedTags(_M3),
               f"{_M3}<tool_call>", f"{_M3}</tool_call>", f'{_M3}<invoke name="',
               section_gap="\n", between="\n",
               reasoning_open="<mm:think>", reasoning_close="</mm:think>",
               also=("<tool_call>", "</tool_call>")),
    ChatFormat("minicpm5",
               Tags('">', '<param name="', '">', "</param>", ("</function>",), cdata=True),
               call_open='<function name="', between="\n"),
    _json_list("cohere", "<|START_ACTION|>", "<|END_ACTION|>",
               syntax=JsonObjects(names=("tool_name",), arguments=("parameters",),
                                  before=r'"\"tool_call_id\": \"" /[0-9]{1,2}/ "\", "'),
               reasoning_open="<|START_THINKING|>", reasoning_close="<|END_THINKING|>",
               dropped=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>",
                        "<|END_TEXT|>")),
    _json_list("granite", "<|tool_call|>", "<|/tool_call|>", hints=("<|tool|>",)),
    _json_list("tool-calls-list", "<tool_calls>", "</tool_calls>"),
    _hunyuan("hy3-preview", ""),
    _json_list("nemotron", "<TOOLCALL>", "</TOOLCALL>"),
    _json_list("apertus", "<|tools_prefix|>", "<|tools_suffix|>",
               syntax=JsonObjects(key_is_name=True),
               reasoning_open="<|inner_prefix|>", reasoning_close="<|inner_suffix|>"),
    ChatFormat("functionary", NameThenJson(">"), call_open="<function=",
               call_close="</function>"),
    ChatFormat("glm-4-0414", NameThenJson("\n"), call_open="<|assistant|>",
               begun="<|assistant|>", dropped=("<|assistant|>\n",), hints=(_GLM_TOOLS,)),
    ChatFormat("functionary-v3.2", NameThenJson("\n"), call_open=">>>", begun=">>>",
               dropped=(">>>all\n",), hints=(">>>${recipient}",)),
    ChatFormat("solar",
               NameThenJson("<|tool_call:args|>", _HEADER_SOLAR, "call<|tool_call:name|>{name}"),
               "<|tool_calls|>", "", "<|tool_call:begin|>", "<|tool_call:end|>",
               reasoning_open="<|think|>", reasoning_close="<|end|>",
               after_reasoning="<|begin|>assistant", also=("<|tool_call:name|>", "<|begin|>"),
               dropped=("<|end|>", "<|begin|>assistant", "<|content|>", "<|flush|>", "<|calls|>")),
    ChatFormat("generic",
               JsonObjects(wrappers=("tool_call", "function"),
                           first=("tool_call", "name", "function")),
               bare_calls="{", between="\n", needs_instructions=True),
    ChatFormat("content"),
)  # fmt: skip

TABLE = {row.name: row for row in _ROWS}
