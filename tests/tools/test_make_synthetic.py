"""`ggpy make_synthetic`: the file holds what the benchmark measures."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from ggpy import arch, paths
from ggpy.gguf import File
from ggpy.ops.reference import Reference
from ggpy.synthetic import Synthetic
from ggpy.tokenizer import Tokenizer

PROGRAM = paths.data_dir("tools") / "make_synthetic.py"


@pytest.fixture(scope="module")
def program() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_synthetic", PROGRAM)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
def test_bad_usage(
    words: list[str], message: str, program: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert program.main(words) == 2
    assert message in capsys.readouterr().err


def test_a_disk_that_is_too_small_is_named(
    program: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(OSError, match=r"needs 1000000000\.0 GB"):
        program.check_room(tmp_path / "x", 10**18)
