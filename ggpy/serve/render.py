"""Markdown of a chat as HTML for the page: CommonMark, tables, formulas, highlighted code.

The text comes from a model, so none of it reaches the page as markup: raw HTML is off, links lead
to the web or to a mail address, formulas keep known MathML elements alone. Every step is bounded,
and a text that exceeds a bound is shown as it is. Nothing here knows HTTP or the engine.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, MutableMapping, Sequence
from functools import cache, lru_cache
from html import escape, unescape
from typing import Any
from xml.etree.ElementTree import Element

from latex2mathml.converter import convert_to_element
from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.ruler import RuleOptionsType
from markdown_it.rules_block import StateBlock
from markdown_it.rules_inline import StateInline
from markdown_it.token import Token
from markdown_it.utils import OptionsDict
from mdit_py_plugins.dollarmath import dollarmath_plugin
from mdit_py_plugins.tasklists import tasklists_plugin
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name
from pygments.util import ClassNotFound

MAX_CHARACTERS = 200_000  # of a text
MAX_SECONDS = 2.0  # for a text
MAX_NESTING = 24  # quotes in lists in quotes ...
MAX_CODE = 60_000  # characters of a code block that is highlighted
MAX_FORMULA = 4_000  # characters
MAX_FORMULA_DEPTH = 40  # braces, and \left, \begin or a script in another
MAX_FORMULA_LINES = 80

_LINK = re.compile(r"(?:https?://|mailto:)[^\s]", re.I)
_NEW_TAB = 'target="_blank" rel="noopener noreferrer"'
_MATHML = """
    math menclose mfrac mi mmultiscripts mn mo mover mpadded mphantom mprescripts mroot mrow ms
    mspace msqrt mstyle msub msubsup msup mtable mtd mtext mtr munder munderover none
"""
_ATTRIBUTES = """
    accent accentunder columnalign columnlines columnspacing depth display displaystyle fence form
    height linethickness lspace mathcolor mathsize mathvariant maxsize minsize movablelimits
    notation rowlines rowspacing rspace scriptlevel separator stretchy symmetric voffset width
