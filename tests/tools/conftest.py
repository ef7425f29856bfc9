"""The programs of tools/ as modules."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from types import ModuleType

import pytest

from ggpy.util import paths


@pytest.fixture(scope="session")
def tool() -> Callable[[str], ModuleType]:
    """A program by its name, loaded anew at each call."""

    def load(name: str) -> ModuleType:
        path = paths.data_dir("tools") / f"{name}.py"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture(scope="module")
def program(tool: Callable[[str], ModuleType], request: pytest.FixtureRequest) -> ModuleType:
    """The program that a file of tests is named after."""
    return tool(request.path.stem.removeprefix("test_"))


@pytest.fixture
def refused(program: ModuleType, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What the program says when it exits with 2: the last line; nothing is on stdout."""

    def line(*words: object) -> str:
        try:
            status = program.main(list(map(str, words)))
        except SystemExit as end:  # of the parser
            status = end.code
        assert status == 2
        captured = capsys.readouterr()
        last = captured.err.splitlines()[-1]
        assert captured.out == "" and last.startswith(f"ggpy {program.__name__}: error: ")
        return last

    return line
