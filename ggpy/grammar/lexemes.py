"""GBNF rules -> a grammar for llguidance that has the same texts.

llguidance reads a text in two layers: regular expressions cut it into lexemes, each as long as it
can be, and rules say in which order lexemes may stand. GBNF has one layer, in which nothing is
greedy: in `[a-z]* "s"` the last s belongs to the second part. One lexeme for each character would
always be right, and would make masks a thousand times slower. So each regular part of the rules
becomes one lexeme if it is certain that cutting is unambiguous, and else is split into its parts:

- No lexeme that has ended could go on with a character with which the next lexeme may begin, nor
  with one whose first byte is the same: lexemes are cut as bytes come.
- No two lexemes that may stand at the same place begin with the same character, unless both are
  single characters.

Sets of lexemes are the bits of integers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from operator import or_

from .errors import GrammarError
from .gbnf import CharSet, Node, Repeat, RuleName, Series
from .regular import Analysis, Lexeme, NodeFacts, bits, count


@dataclass(frozen=True)
class Phrase:
    """A node of a rule over lexemes."""

    kind: str  # "lexeme", "rule", "series", "choice", "repeat"
    items: tuple[Phrase, ...] = ()
    lexeme: Lexeme | None = None
    name: str = ""  # of a rule, or the count of a repetition
    nullable: bool = False


class Outline:
    """The rules over lexemes, where the nodes in `split` are none."""

    def __init__(self, facts: NodeFacts, split: set[int]) -> None:
        self.facts, self.split = facts, split
        self.analysis = Analysis(facts)
        self.rules: dict[str, Phrase] = {}
        todo = ["root"]
        while todo:
            name = todo.pop()
            if name not in self.rules:
                self.rules[name] = self._phrase(facts.rules[name])
                todo += _names(self.rules[name])

    def _phrase(self, node: Node) -> Phrase:
        facts = self.facts
        facts.visit()
        nullable = facts.nullable(node)
        if id(node) not in self.split and facts.leaves(node) is not None:
            if not nullable:
                return self._lexeme(node, node)
            if isinstance(node, Repeat) and not facts.nullable(node.item) and node.high != 0:
                some = node.item if node.high == 1 else Repeat(node.item, 1, node.high)
                return Phrase("repeat", (self._lexeme(some, node),), None, "?", True)
        if isinstance(node, CharSet):
            return self._lexeme(node, node)
        if isinstance(node, Repeat) and node.high == 0:
            return Phrase("series", (), None, "", True)
        if isinstance(node, RuleName):
            return Phrase("rule", (), None, node.name, nullable)
        if isinstance(node, Repeat):
            return Phrase("repeat", (self._phrase(node.item),), None, count(node), nullable)
        kind = "series" if isinstance(node, Series) else "choice"
        return Phrase(kind, tuple(map(self._phrase, node.items)), None, "", nullable)

    def _lexeme(self, node: Node, owner: Node) -> Phrase:
        return Phrase("lexeme", (), self.analysis.lexeme(node, owner))

    def text(self) -> str:
        """The grammar in llguidance's Lark."""
        numbers = {name: i for i, name in enumerate(self.rules)}
        named = ((f"r{i}" if i else "start", self.rules[name]) for name, i in numbers.items())
        return "\n".join(f"{name}: {_lark(phrase, numbers)}" for name, phrase in named) + "\n"


def _names(phrase: Phrase) -> list[str]:
    if phrase.kind == "rule":
        return [phrase.name]
    return [name for item in phrase.items for name in _names(item)]


def _lark(phrase: Phrase, numbers: dict[str, int]) -> str:
    if phrase.lexeme is not None:
        return f"/{phrase.lexeme.regex}/"
    if phrase.kind == "rule":
        number = numbers[phrase.name]
        return f"r{number}" if number else "start"
    items = [_lark(item, numbers) for item in phrase.items]
    if phrase.kind == "repeat":
        return f"({items[0]}){phrase.name}"
    if phrase.kind == "choice":
        return f"({' | '.join(items)})"
    return " ".join(items) or '""'