"""
MATHML, MATHML_ATTRIBUTES = frozenset(_MATHML.split()), frozenset(_ATTRIBUTES.split())
# Operators whose subscripts stand below them in a displayed formula, as TeX has them.
_WITH_LIMITS = frozenset(
    [
        "lim",
        "min",
        "max",
        "sup",
        "inf",
        "argmax",
        "argmin",
        "Pr",
        "gcd",
        "det",
        *"\u22c3\u22c2\u2a01\u2a02\u22c1\u22c0",
    ]
)
_BELOW = {"msub": "munder", "msup": "mover", "msubsup": "munderover"}
_HARMLESS = re.compile(r"[\w .,%#+-]{0,60}")

Env = MutableMapping[str, Any]


class RenderTimeout(Exception):
    """Rendering a text takes longer than MAX_SECONDS."""


def render_markdown(text: str) -> str:
    """HTML of a Markdown text; the text itself, in <pre>, where a bound is exceeded.

    An unfinished text (an answer that grows) is rendered as if it ended there.
    """
    if len(text) > MAX_CHARACTERS:
        return _plain(text)
    try:
        env = {"deadline": time.monotonic() + MAX_SECONDS, "open_links": 0}
        return str(_parser().render(text, env))
    except (RenderTimeout, RecursionError):
        return _plain(text)


def _plain(text: str) -> str:
    return f'<pre class="plain">{escape(text)}</pre>\n'


@cache
def _parser() -> MarkdownIt:
    options = {"html": False, "breaks": True, "maxNesting": MAX_NESTING}
    md = MarkdownIt("commonmark", options).enable(["table", "strikethrough"])
    md.use(dollarmath_plugin, allow_space=False, allow_digits=False, double_inline=True)
    md.use(tasklists_plugin)
    md.inline.ruler.before("escape", "bracket_math", _bracket_math)
    interrupts: RuleOptionsType = {"alt": ["paragraph", "reference", "blockquote", "list"]}
    md.block.ruler.before("fence", "bracket_math_block", _bracket_math_block, interrupts)
    md.inline.ruler.before("text", "deadline", _inline_deadline)
    md.block.ruler.before("table", "deadline", _block_deadline)
    md.validateLink = lambda url: bool(_LINK.match(url))  # type: ignore[method-assign]
    for name, rule in _RENDER_RULES.items():
        md.add_render_rule(name, rule)
    return md


# Time


def _check_time(env: Env) -> None:
    if time.monotonic() > env["deadline"]:
        raise RenderTimeout


def _block_deadline(state: StateBlock, first: int, last: int, silent: bool) -> bool:
    _check_time(state.env)
    return False


def _inline_deadline(state: StateInline, silent: bool) -> bool:
    _check_time(state.env)
    return False


# Formulas


def _bracket_math(state: StateInline, silent: bool) -> bool:
    r"""A formula between \( and \), or \[ and \], inside a paragraph."""
    start = state.pos
    closing = {r"\(": r"\)", r"\[": r"\]"}.get(state.src[start : start + 2])
    if closing is None:
        return False
    end = state.src.find(closing, start + 2, min(state.posMax, start + 2 + MAX_FORMULA))
    if end < 0:
        return False
    if not silent:
        kind = "math_inline" if closing == r"\)" else "math_inline_double"
        token = state.push(kind, "math", 0)
        token.content = state.src[start + 2 : end]
    state.pos = end + 2
    return True


def _line(state: StateBlock, number: int) -> str:
    return state.src[state.bMarks[number] + state.tShift[number] : state.eMarks[number]].rstrip()


def _bracket_math_block(state: StateBlock, first: int, last: int, silent: bool) -> bool:
    r"""A formula between \[ at the beginning of a line and \] at the end of one."""
    if state.is_code_block(first) or not _line(state, first).startswith(r"\["):
        return False
    lines = []
    for number in range(first, min(last, first + MAX_FORMULA_LINES)):
        _check_time(state.env)
        if state.sCount[number] < state.blkIndent and not state.isEmpty(number):
            return False
        lines.append(_line(state, number))
        if r"\]" in lines[-1]:
            break
    latex = "\n".join(lines)
    if latex.find(r"\]") != len(latex) - 2:  # none, or text follows it
        return False
    if not silent:
        state.line = first + len(lines)
        token = state.push("math_block", "math", 0)
        token.block, token.content, token.map = True, latex[2:-2], [first, state.line]
    return True


@lru_cache(maxsize=1024)
def _formula(latex: str, display: bool) -> str:
    """MathML of a formula, or its source as code where it cannot be converted."""
    latex = latex.strip()
    try:
        if latex and len(latex) <= MAX_FORMULA and _depth(latex) <= MAX_FORMULA_DEPTH:
            made = convert_to_element(latex, display="block" if display else "inline")
            return "".join(_mathml(made))
    except Exception:  # the converter's own errors, and IndexError, KeyError, ... of bad input
        pass
    return f'<code class="formula">{escape(latex)}</code>'


def _depth(latex: str) -> int:
    r"""A bound of the converter's recursion: the deepest braces, and every ^ _ \left \begin."""
    deepest = depth = 0
    for brace in re.findall(r"(?<!\\)[{}]", latex):
        depth += 1 if brace == "{" else -1
        deepest = max(deepest, depth)
    return deepest + latex.count(r"\left") // 4 + latex.count(r"\begin") // 2


def _mathml(node: Element) -> Iterator[str]:
    """A MathML element of known names and harmless attributes; others keep their content alone."""
    known, tag = node.tag in MATHML, node.tag
    if tag in _BELOW and len(node) and unescape(node[0].text or "") in _WITH_LIMITS:
        tag = _BELOW[tag]
        node[0].set("movablelimits", "true")
    if known:
        yield f"<{tag}"
        for name, value in node.attrib.items():
            if name in MATHML_ATTRIBUTES and _HARMLESS.fullmatch(value):
                yield f' {name}="{escape(value)}"'
        yield ">"
    yield escape(unescape(node.text or ""))  # the converter writes symbols as &#x...;
    for child in node:
        yield from _mathml(child)
        yield escape(unescape(child.tail or ""))
    if known:
        yield f"</{tag}>"


