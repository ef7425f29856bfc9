"""Markdown as HTML: what a reader sees, what no text can do, and how long the worst texts take."""

from __future__ import annotations

import time
from html.parser import HTMLParser

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ggpy.serve import render
from ggpy.serve.render import render_markdown

VOID = {"br", "hr", "input"}
ATTRIBUTES = {
    "a": {"href", "title", "target", "rel", "class"},
    "button": {"type", "class"},
    "div": {"class", "tabindex", "id"},
    "figure": {"class"},
    "input": {"class", "disabled", "checked", "type"},
    "pre": {"class", "tabindex"},
    "code": {"class"},
    "span": {"class"},
    "li": {"class"},
    "ol": {"start"},
    "ul": {"class"},
    "td": {"class"},
    "th": {"class"},
}
PLAIN = """
    p br hr em strong s h1 h2 h3 h4 h5 h6 blockquote table thead tbody tr figcaption
"""


class Checker(HTMLParser):
    """Fails for an element or an attribute that the renderer has no reason to write."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        known = ATTRIBUTES.get(tag, set())
        if tag in render.MATHML:
            known = known | render.MATHML_ATTRIBUTES
        assert tag in ATTRIBUTES or tag in render.MATHML or tag in PLAIN.split(), tag
        for name, value in attrs:
            assert name in known, f"{tag} {name}={value}"
            if name == "href":
                assert value is not None
                assert value.lower().startswith(("http://", "https://", "mailto:")), value
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in VOID
        self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def checked(text: str) -> str:
    """The HTML of a text, after a look at every element of it."""
    html = render_markdown(text)
    checker = Checker()
    checker.feed(html)
    checker.close()
    assert not checker.open
    return html


def shown(text: str) -> str:
    """What a reader reads."""
    checker = Checker()
    checker.feed(checked(text))
    return checker.text


def test_markdown_becomes_what_it_means() -> None:
    html = checked("# A\n\n*b* **c** ~~d~~ `e`\nf\n\n1. g\n   - h\n\n> i\n")
    for part in ("<h1>A</h1>", "<em>b</em>", "<strong>c</strong>", "<s>d</s>", "<code>e</code>"):
        assert part in html
    assert "<br />\nf" in html, "a line of a chat is a line"
    assert "<ol>" in html and "<ul>" in html and "<blockquote>" in html


def test_tables_can_scroll_and_tasks_have_boxes() -> None:
    html = checked("| a | b |\n|---|--:|\n| 1 | 2 |\n\n- [x] done\n- [ ] open\n")
    assert html.startswith('<div class="table" tabindex="0"><table>')
    assert '<td class="right">2</td>' in html and html.count('type="checkbox"') == 2
    assert html.count('checked="checked"') == 1


def test_code_is_highlighted_with_classes() -> None:
    html = checked('```python\ndef f():\n    return "<b>"\n```\n')
    assert '<span class="language">python</span>' in html
    assert '<span class="k">def</span>' in html
    assert "&lt;b&gt;" in html and "style=" not in html
    assert 'class="copy-code"' in html


@pytest.mark.parametrize("info", ["", "no-such-language", "python title=x.py", "C++"])
def test_code_of_any_language_keeps_its_text(info: str) -> None:
    code = "if (a < b && c) { x = '&amp;' }\n\n    y"
    assert shown(f"~~~{info}\n{code}\n~~~\n").rstrip("\n").endswith(code)


def test_the_language_is_a_label_and_no_markup() -> None:
    assert "&lt;img" in checked("```<img/src=x>\nx\n```\n")


@pytest.mark.parametrize(
    "text",
    ["```python\nx = 1", "a **bold", "| a |\n|--", "$$\nx", r"\[ x", "- a\n  - ", "[a](http://x"],
)
def test_an_unfinished_text_is_rendered(text: str) -> None:
    assert checked(text)


def test_an_open_fence_is_code_already() -> None:
    assert '<span class="mi">1</span>' in checked("Look:\n\n```python\nx = 1")


FRACTION = "<mfrac><mrow><mn>1</mn></mrow><mrow><mn>2</mn></mrow></mfrac>"


@pytest.mark.parametrize(
    ("text", "display"),
    [
        (r"half $\frac{1}{2}$.", False),
        (r"half \(\frac{1}{2}\).", False),
        (r"half $$\frac{1}{2}$$.", True),
        (r"half \[\frac{1}{2}\].", True),
        ("$$\n\\frac{1}{2}\n$$", True),
        ("\\[\n\\frac{1}{2}\n\\]", True),
        ("- item\n\n  \\[\n  \\frac{1}{2}\n  \\]", True),
        ("text\n\\[\n\\frac{1}{2}\n\\]\nmore", True),
        ("```math\n\\frac{1}{2}\n```", True),
    ],
)
def test_formulas_become_mathml(text: str, display: bool) -> None:
    html = checked(text)
    assert FRACTION in html
    assert f'display="{"block" if display else "inline"}"' in html


def test_a_formula_over_lines_is_no_heading() -> None:
    html = checked("\\[\nx\n=\n1\n\\]\n")
    assert "<h1>" not in html and "<mi>x</mi><mo>=</mo><mn>1</mn>" in html


def test_limits_stand_below_their_operator() -> None:
    assert '<munder><mo movablelimits="true">lim</mo>' in checked(r"$$\lim_{x \to 0} x$$")
    assert "<msub><mi>x</mi><mi>i</mi></msub>" in checked("$x_i$")


def test_prices_are_no_formulas() -> None:
    text = "It costs $5, or $10 for two; US$3 to US$4 there."
    assert shown(text).strip() == text


@pytest.mark.parametrize("latex", [r"\frac{", "{" * 60 + "}" * 60, r"\left(" * 300, "x" * 5000])
def test_a_formula_that_fails_is_shown_as_code(latex: str) -> None:
    assert (
        checked(f"$$\n{latex}\n$$")
        == f'<div class="math"><code class="formula">{latex}</code></div>'
    )


@pytest.mark.parametrize(
    "text",
    [
        "<script>alert(1)</script>",
        "<img src=x onerror=alert(1)>",
        "<div onclick=x>\n\ny</div>",
        "[a](javascript:alert(1))",
        "[a](JaVaScRiPt:alert(1))",
        "[a](java&#115;cript:alert(1))",
        "[a](&#x6A;avascript:alert(1))",
        "[a](  javascript:alert(1) )",
        "[a](vbscript:x) [b](data:text/html,x) [c](file:///etc/passwd)",
        "<javascript:alert(1)>",
        "![a](javascript:alert(1))",
        "[a]: javascript:alert(1)\n\n[a]",
        r"$\text{<script>alert(1)</script>}$",
        r"$\text{&lt;script&gt;}$",
        r"$\href{javascript:alert(1)}{x}$",
        r"$\style{position:fixed}{x}$",
        r'$\class{a" onload="x}{y}$',
        r'$\color{red" onclick="x}{y}$',
        "```html\n<script>alert(1)</script>\n```",
        '```"><script>\nx\n```',
        '[a](https://x "t\\" onclick=\\"x")',
        '![a" onerror="x](https://x)',
        "$$\nx\n$$ (<img src=x>)",
    ],
)
def test_no_text_becomes_markup_or_script(text: str) -> None:
    html = checked(text).lower()
    assert 'href="javascript' not in html
    assert "<script" not in html and "<img" not in html


def test_the_checker_sees_what_it_must() -> None:
    for bad in ("<script></script>", "<p onclick=x></p>", '<a href="javascript:x">', "<img>"):
        with pytest.raises(AssertionError):
            Checker().feed(bad)


def test_links_open_elsewhere_and_say_nothing_of_the_page() -> None:
    html = checked("[a](https://example.org/?a=1&b=2) and <mailto:a@example.org>")
    assert html.count('target="_blank" rel="noopener noreferrer"') == 2
    assert 'href="https://example.org/?a=1&amp;b=2"' in html


def test_images_are_links() -> None:
    html = checked("![A *cat*](https://example.org/cat.png)")
    assert 'href="https://example.org/cat.png"' in html and ">A cat</a>" in html
    inside = checked("[![b](https://example.org/b.png)](https://example.org)")
    assert inside.count("<a ") == 1, "no link in a link"


N = render.MAX_CHARACTERS
PATHOLOGICAL = {
    "quotes": ">" * N,
    "brackets": "[" * N,
    "links": "[a](" * (N // 4),
    "emphasis": "*a_ " * (N // 4),
    "backticks": "".join("`" * k + " " for k in range(1, 620)),
    "dollars": "$a " * (N // 3),
    "brackets of formulas": "\\[\n" * (N // 3),
    "parentheses of formulas": "\\(" * (N // 2),
    "lists": "".join("  " * i + "- a\n" for i in range(600)),
    "open fences": "```\n" * (N // 4),
    "one fence": "```python\n" + "x=1\n" * (N // 4 - 3),
    "long table": "|a|b|\n|-|-|\n" + "|1|2|\n" * (N // 6 - 3),
    "wide table": "|" + "a|" * (N // 4 - 2) + "\n|" + "-|" * (N // 4 - 2) + "\n",
    "references": "[a]: b\n" * (N // 7),
    "paragraphs": "a\n\n" * (N // 3),
    "formulas": " ".join(rf"$\frac{{a_{{{i}}}}}{{b}}$" for i in range(7500)),
    "deep formula": "$" + "a^{" * 800 + "}" * 800 + "$",
}


@pytest.mark.parametrize("name", PATHOLOGICAL)
def test_the_worst_texts_take_bounded_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render, "MAX_SECONDS", 0.3)
    start = time.process_time()
    assert render_markdown(PATHOLOGICAL[name])
    assert time.process_time() - start < 3, "ten times the bound, for a slow machine"


def test_a_text_that_takes_too_long_is_shown_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render, "MAX_SECONDS", 0.0)
    assert render_markdown("a *b* <c>") == '<pre class="plain">a *b* &lt;c&gt;</pre>\n'


def test_a_text_that_is_too_long_is_shown_as_it_is() -> None:
    html = render_markdown("*a*" + "b" * N)
    assert html.startswith('<pre class="plain">*a*bbb')


@settings(max_examples=150, deadline=None)
@given(st.text(alphabet="ab \n\\`*_[]()<>!#-|$:{}&^\"'/=1.", max_size=120))
def test_any_text_gives_clean_html(text: str) -> None:
    checked(text)
