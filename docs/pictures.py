"""Writes the pictures of the documents: speeds from benchmarks/, and who imports whom.

    python docs/pictures.py

docs/img/*.svg are what `ggpy bench --plot` draws of benchmarks/h200-*.json (it needs matplotlib).
The diagram in docs/design.md is made of the imports in ggpy/: an arrow from a folder
to each folder that it imports, without the arrows that others imply. tests/test_docs.py fails when
the diagram is not that of the sources.
"""

from __future__ import annotations

import ast
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "ggpy"
DESIGN = ROOT / "docs" / "design.md"
BLOCK = re.compile(r"(?<=<!-- imports -->\n)```mermaid\n.*?^```\n", re.S | re.M)

Edge = tuple[str, str]


def imports() -> set[Edge]:
    """(importer, imported) of all folders and modules directly in ggpy/, but for `__init__` and
    `__main__`.
    """
    return {
        (importer, imported)
        for path in PACKAGE.rglob("*.py")
        for importer in [path.relative_to(PACKAGE).parts[0].removesuffix(".py")]
        for imported in _imported(path)
        if imported != importer and not importer.startswith("__")
    }


def _imported(path: Path) -> Iterator[str]:
    """The names directly in ggpy/ that a module imports, wherever in it."""
    package = ("ggpy", *path.relative_to(PACKAGE).parts[:-1])
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            names = [f"{module}.{alias.name}" for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "ggpy" and len(parts) > 1 and _is_module(parts[1]):
                yield parts[1]


def _is_module(name: str) -> bool:
    return (PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").is_file()


def without_implied(edges: set[Edge]) -> list[Edge]:
    """The edges that no longer path implies, in order: the transitive reduction."""

    def reached(start: str, skipped: Edge) -> set[str]:
        seen: set[str] = set()
        waiting = [end for edge in edges for end in [edge[1]] if edge[0] == start]
        waiting = [end for end in waiting if (start, end) != skipped]
        while waiting:
            name = waiting.pop()
            if name not in seen:
                seen.add(name)
                waiting += [end for begin, end in edges if begin == name]
        return seen

    return sorted(edge for edge in edges if edge[1] not in reached(edge[0], edge))


def diagram() -> str:
    """The Mermaid block of docs/design.md."""
    lines = [f"    {importer} --> {imported}" for importer, imported in without_implied(imports())]
    return "\n".join(["```mermaid", "flowchart TD", *lines, "```"]) + "\n"


def write_diagram() -> None:
    """Put the diagram of today's imports into docs/design.md."""
    text = DESIGN.read_text(encoding="utf-8")
    if not BLOCK.search(text):
        raise ValueError(f"{DESIGN} has no Mermaid block below <!-- imports -->")
    DESIGN.write_text(BLOCK.sub(lambda _: diagram(), text), encoding="utf-8")


def draw_speeds() -> None:
    """docs/img/*.svg; the same bytes each time."""
    sys.path.insert(0, str(ROOT))
    os.environ["SOURCE_DATE_EPOCH"] = "0"
    from ggpy.bench import plot

    pictures = {name: str(ROOT / "docs" / "img" / f"{name}.svg") for name in ("models", "batch")}
    plot.require(pictures["models"])
    from matplotlib import rcParams

    rcParams["svg.fonttype"], rcParams["svg.hashsalt"] = "none", "ggpy"
    for name, prompts in (("models", (0, 512)), ("batch", (0,))):
        found = json.loads((ROOT / "benchmarks" / f"h200-{name}.json").read_text(encoding="utf-8"))
        rows = [row for row in found if row["n_prompt"] in prompts]
        plot.draw(rows, pictures[name])


if __name__ == "__main__":
    write_diagram()
    draw_speeds()