def _math_inline(
    self: RendererHTML, tokens: Sequence[Token], i: int, options: OptionsDict, env: Env
) -> str:
    _check_time(env)
    return _formula(tokens[i].content, False)


def _math_block(
    self: RendererHTML, tokens: Sequence[Token], i: int, options: OptionsDict, env: Env
) -> str:
    _check_time(env)
    tag = "div" if tokens[i].block else "span"
    return f'<{tag} class="math">{_formula(tokens[i].content, True)}</{tag}>'


# Code


@lru_cache(maxsize=128)
def _code(code: str, language: str) -> str:
    """A code block: its language, the code, and a button, which the page makes copy the code."""
    label = escape(language[:40])
    return (
        f'<figure class="code"><figcaption><span class="language">{label or "text"}</span>'
        '<button type="button" class="copy-code">Copy</button></figcaption>'
        f'<pre tabindex="0"><code>{_highlighted(code, language)}</code></pre></figure>\n'
    )


def _highlighted(code: str, language: str) -> str:
    if language and len(code) <= MAX_CODE:
        try:
            lexer = get_lexer_by_name(language, stripnl=False, ensurenl=False)
        except ClassNotFound:
            return escape(code)
        deadline = {"deadline": time.monotonic() + MAX_SECONDS / 4}
        pieces = _Timed(deadline)
        HtmlFormatter(nowrap=True).format(lexer.get_tokens(code), pieces)
        return pieces.text.removesuffix("\n")
    return escape(code)


class _Timed:
    """A file to which highlighted lines are written; raises RenderTimeout after a deadline."""

    def __init__(self, env: Env) -> None:
        self.env, self.parts = env, list[str]()

    def write(self, text: str) -> None:
        _check_time(self.env)
        self.parts.append(text)

    @property
    def text(self) -> str:
        return "".join(self.parts)


def _fence(
    self: RendererHTML, tokens: Sequence[Token], i: int, options: OptionsDict, env: Env
) -> str:
    _check_time(env)
    token = tokens[i]
    language = (token.info.split() or [""])[0].lower()
    if language == "math":
        return f'<div class="math">{_formula(token.content, True)}</div>\n'
    return _code(token.content.removesuffix("\n"), language)


# Links and tables


def _link_open(
    self: RendererHTML, tokens: Sequence[Token], i: int, options: OptionsDict, env: Env
) -> str:
    env["open_links"] += 1
    tokens[i].attrSet("target", "_blank")
    tokens[i].attrSet("rel", "noopener noreferrer")
    return str(self.renderToken(tokens, i, options, env))


def _link_close(
    self: RendererHTML, tokens: Sequence[Token], i: int, options: OptionsDict, env: Env
) -> str:
    env["open_links"] -= 1
    return "</a>"


def _image(
    self: RendererHTML, tokens: Sequence[Token], i: int, options: OptionsDict, env: Env
) -> str:
    """A link to the image: the page loads nothing from elsewhere."""
    url = str(tokens[i].attrGet("src") or "")
    name = escape(self.renderInlineAsText(tokens[i].children or [], options, env) or url)
    if env["open_links"]:
        return name
    return f'<a class="image" href="{escape(url)}" {_NEW_TAB}>{name}</a>'


def _cell_open(
    self: RendererHTML, tokens: Sequence[Token], i: int, options: OptionsDict, env: Env
) -> str:
    """A cell whose alignment is a class: a policy against inline styles forbids the attribute."""
    style = str(tokens[i].attrs.pop("style", ""))
    if style:
        tokens[i].attrSet("class", style.removeprefix("text-align:"))
    return str(self.renderToken(tokens, i, options, env))


_RENDER_RULES = {
    "th_open": _cell_open,
    "td_open": _cell_open,
    "math_inline": _math_inline,
    "math_inline_double": _math_block,
    "math_block": _math_block,
    "math_block_label": _math_block,
    "fence": _fence,
    "code_block": _fence,
    "link_open": _link_open,
    "link_close": _link_close,
    "image": _image,
    "table_open": lambda *_: '<div class="table" tabindex="0"><table>\n',
    "table_close": lambda *_: "</table></div>\n",
}
