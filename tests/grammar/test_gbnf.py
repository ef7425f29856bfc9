"""GBNF: texts that a slow reading of the rules allows, and no others; and what is no GBNF."""

from __future__ import annotations

import random
import re
from functools import reduce
from itertools import product

import numpy as np
import pytest
from grammar.walks import accepts, random_text

from ggpy.grammar import GrammarError, regular
from ggpy.grammar.gbnf import Alternatives, CharSet, Repeat, RuleName, Series, read_gbnf
from ggpy.grammar.lexemes import lark_of


class Slow:
    """All places where a rule may end in one text, by trying everything."""

    def __init__(self, rules, text):
        self.rules, self.text = rules, text
        self.known = {}
        self.changed = True
        while self.changed:  # until left-recursive rules have no more ends
            self.changed, self.seen = False, set()
            self.ends = self.at(RuleName("root"), 0)

    def at(self, node, i):
        if isinstance(node, CharSet):
            code = ord(self.text[i]) if i < len(self.text) else -1
            return {i + 1} if any(a <= code <= b for a, b in node.ranges) else set()
        if isinstance(node, Alternatives):
            return set().union(*(self.at(item, i) for item in node.items))
        if isinstance(node, Series):
            return reduce(lambda ends, item: self.after(item, ends), node.items, {i})
        if isinstance(node, Repeat):
            return self.repeated(node, i)
        return self.rule(node.name, i)

    def after(self, node, places):
        return set().union(*(self.at(node, i) for i in places))

    def repeated(self, node, i):
        ends, found = {i}, set()
        for n in range(node.low + len(self.text) + 1 if node.high is None else node.high + 1):
            if n >= node.low:
                found |= ends
            ends = self.after(node.item, ends)
        return found

    def rule(self, name, i):
        if (name, i) not in self.seen:
            self.seen.add((name, i))
            found = self.at(self.rules[name], i) | self.known.get((name, i), set())
            self.changed |= found != self.known.get((name, i))
            self.known[name, i] = found
        return self.known.get((name, i), set())

    @property
    def matches(self):
        return len(self.text) in self.ends


class RandomGrammar:
    """Rules over a few characters; "é" and "è" have the same first byte."""

    CLASSES = ("[a]", "[b]", "[ab]", "[^a]", '"a"', '"b"', '"ab"', '"ba"', '"é"', "[éb]", "[è-é]")

    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.names = ["root", "x", "y"][: self.rng.randint(1, 3)]
        self.text = "\n".join(f"{name} ::= {self.node(3)}" for name in self.names)

    def node(self, depth):
        kind = self.rng.choice(["class"] * 2 + ["name", "series", "series", "choice", "repeat"])
        if depth == 0 or kind == "class":
            return self.rng.choice(self.CLASSES)
        if kind == "name":
            return self.rng.choice(self.names)
        if kind == "repeat":
            return f"({self.node(depth - 1)}){self.rng.choice(['*', '+', '?', '{2}', '{1,2}'])}"
        parts = [self.node(depth - 1) for _ in range(self.rng.randint(2, 3))]
        return f"({(' ' if kind == 'series' else ' | ').join(parts)})"


TEXTS = ["".join(t) for n in range(5) for t in product("abé" if n < 4 else "ab", repeat=n)]


@pytest.mark.parametrize("first", range(0, 200, 25))
def test_random_grammars_allow_what_their_rules_say(grammars, tokenizer, first):
    for seed in range(first, first + 25):
        grammar = RandomGrammar(seed).text
        rules = read_gbnf(grammar)
        expected = [text for text in TEXTS if Slow(rules, text).matches]
        try:
            found = [t for t in TEXTS if accepts(grammars.compile("gbnf", grammar), tokenizer, t)]
        except GrammarError as error:
            assert "no text matches" in str(error) and not expected, grammar
        else:
            assert found == expected, grammar


ARITHMETIC = r"""
root  ::= (expr "=" ws term "\n")+
expr  ::= term ([-+*/] term)*
term  ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws
num   ::= [0-9]+ ws
ws    ::= [ \t\n]*
"""
GAME = r"""
# pairs of moves, each with its number
root    ::= "1. " move " " move "\n" ([2-9] ". " move " " move "\n")*
move    ::= (pawn | piece | castle) [+#]?
piece   ::= [NBRQK] [a-h]? [1-8]? "x"? [a-h] [1-8]
pawn    ::= ([a-h] "x")? [a-h] [1-8] ("=" [NBRQ])?
castle  ::= "O-O" "-O"?
"""
JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws (string ":" ws value ("," ws string ":" ws value)*)? "}" ws
array  ::= "[" ws (
    value              # the first
    ("," ws value)*
  )? "]" ws
