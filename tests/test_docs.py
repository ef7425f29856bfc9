"""The documents: links, commands, lengths, the diagram of imports, the order of the log."""

from __future__ import annotations

import re
import runpy
import shlex
import subprocess
import sys
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest

from ggpy.__main__ import programs
from ggpy.arch import architectures
from ggpy.runtime.stats import EngineStats
from ggpy.serve.metrics import Metrics

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*.md")])
LONGEST = {"README.md": 200, "docs/schedules.md": 150}  # lines
LINK = re.compile(r"\]\(([^)\s]+)\)")


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def commands(text: str) -> list[list[str]]:
    """The words of each command `ggpy ...` in blocks of shell."""
    blocks = re.findall(r"^```sh\n(.*?)^```", text, re.S | re.M)
    lines = [line for block in blocks for line in block.splitlines()]
    return [shlex.split(line, comments=True) for line in lines if line.startswith("ggpy ")]


@cache
def help_of(program: str) -> str:
    """What `ggpy PROGRAM --help` prints."""
    command = [sys.executable, "-m", "ggpy", program, "--help"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files(path: Path) -> None:
    targets = [to for to in LINK.findall(text_of(path)) if not to.startswith("http")]
    missing = [to for to in targets if not (path.parent / to.partition("#")[0]).exists()]
    assert not missing


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_are_understood(path: Path) -> None:
    """Each program exists and has the options that it is shown with."""
    for _, program, *words in commands(text_of(path)):
        if program == "--help":
            continue
        assert program in programs()
        for word in words:
            if re.match(r"--?[a-z]", word):
                assert re.search(rf"(?<![\w-]){word}(?![\w-])", help_of(program)), (program, word)


def test_the_check_of_commands_sees_what_it_must() -> None:
    found = commands(
        "```sh\nggpy run m.gguf -p 'a # b'  # a comment\n```\n```python\nggpy x\n```\n"
    )
    assert found == [["ggpy", "run", "m.gguf", "-p", "a # b"]]
    assert len(commands(text_of(ROOT / "README.md"))) >= 8


@pytest.mark.parametrize("name", LONGEST)
def test_pages_stay_short(name: str) -> None:
    assert len(text_of(ROOT / name).splitlines()) <= LONGEST[name]


def test_serving_has_every_path_and_every_metric() -> None:
    page = text_of(ROOT / "docs" / "serving.md")
    sources = "".join(text_of(ROOT / "ggpy" / "serve" / f"{n}.py") for n in ("app", "routes"))
    paths = re.findall(r'^ +"(/[^"{]+)": (?:self|server)\.', sources, re.M)
    assert len(paths) > 20
    assert [path for path in paths if f"{path}`" not in page] == []
    lines = Metrics().text(EngineStats(*[0] * len(fields(EngineStats)))).splitlines()
    names = [line.split()[2] for line in lines if line.startswith("# TYPE ")]
    assert len(names) > 20
    assert [name for name in names if not re.search(f"`{name}[`{{]", page)] == []


@pytest.mark.parametrize("name", ["README.md", "docs/models.md", "docs/package.md"])
def test_pages_name_all_architectures(name: str) -> None:
    text = text_of(ROOT / name)
    rows = re.findall(r"^\| (?:Models \| (.*?)|(`[^|]*)) \|", text, re.M)
    words = set(re.findall(r"[\w-]+", " ".join(map("".join, rows))))
    assert not architectures().keys() - words


def test_the_page_of_models_has_all_tiny_ones() -> None:
    shown = re.findall(r"^\| `([^`]+\.gguf)` \|", text_of(ROOT / "models" / "README.md"), re.M)
    assert sorted(shown) == sorted(path.name for path in ROOT.glob("models/tiny/*.gguf"))


def test_the_page_of_the_package_has_no_relative_links() -> None:
    """Nobody can follow them on an index page."""
    page = re.search(r'^readme = "([^"]+)"', text_of(ROOT / "pyproject.toml"), re.M)
    assert page
    links = LINK.findall(text_of(ROOT / page[1]))
    assert links and all(to.startswith("https://") for to in links)


def test_the_diagram_shows_the_imports() -> None:
    """`python docs/pictures.py` writes it."""
    pictures = runpy.run_path(str(ROOT / "docs" / "pictures.py"))
    shown = pictures["BLOCK"].search(text_of(ROOT / "docs" / "design.md"))
    assert shown and shown[0] == pictures["diagram"]()


def test_arrows_that_others_imply_are_left_out() -> None:
    pictures = runpy.run_path(str(ROOT / "docs" / "pictures.py"))
    edges = {("c", "b"), ("b", "a"), ("c", "a"), ("d", "a")}
    assert pictures["without_implied"](edges) == [("b", "a"), ("c", "b"), ("d", "a")]
    assert ("backends", "kernels") in pictures["imports"]()


def test_the_log_has_its_newest_entry_first() -> None:
    text = text_of(ROOT / "LOG.md")
    dates = re.findall(r"^## (.+)$", text, re.M)
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d", date) for date in dates)
    assert dates == sorted(dates, reverse=True)
    entries = re.findall(r"^### (.+)\n\n(.)", text, re.M)
    assert len(entries) > 50
    assert not [title for title, first in entries if first != "*"], "no line of GPU and verdict"
