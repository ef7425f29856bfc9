"""`ggpy make_synthetic`: the file holds what the benchmark measures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from ggpy import arch
from ggpy.backends.numpy.backend import Reference
from ggpy.evaluate.synthetic import Synthetic
from ggpy.gguf import File
from ggpy.tokenizer import Tokenizer


@pytest.mark.parametrize("spec", ["tiny:Q8_0", "tiny:Q4_K", "tiny:F16", "tiny:BF16", "tiny:IQ4_NL"])
def test_the_file_is_the_model(spec: str, program: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    assert program.main([spec, str(path)]) == 0
    with File(path) as file, Synthetic(spec) as model:
        assert file.metadata.items() >= model.metadata.items() - {
            ("llama.attention.layer_norm_rms_epsilon", 1e-5)  # a float32 in the file
        }
        assert [*file.tensors] == [*model.tensors]
        for name, tensor in model.tensors.items():
            found = file.tensors[name]
            assert (found.shape, found.format.name) == (tensor.shape, tensor.format.name)
            assert (found.data == tensor.data).all()
        arch.load(file, Reference(1), 64)


@pytest.mark.parametrize(
    ("shape", "key"),
    [
        ("Gemma-4-E2B", "gemma4.attention.sliding_window_pattern"),
        ("Qwen3.5-9B", "qwen35.rope.dimension_sections"),
    ],
)
def test_settings_may_be_lists(
    tool_settings: Callable[[str], dict[str, Any]], shape: str, key: str
) -> None:
    kind, value = tool_settings(shape)[key]
    assert kind in ("arr[i32]", "arr[bool]") and isinstance(value, list) and len(value) > 3


@pytest.fixture
def tool_settings(program: ModuleType) -> Callable[[str], dict[str, Any]]:
    """The metadata that a file of a shape would have."""

    def settings(shape: str) -> dict[str, Any]:
        with Synthetic(f"{shape}:Q4_0", empty=True) as model:
            found: dict[str, Any] = program.metadata(model)
            return found

    return settings


def test_its_tokens_are_bytes_and_numbers(program: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    program.main(["tiny:Q4_0", str(path)])
    tokenizer = Tokenizer.from_gguf(path)
    assert tokenizer.n_vocab == 512
    assert tokenizer.decode([300, 400]).split() == ["300", "400"]


def test_llama_cpp_opens_it(program: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp")
    from oracle import Oracle

    path = tmp_path / "x.gguf"
    program.main(["tiny:Q4_K", str(path)])
    assert len(Oracle(path).greedy([5, 6, 7], 3).ids) == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [(["huge:Q8_0", "x"], "unknown synthetic model"), (["tiny:Q8_0", "/nowhere/x"], "/nowhere")],
)
def test_bad_usage(words: list[str], message: str, refused: Callable[..., str]) -> None:
    assert message in refused(*words)


def test_a_file_is_overwritten_only_when_told(
    program: ModuleType, refused: Callable[..., str], tmp_path: Path
) -> None:
    path = tmp_path / "x.gguf"
    path.write_text("mine")
    said = refused("tiny:Q8_0", path)
    assert said.endswith(f"error: {path}: exists already: --force overwrites it")
    assert path.read_text() == "mine"
    assert program.main(["tiny:Q8_0", str(path), "--force"]) == 0
    assert path.read_bytes()[:4] == b"GGUF"


def test_a_disk_that_is_too_small_leaves_nothing(
    refused: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=10_000))
    said = refused("tiny:Q8_0", tmp_path / "x")
    assert "MB, 0.01 MB are free there" in said
    assert not list(tmp_path.iterdir())
