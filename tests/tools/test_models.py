"""`ggpy pull`, `ggpy list` and `ggpy rm`: models in the caches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from ggpy import hub
from ggpy.hub import hugging_face, registry

Tool = Callable[[str], ModuleType]
SMALL = hub.KNOWN[0]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a registry whose models have no content."""

    def fetch(target: Path, model: hub.KnownModel) -> None:
        with target.open("wb") as file:
            file.truncate(model.nbytes)  # takes no room on the disk

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(registry, "_fetch_into", fetch)
    monkeypatch.setattr(hugging_face, "_cached_models", lambda: [])
    return tmp_path / "ggpy" / "models"


def test_a_model_comes_and_goes(cache: Path, tool: Tool, capsys: pytest.CaptureFixture) -> None:
    def rows() -> list[list[str]]:
        assert tool("list").main([]) == 0
        return [line.split(maxsplit=3) for line in capsys.readouterr().out.splitlines()]

    assert rows()[0] == ["name", "size", "file"]
    assert rows()[1][:3] == [SMALL.name, "98", "MB"]
    assert rows()[1][3] == "not fetched (licence: Apache-2.0)"
    assert tool("pull").main([SMALL.name.upper()]) == 0
    assert capsys.readouterr().out == f"{cache / SMALL.file}\n"
    assert rows()[1][3] == str(cache / SMALL.file)
    assert tool("rm").main([SMALL.name]) == 0
    assert capsys.readouterr().out == f"removed {SMALL.name}: 98 MB\n"
    assert list(cache.iterdir()) == []
    assert tool("rm").main([SMALL.name]) == 2
    assert f"{SMALL.name} is not in {cache}: nothing to remove" in capsys.readouterr().err


def test_repositories_of_the_hub(
    cache: Path, tool: Tool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    path = Path("/hub/m-Q8_0.gguf")
    monkeypatch.setattr(hugging_face, "fetch", lambda spec: path / spec)
    assert tool("pull").main(["user/repo:Q8_0", "a/b"]) == 0
    assert capsys.readouterr().out == f"{path}/user/repo:Q8_0\n{path}/a/b\n"
    file = hugging_face.CachedFile("user/repo", path, 5_000_000)
    monkeypatch.setattr(hugging_face, "cached", lambda: [file])
    assert tool("list").main([]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split() == ["user/repo", "5", "MB", str(path)]
    monkeypatch.setattr(hugging_face, "remove", lambda repo: {"user/repo": 5_000_000}[repo])
    assert tool("rm").main(["user/repo"]) == 0
    assert capsys.readouterr().out == "removed user/repo: 5 MB\n"


@pytest.mark.parametrize(
    ("name", "words", "message"),
    [
        ("pull", ["nonsense"], "nonsense is neither a known model (smollm2, "),
        ("pull", ["x.gguf"], "x.gguf is neither a known model"),
        ("rm", ["x.gguf"], "x.gguf is not the name of a model: `ggpy list` shows the names"),
        ("rm", ["user/repo"], "the hub's cache has no .gguf file of user/repo"),
        ("rm", [], "the following arguments are required: NAME (see ggpy rm --help)"),
        ("list", ["x"], "unrecognized arguments: x (see ggpy list --help)"),
    ],
)
def test_what_is_refused(
    cache: Path,
    tool: Tool,
    capsys: pytest.CaptureFixture,
    name: str,
    words: list[str],
    message: str,
) -> None:
    try:
        status = tool(name).main(words)
    except SystemExit as end:
        status = end.code
    captured = capsys.readouterr()
    assert status == 2 and captured.out == "" and captured.err.count("\n") == 1
    assert captured.err.startswith(f"ggpy {name}: error: ") and message in captured.err


def test_a_file_in_the_current_folder_is_never_removed(
    cache: Path, tool: Tool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    mine = tmp_path / SMALL.name
    mine.touch()
    assert tool("rm").main([SMALL.name]) == 2
    assert mine.exists()
