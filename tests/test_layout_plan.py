"""Which kernel runs is decided in one place: only `backends/cuda/plan` asks for an architecture.

Others may pass an architecture on. They may not compare it, name one, or call a function that tells
architectures apart. Kernels' wrappers say what they need of a GPU; a device knows what it is.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "ggpy"
CUDA = PACKAGE / "backends" / "cuda"
PLAN = [CUDA / "plan.py", *(CUDA / "plan").glob("*.py")]
LAUNCHERS = sorted({*CUDA.rglob("*.py")} - {*PLAN})


def syntax(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def deciders() -> set[str]:
    """Functions of kernels and devices that take an architecture and return a bool or an int."""
    found = set()
    for path in (*(PACKAGE / "kernels").rglob("*.py"), *(PACKAGE / "device").rglob("*.py")):
        for node in ast.walk(syntax(path)):
            if isinstance(node, ast.FunctionDef) and node.returns is not None:
                names = {argument.arg for argument in node.args.args}
                answers = ast.unparse(node.returns) in ("bool", "int")
                if answers and names & {"arch", "architecture"} and "self" not in names:
                    found.add(node.name)
    return found


def questions(tree: ast.AST, functions: set[str]) -> Iterator[str]:
    """Source text of everything that tells architectures apart, but for docstrings."""
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        named = isinstance(node, (ast.Name, ast.Attribute, ast.alias)) and (
            re.split(r"\W", ast.unparse(node))[-1] in functions
        )
        compared = isinstance(node, ast.Compare) and re.search(r"\barch\b", ast.unparse(node))
        spelled = (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and re.search(r"\bsm_\d\d", node.value)
            and id(node) not in docstrings
        )
        if named or compared or spelled:
            yield ast.unparse(node)


def test_deciders_are_found() -> None:
    assert {"capability", "has_wgmma", "has_clusters"} <= deciders()


@pytest.mark.parametrize(
    "text",
    ["x = device.arch == 'a'", "has_wgmma(a)", "from .hopper import has_wgmma", "f('sm_90a')"],
)
def test_questions_are_seen(text: str) -> None:
    assert list(questions(ast.parse(text), {"has_wgmma"}))


def test_the_plan_asks_for_the_architecture() -> None:
    plans = [path for path in PLAN if path.exists()]
    assert any(list(questions(syntax(path), deciders())) for path in plans)


@pytest.mark.parametrize("path", LAUNCHERS, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_nobody_else_does(path: Path) -> None:
    assert not list(questions(syntax(path), deciders()))
