"""The examples in the docstrings of public names, run as a reader would run them."""

from __future__ import annotations

import doctest
from pathlib import Path
from types import ModuleType

import pytest

import ggpy

ROOT = Path(__file__).resolve().parent.parent
MODULES = [n for n in ggpy.__all__ if isinstance(getattr(ggpy, n), ModuleType)]
WITHOUT = {"ContextOverflow", "GGUFError", "TokenLogprob", "__version__", *MODULES}
EXAMPLES = {
    test.name: test
    for name in ["", *(n for n in ggpy.__all__ if n not in WITHOUT)]
    for test in doctest.DocTestFinder(recurse=bool(name)).find(
        getattr(ggpy, name) if name else ggpy, f"ggpy.{name}".rstrip(".")
    )
    if test.examples
}


def test_public_names_have_examples() -> None:
    names = {f"ggpy.{name}" for name in ggpy.__all__ if name not in WITHOUT}
    methods = {f"ggpy.Model.{name}" for name in ("generate", "chat", "logits", "embed")}
    assert EXAMPLES.keys() >= {"ggpy", *names, *methods}


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # where models/tiny is
    said: list[str] = []
    found = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(EXAMPLES[name], out=said.append)
    assert found.attempted and not found.failed, "".join(said)
