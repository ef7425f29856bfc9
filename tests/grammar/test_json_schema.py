"""JSON schemas: what is written under one validates, in all the ways that schemas are written."""

from __future__ import annotations

import json
import random

import jsonschema
import numpy as np
import pytest
from grammar.walks import accepts, random_text

from ggpy.grammar import GrammarError

FORMATS = (
    "date",
    "uuid",
    "email",
    "ipv4",
    "ipv6",
    "time",
    "date-time",
    "hostname",
    "uri",
    "duration",
)
PATTERNS = (
    "^[a-z]{2,5}$",
    "^(red|green|blue)$",
    "[0-9]{3}",
    "^[A-Z][a-z]*( [A-Z][a-z]*)?$",
    "^\\d+-\\w$",
)
CHECKED_FORMATS = jsonschema.Draft202012Validator.FORMAT_CHECKER
WORDS = ("id", "name", "age", "tags", "é", "a b", "x-y", "items", "type", 'q"uote', "on")


class RandomSchema:
    """A schema of the kinds that collections of real ones have."""

    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.definitions = {}
        kinds = [self.object, self.object, self.array, self.union, self.scalar, self.referring]
        self.schema = kinds[seed % len(kinds)](3)
        if self.definitions:
            self.schema = {**self.schema, "$defs": self.definitions}
        if seed % 5 == 0:
            self.schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
            self.schema["title"] = "a title"

    def any(self, depth):
        if depth == 0:
            return self.scalar(0)
        kinds = [self.scalar, self.scalar, self.object, self.array, self.union, self.referring]
        return self.rng.choice(kinds)(depth - 1)

    def scalar(self, depth):
        kind = self.rng.choice([self.string, self.integer, self.number, self.constant, self.plain])
        return kind()

    def string(self):
        low = self.rng.randint(0, 4)
        return self.rng.choice(
            [
                {"type": "string"},
                {"type": "string", "minLength": low, "maxLength": low + self.rng.randint(0, 6)},
                {"type": "string", "pattern": self.rng.choice(PATTERNS)},
                {"type": "string", "format": self.rng.choice(FORMATS)},
            ]
        )

    def integer(self):
        low = self.rng.randint(-500, 500)
        return self.rng.choice(
            [
                {"type": "integer", "minimum": low, "maximum": low + self.rng.randint(0, 900)},
                {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": low + 12},
                {"type": "integer", "minimum": low},
                {"type": "integer", "multipleOf": self.rng.choice([2, 5, 10])},
            ]
        )

    def number(self):
        low = self.rng.randint(-50, 50) / 4
        return self.rng.choice(
            [{"type": "number"}, {"type": "number", "minimum": low, "maximum": low + 7.5}]
        )

    def constant(self):
        values = [1, "a", None, True, 2.5, "two words", ["x", 1], {"k": "v"}, 'q"', "é"]
        if self.rng.random() < 0.3:
            return {"const": self.rng.choice(values)}
        return {"enum": self.rng.sample(values, self.rng.randint(1, 5))}

    def plain(self):
        kinds = self.rng.sample(["null", "boolean", "integer", "string"], 2)
        return {"type": self.rng.choice([*kinds, kinds])}

    def object(self, depth):
        names = self.rng.sample(WORDS, self.rng.randint(0, 4))
        schema = {"type": "object", "properties": {name: self.any(depth) for name in names}}
        if names and self.rng.random() < 0.8:
            schema["required"] = self.rng.sample(names, self.rng.randint(1, len(names)))
        more = self.rng.choice([False, False, None, {"type": "integer"}])
        if more is not None:
            schema["additionalProperties"] = more
        return schema

    def array(self, depth):
        low = self.rng.randint(0, 3)
        schema = {"type": "array", "items": self.any(depth)}
        if self.rng.random() < 0.6:
            schema |= {"minItems": low, "maxItems": low + self.rng.randint(0, 3)}
        if self.rng.random() < 0.3:
            schema["prefixItems"] = [self.any(0) for _ in range(2)]
        return schema

    def union(self, depth):
        parts = [self.any(depth) for _ in range(self.rng.randint(1, 3))]
        kind = self.rng.random()
        if kind < 0.5:
            return {"anyOf": parts}
        if kind < 0.75:  # told apart by a property, as unions of classes are
            variants = [
                {
                    "type": "object",
                    "properties": {"kind": {"const": f"k{i}"}, "value": part},
                    "required": ["kind", "value"],
                    "additionalProperties": False,
                }
                for i, part in enumerate(parts)
            ]
            return {"oneOf": variants}
        return {"allOf": [parts[0], {"description": "nothing more"}]}

    def referring(self, depth):
        name = f"d{len(self.definitions)}"
        self.definitions[name] = {}
        self.definitions[name] = self.any(depth)
        if self.rng.random() < 0.3:  # a list or a tree of them
            self.definitions[name] = {
                "type": "object",
                "properties": {"value": self.any(0), "next": {"$ref": f"#/$defs/{name}"}},
                "required": ["value"],
                "additionalProperties": False,
            }
        return {"$ref": f"#/$defs/{name}"}


def validator(schema):
    return jsonschema.Draft202012Validator(schema, format_checker=CHECKED_FORMATS)


@pytest.mark.parametrize("first", range(0, 320, 40))
def test_texts_under_random_schemas_validate(grammars, tokenizer, first):
    refused = []
    for seed in range(first, first + 40):
        schema, rng = RandomSchema(seed).schema, np.random.default_rng(seed)
        try:
            mask = grammars.compile("json_schema", json.dumps(schema))
        except GrammarError as error:
            refused.append(str(error))
            continue
        validator(schema).validate(json.loads(random_text(mask, tokenizer, rng)))
    assert len(refused) <= 2, refused


KNOWN = [
    ({"type": "object"}, ["{}", '{"a":1}', '{ "a": [ null, {} ] }'], ["[]", '{"a":}', '{a:1}']),
    ({}, ["1", '"a"', "null", "[[]]", "-0.5e-3"], ["", "nul", "01", "'a'"]),
    (
        {"type": "object", "properties": {"a": {}, "b": {}}, "required": ["b"],
         "additionalProperties": False},
        ['{"a":1,"b":2}', '{"b":2}'], ['{"a":1}', "{}", '{"b":1,"c":2}', '{"b":2,"a":1}'],
    ),
    ({"type": "integer", "minimum": -3, "maximum": 12}, ["-3", "0", "12"], ["-4", "13", "1.5"]),
    ({"type": "number", "exclusiveMinimum": 0, "maximum": 1}, ["0.5", "1", "0.01"], ["0", "1.1"]),
    ({"enum": ["a", 1, None, "é"]}, ['"a"', "1", "null", '"é"'], ['"b"', "2", "true"]),
    ({"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2},
     ["[true]", "[ true, false ]"], ["[]", "[true,true,true]", "[1]"]),
    ({"type": "string", "pattern": "^a+b?$"}, ['"a"', '"aab"'], ['"b"', '""', '"abb"']),
    ({"type": "string", "minLength": 2, "maxLength": 3}, ['"éé"', '"a\\\\n"'], ['"a"', '"aaaa"']),
    ({"type": "string", "format": "date"}, ['"2024-02-29"'], ['"2024-13-01"', '"24-01-01"', '"x"']),
    ({"anyOf": [{"type": "null"}, {"const": 2}]}, ["null", "2"], ["1", '"null"']),
    ({"$defs": {"t": {"type": "array", "items": {"$ref": "#/$defs/t"}}}, "$ref": "#/$defs/t"},
     ["[]", "[[],[[]]]"], ["[1]", "[[]"]),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "good", "bad"), KNOWN)
def test_known_schemas(grammars, tokenizer, schema, good, bad):
    def written(text):
        return accepts(grammars.compile("json_schema", json.dumps(schema)), tokenizer, text)

    assert [text for text in good if not written(text)] == []
    assert [text for text in bad if written(text)] == []


def test_blanks_are_allowed_but_not_for_ever(grammars, tokenizer):
    for text in ('{ "a": 1 }', '{\n  "a": [\n    1\n  ]\n}', '{\n\n"a" : 1}'):
        assert accepts(grammars.compile("json_object"), tokenizer, text)
    for text in ("{  }", "{\n\n\n}", "{\n" + " " * 21 + "}", " {}", "{} ", "{}\n"):
        assert not accepts(grammars.compile("json_object"), tokenizer, text)


def test_an_object_is_not_any_json(grammars, tokenizer):
    for text in ("1", "[]", '"a"', "null"):
        assert not accepts(grammars.compile("json_object"), tokenizer, text)
    assert accepts(grammars.compile("json_object"), tokenizer, '{"a": {"b": [1, "é", null]}}')


REFUSED = [
    ("{", "not JSON"),
    ("NaN", "not JSON"),
    ("[]", "must be an object"),
    ('"string"', "must be an object"),
    ("false", "nothing matches"),
    ('{"type": "objec"}', "Invalid type: objec"),
    ('{"not": {"type": "string"}}', 'Unimplemented keys: \\["not"\\]'),
    ('{"uniqueItems": true, "x-guidance": {"lenient": true}}', "Unimplemented keys"),
    ('{"if": {}, "then": {}}', "Unimplemented keys"),
    ('{"type": "string", "format": "nonsense"}', "Unknown format: nonsense"),
    ('{"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]}', "oneOf .* not supp"),
    ('{"type": "string", "pattern": "(?=a)b"}', "look-around"),
    ('{"type": "string", "minLength": 3, "maxLength": 2}', "minLength .* maxLength"),
    ('{"$ref": "#/$defs/nowhere"}', "nowhere"),
    ('{"$ref": "https://example.com/schema.json"}', "does not fetch"),
    ('{"$ref": "#"}', "no text matches"),
    ('{"allOf": [{"type": "string"}, {"type": "null"}]}', "Unsatisfiable"),
    ('{"properties": {"a": ' * 200 + "{}" + "}}" * 200, "recursion limit"),
    ('{"a":' * 100_000, "nested too deeply"),
    (json.dumps({"enum": ["x" * 1_000_001]}), "bytes: the limit is 1000000"),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "words"), REFUSED)
def test_schemas_that_cannot_be_enforced_are_refused(grammars, schema, words):
    with pytest.raises(GrammarError, match=words) as caught:
        grammars.compile("json_schema", schema)
    assert len(str(caught.value)) < 1100
