"""Draws docs/img/serve-page.png: `PYTHONPATH=.:tests python tests/support/serve/screenshot.py`."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from support.serve.browser import CTRL, Browser
from support.serve.page_server import PageServer

PICTURE = Path(__file__).resolve().parents[3] / "docs" / "img" / "serve-page.png"
QUESTION = "How do I fit a line through noisy points?"
REASONING = (
    "They want least squares. Show the formula, then a few lines of numpy, and when it fails."
)
ANSWER = r"""**Least squares** takes the line whose squared distances to the points add up to least:

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


def main(path: Path) -> None:
    """Writes the picture: a conversation whose answer is scripted."""
    thoughts = [{"reasoning_content": piece} for piece in pieces(REASONING)]
    server = PageServer({QUESTION: [*thoughts, *pieces(ANSWER)]}, seconds=0.012)
    server.model = "example-8B-Q4_K_M"
    with tempfile.TemporaryDirectory() as profile:
        browser = Browser(Path(profile))
        tab = browser.open(server.url, browser.context(), 1180, 880)
        tab.prefer("light")
        tab.wait("document.querySelector('#about').textContent.includes('ready')")
        for question in (*OTHERS, QUESTION):
            tab.press("k", CTRL)
            tab.wait("!document.querySelector('#welcome').hidden")
            tab.type(question)
            tab.press("Enter")
            tab.wait("document.querySelector('.reply[aria-busy=false] > .prose > *')")
        tab.wait("document.querySelector('.reply table') && !document.querySelector('.dot')")
        tab.evaluate("document.querySelector('#scroll').scrollTop = 0")
        tab.evaluate("new Promise((resolve) => setTimeout(resolve, 200))")
        tab.screenshot(path)
        browser.close()
    server.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURE)
