"""The shape of the project: who imports whom, what stands where, and that the README says so."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest

from ggpy.util import paths

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "ggpy"
MODULES = sorted(PACKAGE.rglob("*.py"))

# Imports go down only: to the own folder, or to something earlier in this list.
FLOORS = (
    *("util", "formats", "cache_types"),
    *("gguf", "tokenizer", "hub"),
    *("sampling", "device"),
    "kernels",
    "backends",
    "arch",
    "runtime",
    "model",
    *("quantization", "evaluate"),
    *("convert", "bench"),
    *("cli", "run", "__main__"),
    "__init__",
)
# Packages from elsewhere and who may import them; numpy is everybody's.
OUTSIDE = {
    "cuda": {"device"},
    "gguf": {"formats", "convert"},
    "huggingface_hub": {"hub"},
    "jinja2": {"tokenizer"},
    "matplotlib": {"bench"},
    "numpy": set(FLOORS),
    "nvmath": {"device"},
    "sentencepiece": {"tokenizer", "convert"},
    "tokenizers": {"tokenizer", "convert"},
}


def floor_of(path: Path) -> str:
    """The name in FLOORS under which a module stands."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(path: Path) -> Iterator[str]:
    """Dotted names of all modules that a file imports, wherever in it; relative ones made whole."""
    package = ("ggpy", *path.relative_to(PACKAGE).parts[:-1])
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            name = ".".join([*base, *([node.module] if node.module else [])])
            yield from (
                (f"{name}.{alias.name}" for alias in node.names) if name == "ggpy" else [name]
            )


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_down(path: Path) -> None:
    here = floor_of(path)
    for name in imported(path):
        top, _, rest = name.partition(".")
        if top == "ggpy":
            there = rest.split(".")[0]
            assert there == here or FLOORS.index(there) < FLOORS.index(here), f"imports {name}"
        elif top not in sys.stdlib_module_names:
            assert here in OUTSIDE.get(top, ()), f"{here} may not import {name}"


def test_the_check_of_imports_sees_what_it_must() -> None:
    assert "ggpy.gguf" in set(imported(PACKAGE / "cli" / "run.py"))
    assert "ggpy.formats" in set(imported(PACKAGE / "gguf" / "file.py"))
    assert "huggingface_hub" in set(imported(PACKAGE / "hub.py"))
    assert "ggpy.gguf" in set(imported(PACKAGE / "backends" / "interface.py"))


def test_the_folder_cuda_has_no_python() -> None:
    """A module there would hide cuda-python's namespace package."""
    assert not list((ROOT / "cuda").rglob("*.py"))


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_modules_open_with_a_paragraph_and_stay_short(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert ast.get_docstring(ast.parse(text)), "it says nothing about itself"
    assert len(text.splitlines()) <= 400


def test_functions_stay_short() -> None:
    lengths = {}
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno is not None
                lengths[f"{path.stem}.{node.name}"] = node.end_lineno - node.lineno + 1
    assert median(lengths.values()) < 10
    long = {name: n for name, n in lengths.items() if n > 40}
    assert len(long) <= len(lengths) // 50, f"longer than 40 lines: {long}"


# The README's tree


def annotated_tree() -> dict[str, set[str]]:
    """Folder -> names in it, of the README's tree; a folder whose content is not shown is absent.

    A line is names, two spaces or more, and what they are; names are separated by one space. What
    is in a folder is indented below it.
    """
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    block = re.search(r"^```text tree\n(.*?)^```", text, re.S | re.M)
    assert block, "README.md has no block ```text tree"
    tree: dict[str, set[str]] = {}
    above: list[tuple[int, str]] = [(-1, "")]
    for line in block.group(1).splitlines():
        indent = len(line) - len(line.lstrip())
        names = re.split(r" {2,}", line.strip())[0].split(" ")
        while above[-1][0] >= indent:
            above.pop()
        folder = above[-1][1]
        for name in names:
            tree.setdefault(folder, set()).add(name)
        if names[0].endswith("/"):
            above.append((indent, folder + names[0]))
    return tree


def real_names(folder: Path) -> set[str]:
    """What stands in a folder of the project, without what tools leave there."""
    left = {"__pycache__", "build", "dist", ".git", ".venv"}
    shown = {".ci", ".clang-format", ".gitignore", ".pre-commit-config.yaml"}
    names = set()
    for path in folder.iterdir():
        hidden = path.name.startswith(".") and path.name not in shown
        empty = path.is_dir() and not any(path.iterdir())  # git would not have it
        if not (hidden or empty or path.name in left or path.name.endswith(".egg-info")):
            names.add(path.name + ("/" if path.is_dir() else ""))
    return names


def test_the_readme_shows_the_real_tree() -> None:
    tree = annotated_tree()
    assert {"", "ggpy/", "cuda/"} <= tree.keys()
    for folder, names in tree.items():
        assert names == real_names(ROOT / folder), f"in {folder or 'the root'}"


def test_the_readme_has_one_command_for_tests_and_one_to_run() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len([line for line in lines if line.startswith("pip install '.[test]' && ")]) == 1
    assert any(line.startswith("pip install . && python -m ggpy.run -p ") for line in lines)


# Where things are, and what importing costs


@pytest.mark.parametrize("name", ["cuda", "models", "tools"])
def test_folders_are_found_in_a_checkout_and_in_a_wheel(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert paths.data_dir(name) == ROOT / name
    (tmp_path / "ggpy" / name).mkdir(parents=True)
    monkeypatch.setattr(paths, "_PACKAGE", tmp_path / "ggpy")
    assert paths.data_dir(name) == tmp_path / "ggpy" / name
    assert f'{name} = "ggpy/{name}"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def test_a_folder_that_was_not_installed_is_named(tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(paths, "_PACKAGE", tmp_path / "ggpy")
    with pytest.raises(FileNotFoundError, match="no folder 'models'"):
        paths.data_dir("models")


def test_the_cache_follows_xdg(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert paths.cache_dir("models") == Path("/somewhere/ggpy/models")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert paths.cache_dir("models") == Path.home() / ".cache/ggpy/models"


def test_importing_and_help_are_cheap() -> None:
    """`import ggpy` and --help load nothing that costs: no numpy, no tokenizer, no cuda."""
    code = (
        "import sys, ggpy, ggpy.run, ggpy.__main__\n"
        "try: ggpy.run.main(['--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted(set(sys.modules) & {'numpy', 'jinja2', 'tokenizers', 'cuda.core'}))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert result.stdout.splitlines()[-1] == "[]"
