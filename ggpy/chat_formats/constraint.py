"""Grammars that force an answer to be calls of certain tools, in llguidance's dialect of Lark.

A grammar writes calls as the format's template does, with the tool's JSON schema for the arguments;
reasoning may come first. It must not know a tokenizer: which markers are control tokens is given.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from ..grammar.lark import JSON_OPTIONS
from .chat_format import ChatFormat
from .json_calls import JsonObjects, NameThenJson
from .nested_tags import ITEM, NestedTags
from .python_calls import GemmaCalls
from .reader import markers_pattern
from .values import (
    is_only_items,
    is_only_properties,
    is_string,
    properties_of,
    required_of,
    type_name,
    type_names,
    types_of,
)
from .xml_calls import KeyedTags, Tags

_LINE = r"/\n?/"  # a line break that may be missing
_INDENT = r"/\n? {0,4}/"
_BLANKS = r"/\s{0,20}/"  # behind reasoning: a model must not write them without end
_ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
JSON_STARTS = '{["-0123456789tfn \n'
_LONGEST_COUNT = 16_000  # characters that llguidance's lexer counts at a bearable cost


def call_grammar(
    chat_format: ChatFormat,
    tools: Mapping[str, Any],
    parallel: bool = False,
    *,
    special: Mapping[str, int] | None = None,
    reasoning_open: bool = False,
    reasoning_limit: int | None = None,
    answer: Mapping[str, Any] | None = None,
) -> str:
    """A Lark grammar of one call or, if `parallel`, of one or more calls.

    tools: name -> JSON schema of the arguments, of those that may be called. special: markers that
    are control tokens, with their ids (`ChatFormat.control_markers`). reasoning_open: the prompt
    ended inside reasoning. reasoning_limit: characters of reasoning at most; None is no limit, and
    0 is no reasoning. answer: JSON schema of what may come instead of calls, if the format
    allows that (`can_answer_instead`). ValueError: the format has no calls, or there is no tool.
    """
    if not tools:
        raise ValueError("no tool may be called: give at least one")
    if chat_format.syntax is None:
        raise ValueError(f"the format {chat_format.name!r} has no tool calls")
    grammar = _Grammar(chat_format, special or {})
    try:
        instead = [grammar.rule(grammar.json(answer))] if answer is not None else []
        return grammar.written(tools, parallel, reasoning_open, reasoning_limit, instead)
    except RecursionError:
        raise ValueError("a tool's schema nests its lists and objects too deeply") from None


def json_grammar(
    chat_format: ChatFormat,
    schema: Mapping[str, Any],
    *,
    special: Mapping[str, int] | None = None,
    reasoning_open: bool = False,
) -> str:
    """A Lark grammar of an answer that is JSON of a schema, after reasoning if there is some; the
    format must allow that (`can_answer_after_reasoning`). The rest is as for `call_grammar`.
    """
    grammar = _Grammar(chat_format, special or {})
    try:
        answer = grammar.answer(schema)
    except RecursionError:
        raise ValueError("the JSON schema is nested too deeply") from None
    start = f"start: {grammar.reasoning(reasoning_open)} {answer}"
    return "\n".join([start, *grammar.rules]) + "\n"


def can_answer_after_reasoning(chat_format: ChatFormat, special: Mapping[str, int]) -> bool:
    """Whether reasoning and JSON differ in their first token, and JSON can follow at once."""
    if chat_format.channels is not None:
        return True
    opener = chat_format.reasoning_open
    if not opener or chat_format.after_reasoning or chat_format.begun:
        return False
    return not _begins_like_json(opener, special)


def can_answer_instead(chat_format: ChatFormat, special: Mapping[str, int]) -> bool:
    """Whether JSON and a call differ in their first token. special: as for `call_grammar`.

    The lexer takes the longest term, so that a call's must not begin like JSON. With channels each
    message has a header, which JSON that stands alone lacks.
    """
    opener = chat_format.section_open or chat_format.call_open
    if not opener or chat_format.bare_calls or chat_format.begun or chat_format.channels:
        return False
    return not _begins_like_json(opener, special)


def _begins_like_json(opener: str, special: Mapping[str, int]) -> bool:
    return opener[0] in JSON_STARTS and not any(map(opener.startswith, special))


class _Grammar:
    """Rules as they are collected for one format."""

    def __init__(self, chat_format: ChatFormat, special: Mapping[str, int]) -> None:
        self.format, self.special = chat_format, special
        self.rules: list[str] = []

    def written(
        self,
        tools: Mapping[str, Any],
        parallel: bool,
        reasoning_open: bool,
        limit: int | None,
        instead: list[str],
    ) -> str:
        """The whole grammar. instead: rules of what may stand in place of calls."""
        bodies = [self.body(name, schema) for name, schema in tools.items()]
        self.rules.append("call: " + "\n    | ".join(bodies))
        answer = " | ".join([self.calls(parallel), *instead])
        start = f"start: {self.reasoning(reasoning_open, limit)} ({answer})"
        return "\n".join([start, *self.rules]) + "\n"

    def rule(self, text: str, attributes: str = "") -> str:
        """A new rule with this text; its name."""
        name = f"r{len(self.rules)}"
        self.rules.append(f"{name}{attributes}: {text}")
        return name

    def literal(self, text: str) -> str:
        """Text as it is, control tokens in it by their ids.

        Line breaks are terms of their own, because the lexer takes the longest term: one that is
        the beginning of another would never match.
        """
        parts, pos = [], 0
        for match in markers_pattern(tuple(self.special)).finditer(text) if self.special else ():
            if match[1]:
                parts += [text[pos : match.start()], match[1]]
                pos = match.end()
        parts.append(text[pos:])
        lines = [line for part in parts for line in re.split("(\n)", part)]
        return " ".join(self._term(line) for line in lines if line)

    def _term(self, part: str) -> str:
        known = part in self.special
        return f"<[{self.special[part]}]>" if known else json.dumps(part, ensure_ascii=False)

    def text_until(self, closer: str, limit: int | None = None) -> str:
        """Any text of at most `limit` characters, then `closer`, the first one."""
        text = f"/(?s:.{{0,{limit}}})/" if limit is not None else "/(?s:.*)/"
        marks = [closer.index(marker) for marker in self.special if marker in closer]
        plain = min(marks, default=len(closer))
        if not plain:
            return f"{text} {self.literal(closer)}"
        suffix = json.dumps(closer[:plain], ensure_ascii=False)
        return self._in_order(self.rule(text, f"[suffix={suffix}]"), self.literal(closer[plain:]))

    def json(self, schema: Any) -> str:
        """A JSON value of a schema, with bounded blanks; RecursionError if it is too deep."""
        read = {**schema, "x-guidance": JSON_OPTIONS} if isinstance(schema, Mapping) else schema
        return "%json " + json.dumps(read)

    def answer(self, schema: Mapping[str, Any]) -> str:
        """JSON as the answer's text."""
        if (channels := self.format.channels) is None:
            return self.json(schema)
        headers = " | ".join(map(self.literal, channels.text_headers))
        return f"({headers}) {self.json(schema)}"

    # What stands around calls

    def reasoning(self, is_open: bool, limit: int | None = None) -> str:
        """Reasoning before the calls, which may be missing unless the prompt opened it."""
        if limit == 0 and not is_open:
            return ""
        limit = limit if limit is not None and limit <= _LONGEST_COUNT else None
        chat_format = self.format
        if chat_format.channels is not None:
            channels = chat_format.channels
            opener, closer = channels.thought_open, channels.thought_close
            after = self.literal(channels.between)
        else:
            opener, closer = chat_format.reasoning_open, chat_format.reasoning_close
            after = self.literal(chat_format.after_reasoning) or _BLANKS
        if not closer or not (opener or is_open):
            return ""
        thought = f"{self.text_until(closer, limit)} {after}"
        return thought if is_open else f"({self.literal(opener)} {thought})?"

    def calls(self, parallel: bool) -> str:
        """The calls with their markers."""
        chat_format = self.format
        if (channels := chat_format.channels) is not None:  # a message is one call
            between = self.literal(channels.thought_close + channels.between)
            return f"call ({between} call)*" if parallel and channels.several else "call"
        opener = "" if chat_format.bare_calls else chat_format.call_open
        call = self._marked(opener.removeprefix(chat_format.begun))
        if parallel:
            call = f"{call} ({self._in_order(self._between(), self._marked(opener))})*"
        if chat_format.listed:
            call = f'"[" {_INDENT} {call} {_LINE} "]"'
        return call if chat_format.section_each else self._section(call)

    def _marked(self, opener: str) -> str:
        """A call with the markers around it."""
        chat_format = self.format
        before, after = chat_format.call_gap
        head = self._in_order(self.literal(opener), self._gap(before)) if opener else ""
        tail = self._in_order(self._gap(after), self.literal(chat_format.call_close))
        call = self._in_order(head, "call", tail)
        return self._section(call) if chat_format.section_each else call

    def _gap(self, text: str) -> str:
        """What stands beside a marker; a line break may be missing, as in EXAONE's template."""
        return _LINE if text == "\n" else self.literal(text)

    def _between(self) -> str:
        """What stands between calls; templates of one format differ in line breaks."""
        between = self.format.between
        if between == "\n":
            return _LINE
        return f'"," {_INDENT}' if self.format.listed else self.literal(between)

    def _section(self, calls: str) -> str:
        chat_format = self.format
        if chat_format.bare_calls:
            return calls
        gap = self._gap(chat_format.section_gap)
        opener, closer = map(self.literal, (chat_format.section_open, chat_format.section_close))
        return self._in_order(opener, gap, calls, gap, closer)

    def _in_order(self, *parts: str) -> str:
        return " ".join(part for part in parts if part)

    # One call

    def body(self, name: str, schema: Any) -> str:
        """A call of one tool, without the markers around it."""
        syntax = self.format.syntax
        schema = schema if isinstance(schema, Mapping) and schema else _ANY_OBJECT
        if (channels := self.format.channels) is not None:
            headers = " | ".join(map(self.literal, channels.call_headers(name)))
            inside = (
                self._tags(syntax, name, schema) if isinstance(syntax, Tags) else self.json(schema)
            )
            return self._in_order(f"({headers})", inside, self.literal(channels.call_end()))
        if isinstance(syntax, JsonObjects):
            return self._object(syntax, name, schema)
        if isinstance(syntax, NameThenJson):
            header, opener = syntax.written.format(name=name), self.literal(syntax.opener)
            if syntax.id_open:
                opener = f"({self.literal(syntax.id_open)} /[a-zA-Z0-9]{{9}}/)? {opener}"
                return f"{self.literal(header)} {opener} {self.json(schema)}"
            return f"{self.literal(header + syntax.opener)} {self.json(schema)}"
        if isinstance(syntax, Tags):
            return self._tags(syntax, name, schema)
        if isinstance(syntax, NestedTags):
            head, end = name + syntax.name_close, syntax.opener + syntax.closer
            inside = self._elements(schema, schema, syntax.opener)
            return self._in_order(self.literal(head), inside, self.literal(end))
        gemma = isinstance(syntax, GemmaCalls)
        opener, closer = (f"call:{name}{{", "}") if gemma else (f"{name}(", ")")
        inside = self._listed_arguments(schema, gemma)
        return self._in_order(self.literal(opener), inside, self.literal(closer))

    def _object(self, syntax: JsonObjects, name: str, schema: Any) -> str:
        opener, head, tail = "{", f"{json.dumps(name)}: ", "}"
        if not syntax.key_is_name:
            head = f'"{syntax.names[0]}": {json.dumps(name)}, "{syntax.arguments[0]}": '
        if self.format.needs_instructions:
            opener, tail = '{"tool_call": {', "}}"
        if syntax.before:
            head = f"{self.literal(opener)} {syntax.before} {self.literal(head)}"
        else:
            head = self.literal(opener + head)
        return self._in_order(head, self.json(schema), syntax.after, self.literal(tail))

    def _tags(self, syntax: Tags, name: str, schema: Any) -> str:
        line = _LINE if not syntax.lines else self.literal("\n")
        if syntax.after_name:
            parts = [self.literal(name), syntax.after_name, self.literal(syntax.name_close), line]
        else:
            parts = [self.literal(name + syntax.name_close), line]
        required = required_of(schema)
        for key, value_schema in properties_of(schema).items():
            types = types_of(schema, key)
            string = is_string(types)
            written = syntax.written_key.format(
                key=key, string="true" if string else "false", type=type_name(types)
            )
            head = [self.literal(syntax.key_open + written + syntax.key_close)]
            if isinstance(syntax, KeyedTags):
                head += [_LINE, self.literal(syntax.value_open)]
            ending = ("\n" if syntax.lines else "") + syntax.value_close
            head += [self.literal("\n")] if syntax.lines else []
            value = self._text_value(value_schema, ending) if string else None
            if value is None:
                value = f"{self._plain_value(schema, value_schema, types)} {self.literal(ending)}"
            argument = self._in_order(*head, value, line)
            parts.append(argument if key in required else f"({argument})?")
        return self._in_order(*parts, self.literal(syntax.closers[0]))

    def _elements(self, root: Any, schema: Any, mark: str) -> str:
        """A tag for each property of an object, in the schema's order."""
        required = required_of(schema)
        elements = [(k, self._element(root, k, v, mark)) for k, v in properties_of(schema).items()]
        return self._in_order(*(x if key in required else f"({x})?" for key, x in elements))

    def _element(self, root: Any, key: str, schema: Any, mark: str) -> str:
        """A tag around a value; JSON where its schema says more than what it consists of."""
        head, ending = self.literal(f"{mark}<{key}>"), f"{mark}</{key}>"
        types = type_names(schema)
        if is_string(types):
            return f"{head} {self._text_value(schema, ending)}"
        if is_only_properties(schema, types):
            inside = self._elements(root, schema, mark)
        elif is_only_items(schema, types):
            inside = f"({self._element(root, ITEM, schema['items'], mark)})*"
        else:
            inside = self._plain_value(root, schema, types)
        return self._in_order(head, inside, self.literal(ending))

    def _plain_value(self, root: Any, schema: Any, types: frozenset[str]) -> str:
        """A value that is no string: JSON, or the words that Python has for truth."""
        if types == {"boolean"} and "enum" not in schema:
            return '("true" | "false" | "True" | "False")'
        return self.json(_within(root, schema))

    def _text_value(self, schema: Any, ending: str) -> str:
        """A string as plain text, up to `ending`."""
        options = schema.get("enum") if isinstance(schema, Mapping) else None
        if isinstance(options, list) and options:
            texts = " | ".join(self.literal(str(option)) for option in options)
            return f"({texts}) {self.literal(ending)}"
        return self.text_until(ending)

    def _listed_arguments(self, schema: Any, gemma: bool) -> str:
        """key=value with commas between them: those that are required first."""
        properties, required = properties_of(schema), required_of(schema)
        written = {
            key: self.rule(self._argument(key, schema, value, gemma))
            for key, value in properties.items()
        }
        comma = '"," ' if gemma else '", " '
        first = [written[key] for key in written if key in required]
        others = [written[key] for key in written if key not in required]
        if first:
            return f" {comma}".join(first) + "".join(f" ({comma}{other})?" for other in others)
        starts = [
            other + "".join(f" ({comma}{later})?" for later in others[i + 1 :])
            for i, other in enumerate(others)
        ]
        return f"({' | '.join(starts)})?" if starts else ""

    def _argument(self, key: str, schema: Any, value: Any, gemma: bool) -> str:
        if gemma:
            return f"{self.literal(key + ':')} {self._gemma_value(schema, value)}"
        plain = self._plain_value(schema, value, types_of(schema, key))
        return f"{self.literal(key + '=')} {plain}"

    def _gemma_value(self, root: Any, schema: Any) -> str:
        """A value as Gemma writes it; JSON where its schema says more than what it consists of."""
        types = types_of({"properties": {"": schema}}, "")
        if is_string(types):
            quote = self.format.syntax.quote  # type: ignore[union-attr]
            return f"{self.literal(quote)} {self._text_value(schema, quote)}"
        if is_only_properties(schema, types):
            inside = self._listed_arguments({**_definitions(root), **schema}, gemma=True)
            return f'"{{" {inside} "}}"'
        if is_only_items(schema, types):
            item = self._gemma_value(root, schema["items"])
            return f'"[" ({item} ("," {item})*)? "]"'
        return self.json(_within(root, schema))


def _within(root: Any, schema: Any) -> Any:
    """A property's schema with the definitions that it may refer to."""
    return {**_definitions(root), **schema} if isinstance(schema, Mapping) else schema


def _definitions(root: Any) -> dict[str, Any]:
    return {key: root[key] for key in ("$defs", "definitions") if key in root}