string ::= "\"" ([^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt/] | "u" [0-9a-fA-F]{4}))* "\"" ws
number ::= "-"? ("0" | [1-9] [0-9]{0,9}) ("." [0-9]{1,5})? ([eE] [-+]? [1-9])? ws
ws     ::= | " " | "\n" [ \t]{0,5}
"""
KNOWN = [
    (ARITHMETIC, ["a=b\n", "a*c =\t(b+1) \n", "x1=2\n\n\ny=(x)\n"], ["a=b", "1a=b\n", "a=\n"]),
    (GAME, ["1. e4 Nxe5\n", "1. d8=Q+ O-O-O#\n2. Qh5 gxh6\n"], ["1. e9 e5\n", "1. e4\n"]),
    (JSON, ["{}", '{"a": [1, -2.5e3,{"b":null}]}\n', '{ "é\\u00e9\\"": "" }'], ["[]", '{"a":01}']),
    ('root ::= [a-z]* "foo"', ["foo", "fofoo", "foofoo", "xyzfoo"], ["fo", "fox", ""]),
    ('root ::= "\\x41" [\\u00e9] "\\U0001F600" "\\t\\]"', ["Aé😀\t]"], ["aé😀\t]"]),
    ("root ::= .{2} [^é]", ["\né\n", "ab😀"], ["abé", "ab"]),
    ("root ::= [-a] [b-] [+-a]", ["-b+", "a-a", "---"], ["b-c", "a-~"]),
    ("root ::= a-b_1 | A-B\na-b_1 ::= \"1\"\nA-B ::= \"2\"", ["1", "2"], ["3"]),
    ('root ::= "a" |\n\n  "b"  # or\n\n# end', ["a", "b"], ["", "ab"]),
    ('root ::= ("a" | "b" root?){2,}', ["aa", "ab", "babb"], ["a", "b"]),
    ('root ::= "a"{0} "b"{0,0} "c"', ["c"], ["ac", "bc", ""]),
    ('root ::= "" | root "a"', ["", "aaa"], ["b"]),
]  # fmt: skip


@pytest.mark.parametrize(("grammar", "good", "bad"), KNOWN)
def test_known_grammars(grammars, tokenizer, grammar, good, bad):
    assert [t for t in good if not accepts(grammars.compile("gbnf", grammar), tokenizer, t)] == []
    assert [t for t in bad if accepts(grammars.compile("gbnf", grammar), tokenizer, t)] == []


@pytest.mark.parametrize("grammar", [ARITHMETIC, GAME, JSON])
def test_random_texts_match_by_the_slow_reading(grammars, tokenizer, grammar):
    rules, rng = read_gbnf(grammar), np.random.default_rng(1)
    for _ in range(8):
        text = random_text(grammars.compile("gbnf", grammar), tokenizer, rng, hurry=15)
        assert len(text) > 400 or Slow(rules, text).matches, text


def test_strings_of_json_are_lexemes():
    """So that a mask is not computed character by character."""
    lexemes = re.findall(r"/((?:\\.|[^/])*)/", lark_of(read_gbnf(JSON)))
    assert any(lexeme.startswith("[\\x{22}](?:") for lexeme in lexemes)
    assert len(set(lexemes)) < 15


BAD = [
    ("", "no rule root"),
    ('a ::= "x"', "no rule root"),
    ("root ::= a", "line 1: there is no rule a"),
    ('root ::= "a"\n\nb ::= c', "line 3: there is no rule c"),
    ('root ::= "a"\nroot ::= "b"', "line 2: there is a second rule root"),
    ('root ::= "a', "has no end"),
    ("root ::= [a", "has no end"),
    ("root ::= [z-a]", "goes down"),
    ("root ::= []", "no character"),
    ("root ::= [^\\x00-\\U0010ffff]", "no character"),
    ('root ::= ("a"', "\\) is missing"),
    ('root ::= "a")', "not part of a rule"),
    ('root = "a"', "::= is missing"),
    ('root ::= "\\q"', "\\\\q is no escape"),
    ('root ::= "\\u12"', "no escape"),
    ('root ::= "\\ud800"', "no character"),
    ('root ::= "\\U00110000"', "no character"),
    ('root ::= "a"{2,1}', "must rise"),
    ('root ::= "a"{1000000}', "at most"),
    ('root ::= "a"{x}', "a repetition is"),
    ("root ::= *", "not the name of a rule"),
    ("root ::= <[12]>", "not the name of a rule"),
    ("root ::= " + "(" * 100 + '"a"' + ")" * 100, "64 deep"),
    ("root ::= root", "no text matches"),
]


@pytest.mark.parametrize(("grammar", "words"), BAD)
def test_bad_grammars_are_refused(grammars, grammar, words):
    with pytest.raises(GrammarError, match=words):
        grammars.compile("gbnf", grammar)


def test_many_rules_are_refused_soon(grammars, monkeypatch):
    monkeypatch.setattr(regular, "MAX_WORK", 50_000)
    chain = "root ::= r0\n" + "".join(f"r{i} ::= r{i + 1}\n" for i in range(3000))
    with pytest.raises(GrammarError, match="too complex"):
        grammars.compile("gbnf", chain + 'r3000 ::= "a"')
    with pytest.raises(GrammarError, match=r"too deeply|too complex"):
        lark_of(read_gbnf("".join(f"r{i} ::= r{i + 1}\n" for i in range(2999, -1, -1))
                          + 'r3000 ::= "a"\nroot ::= r0'))  # fmt: skip
