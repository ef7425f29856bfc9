"""Regular parts of GBNF rules as regular expressions, and what is known of each.

A lexeme may be cut out of a text by its longest match only if it is known with which characters it
begins, and with which characters a match of it may go on; both are found here. Nothing here knows
where a lexeme may stand.

Sets of leaves (the character sets of an expression), and sets of character intervals, are the bits
of integers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import reduce
from operator import or_

from .errors import GrammarError
from .gbnf import Alternatives, CharSet, Node, Ranges, Repeat, RuleName, Series

MAX_LEAVES = 1000  # character sets in a lexeme
MAX_STATES = 1000  # of a lexeme's automaton, which is assumed to be unsafe beyond that
MAX_WORK = 1_000_000  # visits of nodes, about a microsecond each


@dataclass
class Lexeme:
    """A regular expression that matches no empty text, and all that cutting depends on."""

    number: int
    regex: str
    single: bool  # whether it always is one character
    first: int  # intervals with which it begins
    going_on: int  # intervals with which a text that it matches may go on
    nodes: set[int] = field(default_factory=set)  # ids of the nodes that it stands for


@dataclass(frozen=True)
class Positions:
    """A regular expression by its character sets: which may be first, last, and next to another.

    first, last: bits of leaves. follow: of each leaf, the leaves that may be next.
    """

    nullable: bool
    first: int
    last: int


def bits(mask: int) -> Iterator[int]:
    """The numbers of the bits that are set."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


class Intervals:
    """The characters cut at every bound of every set, so that a set is some whole intervals."""

    def __init__(self, sets: list[Ranges]) -> None:
        bounds = {b for ranges in sets for first, last in ranges for b in (first, last + 1)}
        self.index = {bound: i for i, bound in enumerate(sorted(bounds))}
        self._known: dict[Ranges, int] = {}
        starts = sorted(bounds)
        pairs = zip(starts, [b - 1 for b in starts[1:]], strict=False)
        self.all = (1 << len(bounds)) - 1
        self._lead = [_lead_bytes(first, last) for first, last in pairs]

    def lead(self, mask: int) -> int:
        """The first bytes in UTF-8 of the characters in these intervals, as bits."""
        return reduce(or_, (lead for i, lead in enumerate(self._lead) if mask >> i & 1), 0)

    def mask(self, ranges: Ranges) -> int:
        """The intervals of a set, as bits."""
        if ranges not in self._known:
            spans = ((self.index[first], self.index[last + 1]) for first, last in ranges)
            self._known[ranges] = reduce(or_, ((1 << end) - (1 << at) for at, end in spans), 0)
        return self._known[ranges]


def _lead_bytes(first: int, last: int) -> int:
    """The first bytes in UTF-8 of characters first..last, as bits."""
    low, high = (chr(code).encode("utf-8", "surrogatepass")[0] for code in (first, last))
    return (2 << high) - (1 << low)


class NodeFacts:
    """What is known of every node: whether it is regular and nullable, and its size."""

    def __init__(self, rules: dict[str, Node]) -> None:
        self.rules = rules
        self.work = 0
        self.nullable_rules: set[str] = set()
        self.leaves_of_rules: dict[str, int | None] = {}
        while any([self._find_nullable(name) for name in rules]):
            pass
        order = list(rules)
        while any([self._find_leaves(name) for name in order]):
            order = [name for name in order if name not in self.leaves_of_rules]

    def _find_nullable(self, name: str) -> bool:
        if name in self.nullable_rules or not self.nullable(self.rules[name]):
            return False
        self.nullable_rules.add(name)
        return True

    def _find_leaves(self, name: str) -> bool:
        if name in self.leaves_of_rules or (n := self.leaves(self.rules[name])) is None:
            return False
        self.leaves_of_rules[name] = n
        return True

    def visit(self) -> None:
        """Counts a step; GrammarError for too many."""
        self.work += 1
        if self.work > MAX_WORK:
            raise GrammarError("GBNF: the grammar is too complex: use fewer and simpler rules")

    def nullable(self, node: Node) -> bool:
        """Whether it may be an empty text."""
        self.visit()
        if isinstance(node, Series):
            return all(map(self.nullable, node.items))
        if isinstance(node, Alternatives):
            return any(map(self.nullable, node.items))
        if isinstance(node, Repeat):
            return node.low == 0 or self.nullable(node.item)
        return isinstance(node, RuleName) and node.name in self.nullable_rules

    def leaves(self, node: Node) -> int | None:
        """How many character sets it has; None for what is not regular, or has too many."""
        self.visit()
        if isinstance(node, CharSet):
            return 1
        if isinstance(node, RuleName):
            return self.leaves_of_rules.get(node.name)
        if isinstance(node, Repeat):
            return self.leaves(node.item)
        total = 0
        for item in node.items:
            n = self.leaves(item)
            if n is None or total + n > MAX_LEAVES:
                return None
            total += n
        return total


