"""The shape of the project: who imports whom, what is where, and that the README says so."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from statistics import median

import pytest

from ggpy.util import paths

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "ggpy"
MODULES = sorted(PACKAGE.rglob("*.py"))

# A module imports its own folder, or lower floors.
FLOORS = (
    {"util", "formats"},
    {"gguf", "hub", "cache_types", "sampling"},
    {"generate_options"},
    {"tokenizer", "device"},
    {"kernels", "grammar"},
    {"backends", "chat_formats"},
    {"arch"},
    {"runtime"},
    {"model", "quantization"},
    {"evaluate", "convert"},
    {"bench"},
    {"serve"},
    {"cli"},
    {"run", "__main__", "__init__"},
)
FLOOR = {name: number for number, names in enumerate(FLOORS) for name in names}
MAX_FILES = 15  # in a folder
# Folders of one file per format or per architecture.
ONE_FILE_PER = {"ggpy/formats", "ggpy/arch", "cuda/formats", "cuda/quantize"}
# Packages from elsewhere and who may import them.
OUTSIDE = {
    "cuda": {"device"},
    "gguf": {"formats", "convert"},
    "huggingface_hub": {"hub"},
    "jinja2": {"tokenizer"},
    "latex2mathml": {"serve"},
    "llguidance": {"grammar"},
    "llvmlite": {"backends"},
    "markdown_it": {"serve"},
    "matplotlib": {"bench"},
    "mdit_py_plugins": {"serve"},
    "numba": {"backends"},
    "numpy": set(FLOOR),
    "prompt_toolkit": {"cli"},
    "nvmath": {"device"},
    "pygments": {"serve"},
    "sentencepiece": {"tokenizer", "convert"},
    "starlette": {"serve"},
    "tokenizers": {"tokenizer", "convert"},
    "uvicorn": {"serve"},
}


def folder_of(path: Path) -> str:
    """The folder or module of the package to which a file belongs: a name in FLOORS."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@cache
def syntax(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imported(path: Path, nodes: Iterator[ast.AST] | None = None) -> Iterator[str]:
    """Dotted names of all that a file imports, wherever in it or in `nodes`; relative ones made
    whole, with the name after `from . import`.
    """
    package = ("ggpy", *path.relative_to(PACKAGE).parts[:-1])
    for node in nodes or ast.walk(syntax(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            name = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{name}.{alias.name}" for alias in node.names)


def heads(path: Path) -> set[str]:
    """The first part of each import, two parts if it is ggpy's."""
    parts = [name.split(".") for name in imported(path)]
    return {".".join(p[: 2 if p[0] == "ggpy" else 1]) for p in parts}


def test_every_folder_has_its_floor() -> None:
    assert {folder_of(path) for path in MODULES} == FLOOR.keys()


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_down(path: Path) -> None:
    here = folder_of(path)
    for name in heads(path):
        top, _, there = name.partition(".")
        if top == "ggpy":
            assert there == here or FLOOR[there] < FLOOR[here], f"imports {name}"
        elif top not in sys.stdlib_module_names:
            assert here in OUTSIDE.get(top, ()), f"{here} may not import {name}"


def at_module_level(tree: ast.Module) -> Iterator[ast.AST]:
    """Statements that run when a module is imported; not those of functions, or for types alone."""
    todo: list[ast.AST] = list(tree.body)
    while todo:
        node = todo.pop()
        yield node
        for_types = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if not for_types and not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            todo += ast.iter_child_nodes(node)


def dotted(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def import_graph(files: list[Path]) -> dict[str, set[str]]:
    """Module -> modules that it imports when it is imported itself."""
    names = {dotted(path) for path in files}
    graph = {}
    for path in files:
        found = set(imported(path, at_module_level(syntax(path))))
        whole = {name if name in names else name.rpartition(".")[0] for name in found}
        graph[dotted(path)] = whole & names - {dotted(path)}
    return graph


def test_no_module_imports_itself_in_a_circle() -> None:
    try:
        TopologicalSorter(import_graph(MODULES)).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_backends_do_not_import_each_other() -> None:
    for here, there in (("cuda", "numpy"), ("numpy", "cuda")):
        for path in (PACKAGE / "backends" / here).rglob("*.py"):
            names = {name for name in imported(path) if f"ggpy.backends.{there}" in name}
            assert not names, f"{path.relative_to(ROOT)} imports {names}"


def test_argparse_is_read_by_the_command_line_alone() -> None:
    readers = [path for path in MODULES if "argparse" in heads(path)]
    assert {folder_of(path) for path in readers} == {"cli"}


def test_no_class_name_is_used_twice() -> None:
    where = defaultdict(list)
    for path in MODULES:
        for node in ast.walk(syntax(path)):
            if isinstance(node, ast.ClassDef):
                where[node.name].append(str(path.relative_to(PACKAGE)))
    assert not {name: found for name, found in where.items() if len(found) > 1}


def test_folders_hold_few_files() -> None:
    counts: dict[str, int] = defaultdict(int)
    for top in ("ggpy", "cuda", "tests"):
        for path in (ROOT / top).rglob("*"):
            if path.is_file() and path.suffix != ".pyc":
                counts[str(path.parent.relative_to(ROOT))] += 1
    assert counts.keys() >= ONE_FILE_PER
    assert not {n: k for n, k in counts.items() if k > MAX_FILES and n not in ONE_FILE_PER}


def test_the_checks_of_imports_see_what_they_must() -> None:
    assert {"argparse", "ggpy.gguf", "ggpy.hub"} <= heads(PACKAGE / "cli" / "run.py")
    assert "ggpy.formats" in heads(PACKAGE / "gguf" / "file.py")
    assert "huggingface_hub" in heads(PACKAGE / "hub" / "hugging_face.py")
    assert "ggpy.gguf" in heads(PACKAGE / "backends" / "interface.py")
    graph = import_graph(MODULES)
    assert "ggpy.gguf.header" in graph["ggpy.gguf.file"]
    assert "ggpy.sampling.links" in graph["ggpy.sampling.sampler"]
    assert "ggpy.gguf" not in graph["ggpy.cli.run"], "a function imports it"


def test_the_folder_cuda_has_no_python() -> None:
    """A module there would hide cuda-python's namespace package."""
    assert not list((ROOT / "cuda").rglob("*.py"))


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_modules_open_with_a_paragraph_and_stay_short(path: Path) -> None:
    assert ast.get_docstring(syntax(path)), "it says nothing about itself"
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 400


def test_functions_stay_short() -> None:
    lengths = {}
    for path in MODULES:
        for node in ast.walk(syntax(path)):
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


def test_the_readme_lists_folders_below_those_that_they_import() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    tree = text.partition("```text tree\nggpy/")[2].partition("\ncuda/")[0]
    names = [name for line in tree.splitlines()[1:] for name in re.findall(r"^  ([\w]+)", line)]
    places = {name: place for place, name in enumerate(names)}
    assert {"util", "sampling", "cli"} <= places.keys()
    for path in MODULES:
        for head in heads(path):
            above = places.get(head.removeprefix("ggpy."), -1) if head.startswith("ggpy.") else -1
            assert above <= places.get(folder_of(path), len(places)), (path, head)


def test_the_readme_has_one_command_for_tests_and_one_to_run() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len([line for line in lines if line.startswith("pip install '.[test]' && ")]) == 1
    assert any(line.startswith("pip install '.[cpu]' && python -m ggpy.run -p ") for line in lines)


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
        "print(sorted(set(sys.modules) & {'numpy', 'jinja2', 'tokenizers', 'numba', 'cuda.core'}))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert result.stdout.splitlines()[-1] == "[]"
