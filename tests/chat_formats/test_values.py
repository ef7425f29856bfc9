"""Values as text, Python and Gemma's form: the JSON that they become."""

from __future__ import annotations

import json

import pytest
from chat_formats.families import read

from ggpy.chat_formats import by_name
from ggpy.chat_formats.values import gemma_json, python_json, typed, types_of


@pytest.mark.parametrize(
    ("text", "types", "value"),
    [
        ("5", {"string"}, "5"),
        (" a\n", {"string"}, " a\n"),
        ("5", {"integer"}, 5),
        ("5", {"number"}, 5),
        ("5", {"string", "integer"}, 5),
        ("5", {"string", "null"}, "5"),
        ("null", {"string", "null"}, None),
        ("False", {"boolean"}, False),
        ("maybe", {"boolean"}, "maybe"),
        ("[1, 2", {"array"}, "[1, 2"),
        ("['a', true]", {"array"}, ["a", True]),
        ("NaN", {"number"}, "NaN"),
        ("007", set(), "007"),
        ("[" * 5000, {"array"}, "[" * 5000),
    ],
)
def test_plain_text(text: str, types: set[str], value: object) -> None:
    assert json.loads(typed(text, frozenset(types))) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("'a\"b'", 'a"b'),
        ('"\\u00e9"', "\u00e9"),
        ("{'a': (1, 2.5), 'b': None}", {"a": [1, 2.5], "b": None}),
        ("[true, 'true', null]", [True, "true", None]),
        ("f(1)", "f(1)"),
        ("{'a': 1e999}", "{'a': 1e999}"),
        ("{1, 2}", "{1, 2}"),
        ("-" * 3000 + "1", "-" * 3000 + "1"),
        ("'a 'b' \\n c'", "a 'b' \\n c"),
    ],
)
def test_python(text: str, value: object) -> None:
    assert json.loads(python_json(text)) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("'it's, she said, 'fine'.', n=2)", "it's, she said, 'fine'."),
        ("'a\nb' , n=2)", "a\nb"),
        ("'a' \"b\", n=2)", "ab"),
        ("'a\\'b', n=2)", "a'b"),
    ],
)
def test_strings_of_calls_with_quotes_that_nothing_escapes(text: str, value: str) -> None:
    properties = {"s": {"type": "string"}, "n": {"type": "integer"}}
    answer = read(by_name("olmo3"), list(f"<function_calls>f(s={text}"), {"f": properties})
    assert answer.parsed() == [("f", {"s": value, "n": 2})]


def test_half_a_surrogate_pair_can_be_encoded() -> None:
    assert python_json("'\\ud800'").encode() == b'"\\ud800"'


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('<|"|>a"b<|"|>', 'a"b'),
        ('{a:1,b:[<|"|>x:y<|"|>,true]}', {"a": 1, "b": ["x:y", True]}),
        ('{"a b":"c:d"}', {"a b": "c:d"}),
        ("12", 12),
        ("{a:", "{a:"),
        ('<|"|>open', '<|"|>open'),
        ('[None,True,{None:False},<|"|>None<|"|>]', [None, True, {"None": False}, "None"]),
    ],
)
def test_gemma(text: str, value: object) -> None:
    assert json.loads(gemma_json(text)) == value


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "string"}, {"string"}),
        ({"type": ["string", "null"]}, {"string", "null"}),
        ({"enum": ["a", 1]}, {"string", "integer"}),
        ({"oneOf": [{"type": "array"}, {"enum": [None]}]}, {"array", "null"}),
        ({}, set()),
        (True, set()),
    ],
)
def test_types_of_schemas(schema: object, types: set[str]) -> None:
    assert types_of({"properties": {"k": schema}}, "k") == types


def test_schemas_that_are_none_have_no_types() -> None:
    for schema in (None, [], {"properties": 3}, {}):
        assert types_of(schema, "k") == frozenset()