class Analysis:
    """Makes lexemes of regular nodes."""

    def __init__(self, facts: NodeFacts) -> None:
        self.facts = facts
        sets: list[Ranges] = []
        for rule in facts.rules.values():
            self._collect(rule, sets)
        self.intervals = Intervals(sets)
        self.known: dict[str, Lexeme] = {}
        self.list: list[Lexeme] = []

    def _collect(self, node: Node, sets: list[Ranges]) -> None:
        if isinstance(node, CharSet):
            sets.append(node.ranges)
        elif isinstance(node, Repeat):
            self._collect(node.item, sets)
        elif isinstance(node, (Series, Alternatives)):
            for item in node.items:
                self._collect(item, sets)

    def lexeme(self, node: Node, owner: Node) -> Lexeme:
        """The lexeme of a node; `owner` is the node that is split where it cannot be one."""
        regex = self._regex(node)
        if regex not in self.known:
            self.known[regex] = self._described(node, regex)
            self.list.append(self.known[regex])
        self.known[regex].nodes.add(id(owner))
        return self.known[regex]

    def _described(self, node: Node, regex: str) -> Lexeme:
        sets: list[int] = []
        follow: list[int] = []
        positions = self._positions(node, sets, follow)
        going_on = self._going_on(positions, sets, follow)
        first = reduce(or_, (sets[i] for i in bits(positions.first)), 0)
        single = len(sets) == 1 and not going_on
        return Lexeme(len(self.list), regex, single, first, going_on)

    def _going_on(self, positions: Positions, sets: list[int], follow: list[int]) -> int:
        """The intervals with which some text that matches may go on: a subset construction."""
        todo = self._steps(positions.first, sets)
        seen, found = set(todo), 0
        while todo:
            self.facts.visit()
            here = todo.pop()
            after = reduce(or_, (follow[i] for i in bits(here)), 0)
            if here & positions.last:
                found |= reduce(or_, (sets[i] for i in bits(after)), 0)
            new = [there for there in self._steps(after, sets) if there not in seen]
            seen.update(new)
            todo += new
            if len(seen) > MAX_STATES:
                return self.intervals.all
        return found

    def _steps(self, leaves: int, sets: list[int]) -> list[int]:
        """For each interval, those of the leaves that a character of it may be."""
        self.facts.visit()
        by_interval: dict[int, int] = {}
        for i in bits(leaves):
            for interval in bits(sets[i]):
                by_interval[interval] = by_interval.get(interval, 0) | 1 << i
        return list(dict.fromkeys(by_interval.values()))

    def _positions(self, node: Node, sets: list[int], follow: list[int]) -> Positions:
        """Appends the node's leaves to sets, and to follow which leaves may come next."""
        self.facts.visit()
        if isinstance(node, CharSet):
            sets.append(self.intervals.mask(node.ranges))
            follow.append(0)
            leaf = 1 << (len(sets) - 1)
            return Positions(False, leaf, leaf)
        if isinstance(node, RuleName):
            return self._positions(self.facts.rules[node.name], sets, follow)
        if isinstance(node, Repeat):
            inner = self._positions(node.item, sets, follow)
            if node.high != 1:
                for i in bits(inner.last):
                    follow[i] |= inner.first
            return Positions(inner.nullable or node.low == 0, inner.first, inner.last)
        parts = [self._positions(item, sets, follow) for item in node.items]
        if isinstance(node, Alternatives):
            first, last = (reduce(or_, masks, 0) for masks in _ends(parts))
            return Positions(any(p.nullable for p in parts), first, last)
        return reduce(lambda a, b: _in_turn(a, b, follow), parts, Positions(True, 0, 0))

    def _regex(self, node: Node) -> str:
        self.facts.visit()
        if isinstance(node, CharSet):
            return _char_class(node.ranges)
        if isinstance(node, RuleName):
            return self._regex(self.facts.rules[node.name])
        if isinstance(node, Repeat):
            return f"(?:{self._regex(node.item)}){count(node)}"
        parts = [self._regex(item) for item in node.items]
        return f"(?:{'|'.join(parts)})" if isinstance(node, Alternatives) else "".join(parts)


def _ends(parts: list[Positions]) -> tuple[list[int], list[int]]:
    return [p.first for p in parts], [p.last for p in parts]


def _in_turn(a: Positions, b: Positions, follow: list[int]) -> Positions:
    for i in bits(a.last):
        follow[i] |= b.first
    first = a.first | b.first if a.nullable else a.first
    last = a.last | b.last if b.nullable else b.last
    return Positions(a.nullable and b.nullable, first, last)


def _char_class(ranges: Ranges) -> str:
    spans = (f"\\x{{{a:X}}}" if a == b else f"\\x{{{a:X}}}-\\x{{{b:X}}}" for a, b in ranges)
    return f"[{''.join(spans)}]"


def count(node: Repeat) -> str:
    """The repetition as both notations write it."""
    known = {(0, None): "*", (1, None): "+", (0, 1): "?"}
    if (node.low, node.high) in known:
        return known[node.low, node.high]
    return f"{{{node.low},{'' if node.high is None else node.high}}}"