class LexemeOrder:
    """Which lexemes may stand first, and which next to each."""

    def __init__(self, outline: Outline) -> None:
        self.rules, self.visit = outline.rules, outline.facts.visit
        self.first_of = dict.fromkeys(self.rules, 0)
        self.after_rule = dict.fromkeys(self.rules, 0)
        self.next = [0] * len(outline.analysis.list)
        self._settle(self._grow_first)
        self._settle(self._grow_after)
        self.start = self.first_of["root"]

    def _settle(self, grow: Callable[[str], bool]) -> None:
        while any([grow(name) for name in self.rules]):
            pass

    def _grow_first(self, name: str) -> bool:
        before = self.first_of[name]
        self.first_of[name] = self.first(self.rules[name])
        return self.first_of[name] != before

    def _grow_after(self, name: str) -> bool:
        self._changed = False
        self._walk(self.rules[name], self.after_rule[name])
        return self._changed

    def first(self, phrase: Phrase) -> int:
        """The lexemes with which a phrase may begin."""
        self.visit()
        if phrase.lexeme is not None:
            return 1 << phrase.lexeme.number
        if phrase.kind == "rule":
            return self.first_of[phrase.name]
        found = 0
        for item in phrase.items:
            found |= self.first(item)
            if phrase.kind == "series" and not item.nullable:
                break
        return found

    def _walk(self, phrase: Phrase, after: int) -> int:
        """Notes that lexemes `after` may come after a phrase; returns what may come before them."""
        self.visit()
        if phrase.lexeme is not None:
            self._note(self.next, phrase.lexeme.number, after)
            return 1 << phrase.lexeme.number
        if phrase.kind == "rule":
            self._note(self.after_rule, phrase.name, after)
            return self.first_of[phrase.name]
        if phrase.kind == "series":
            for item in reversed(phrase.items):
                first = self._walk(item, after)
                after = first | after if item.nullable else first
            return after
        if phrase.kind == "repeat":
            again = 0 if phrase.name == "?" else self.first(phrase.items[0])
            return self._walk(phrase.items[0], after | again)
        return reduce(or_, (self._walk(item, after) for item in phrase.items), 0)

    def _note(self, table: dict[str, int] | list[int], key: str | int, after: int) -> None:
        if after & ~table[key]:  # type: ignore[index, call-overload]
            table[key] |= after  # type: ignore[index, call-overload]
            self._changed = True


def _conflicts(outline: Outline) -> set[int]:
    """Ids of the nodes whose lexemes would not be cut as GBNF says."""
    lexemes, order = outline.analysis.list, LexemeOrder(outline)
    lead = outline.analysis.intervals.lead
    group = list(range(len(lexemes)))  # single characters that may be mistaken for each other
    after = list(order.next)  # of each group
    found: set[int] = set()
    todo = [order.start, *after]
    while todo:
        together = todo.pop()
        seen = 0
        for i in bits(together):
            outline.facts.visit()
            if seen & lexemes[i].first:
                others = [j for j in bits(together) if lexemes[j].first & lexemes[i].first]
                many = [j for j in others if not lexemes[j].single]
                found.update(*(lexemes[j].nodes for j in many))
                if not many:
                    todo += _united(others, group, after)
            seen |= lexemes[i].first
    for i, lexeme in enumerate(lexemes):
        begin = reduce(or_, (lexemes[j].first for j in bits(after[group[i]])), 0)
        if lead(lexeme.going_on) & lead(begin):
            found |= lexeme.nodes
    return found


def _united(members: list[int], group: list[int], after: list[int]) -> list[int]:
    """Makes one group of the members' groups; returns what may come after it, if that is new."""
    old = {group[i] for i in members}
    if len(old) == 1:
        return []
    new = min(old)
    after[new] = reduce(or_, (after[g] for g in old), 0)
    for i, g in enumerate(group):
        if g in old:
            group[i] = new
    return [after[new]]


def lark_of(rules: dict[str, Node]) -> str:
    """GBNF rules as llguidance's Lark; GrammarError for too many, or too complex ones."""
    try:
        facts, split = NodeFacts(rules), set[int]()
        while more := _conflicts(outline := Outline(facts, split)):
            split |= more
        return outline.text()
    except RecursionError:
        raise GrammarError("GBNF: rules refer to each other too deeply: use fewer") from None
