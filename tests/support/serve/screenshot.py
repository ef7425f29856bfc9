"""Draws docs/img/serve-page.png: `PYTHONPATH=.:tests python tests/support/serve/screenshot.py`."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from support.serve.browser import Browser
from support.serve.page_server import PageServer

DOCS = Path(__file__).resolve().parents[3] / "docs" / "img"
QUESTION = "How do I fit a line through noisy points?"
REASONING = "They want least squares. Show the formula, then a few lines of numpy, and when it fails."
ANSWER = r"""**Least squares** takes the line whose squared vertical distances to the points are smallest:

\[
\min_{a,\,b} \sum_{i=1}^{n} \left( y_i - a x_i - b \right)^2,
\qquad
\hat a = \frac{\sum_i (x_i - \bar x)(y_i - \bar y)}{\sum_i (x_i - \bar x)^2},
\qquad
\hat b = \bar y - \hat a \bar x
\]

In numpy:

```python
import numpy as np

rng = np.random.default_rng(0)
x = np.linspace(0, 10, 50)
y = 1.5 * x + 4 + rng.normal(scale=2.0, size=x.size)

a, b = np.polyfit(x, y, deg=1)  # the slope, the intercept
print(f"y = {a:.2f} x + {b:.2f}")
```

| When | Then |
|---|---|
| a few points are far off | minimise $\lvert r_i \rvert$ instead, or use RANSAC |
| `x` is noisy as well | total least squares, from the SVD |
"""
OTHERS = (
    "Compare TCP and UDP in a table",
    "Plan a weekend in Lisbon with two children",
    "Why does my test pass alone and fail in the suite?",
)


def pieces(text: str, size: int = 12) -> list[str]:
    """A text in pieces, as a model sends it."""
    return [text[i : i + size] for i in range(0, len(text), size)]


def main(folder: Path) -> None:
    """Writes the picture in light and dark, and narrow ones."""
    thoughts = [{"reasoning_content": piece} for piece in pieces(REASONING)]
    server = PageServer({QUESTION: [*thoughts, *pieces(ANSWER)]}, seconds=0.012)
    with tempfile.TemporaryDirectory() as profile:
        browser = Browser(Path(profile))
        tab = browser.open(server.url, browser.context(), 1180, 880)
        tab.prefer("light")
        tab.wait("document.querySelector('#about').textContent.includes('ready')")
        tab.screenshot(folder / "welcome.png")
        for question in (*OTHERS, QUESTION):
            tab.press("k", 2)
            tab.wait("document.querySelectorAll('.message').length === 0")
            tab.type(question)
            tab.press("Enter")
            tab.wait("document.querySelector('.reply[aria-busy=false] .stats')")
        tab.wait("document.querySelector('.reply math') && document.querySelector('.reply table')")
        tab.evaluate("new Promise((r) => setTimeout(r, 700))")
        tab.screenshot(folder / "light.png")
        tab.evaluate("document.querySelector('#scroll').scrollTop = 0")
        tab.evaluate("new Promise((r) => setTimeout(r, 100))")
        tab.screenshot(folder / "serve-page.png")
        tab.prefer("dark")
        tab.evaluate("new Promise((r) => setTimeout(r, 300))")
        tab.screenshot(folder / "dark.png")
        tab.resize(360, 740)
        tab.evaluate("new Promise((r) => setTimeout(r, 300))")
        tab.screenshot(folder / "narrow.png")
        tab.click("#open-sidebar")
        tab.evaluate("new Promise((r) => setTimeout(r, 400))")
        tab.screenshot(folder / "drawer.png")
        tab.resize(1180, 860)
        tab.prefer("light")
        tab.click("#open-settings")
        tab.evaluate("new Promise((r) => setTimeout(r, 300))")
        tab.screenshot(folder / "settings.png")
        print(tab.complaints, [u for u in tab.requests if not u.startswith(server.url)])
        browser.close()
    server.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else DOCS)
