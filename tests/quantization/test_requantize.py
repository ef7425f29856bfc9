"""A file in another type: whole files equal to llama-quantize's, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from quantize_cases import (
    SHARED_MIXES,
    WEIGHTS,
    Case,
    digest_of_file,
    importance_of,
    write_case,
)

from ggpy.formats import by_name
from ggpy.gguf import File, GGUFError
from ggpy.gguf.writer import Slot, Writer
from ggpy.quantization.importance import write_gguf
from ggpy.quantization.requantize import mix_for, override, part_name, plan, write, write_parts
from ggpy.quantization.workers import Workers

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "quantize.json").read_text())


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    with Workers() as found:
        yield found


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """The model with weights."""
    return write_case(WEIGHTS, tmp_path_factory.mktemp("case") / "weights.gguf")


@pytest.fixture
def quantize(tmp_path: Path, workers: Workers) -> Callable[..., Path]:
    """What llama-quantize writes with and without an importance matrix: to out.gguf."""

    def written(path: Path, mix: str, importance=None, **options) -> Path:
        with File(path) as file:
            made = plan(
                file, mix_for(file, mix, has_imatrix=bool(importance)), importance, **options
            )
            if importance:
                for key, kind, value in (
                    ("file", "str", "weights.imatrix.gguf"),
                    ("dataset", "str", "text.txt"),
                    ("entries_count", "u32", len(importance)),
                    ("chunks_count", "u32", 8),
                ):
                    override(made.metadata, f"quantize.imatrix.{key}", kind, value)
            for _ in write(made, tmp_path / "out.gguf", workers):
                pass
        return tmp_path / "out.gguf"

    return written


@pytest.mark.parametrize("mix", SHARED_MIXES)
def test_files_are_those_of_llama_quantize(source: Path, mix: str, quantize) -> None:
    if mix != "Q2_K_S":
        assert digest_of_file(quantize(source, mix)) == GOLDEN["files"][mix]
    weights = importance_of(WEIGHTS).weights()
    assert digest_of_file(quantize(source, mix, weights)) == GOLDEN["files"][f"{mix} imatrix"]


# Of those of the golden file, q5_k_m and q6_k mix the same formats in other layers, and iq4_xs
# takes as long as all of these.
REAL = ("q4_k_m", "q3_k_m", "q8_0")


@pytest.mark.parametrize("mix", REAL)
def test_a_real_model_is_that_of_llama_quantize(smollm2: Path, mix: str, quantize) -> None:
    """From its blocks: their values are those of the float32 file that the golden one is of."""
    out = quantize(smollm2, mix, allow_requantize=True)
    assert digest_of_file(out) == GOLDEN["smollm2"][mix]


def test_progress_is_told(source: Path, tmp_path: Path, workers: Workers) -> None:
    with File(source) as file:
        made = plan(file, mix_for(file, "q8_0"))
        told = list(write(made, tmp_path / "out.gguf", workers))
    last = dict(told)
    assert list(last) == list(range(len(made.choices)))
    assert list(last.values()) == [choice.slot.nbytes for choice in made.choices]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("name", ["blk.3.ffn_down.weight", "blk.3.ffn_norm.weight"])
def test_a_bad_weight_ends_it_and_leaves_nothing(
    tmp_path: Path, workers: Workers, name: str, bad: float
) -> None:
    path = write_case(WEIGHTS, tmp_path / "bad.gguf")
    with File(path) as file:
        tensor = file.tensors[name]
        row = min(41, len(tensor.data) - 1) if tensor.data.ndim > 1 else 0
        at = tensor.offset + row * tensor.data.strides[0] + 4 * 7
    content = bytearray(path.read_bytes())
    content[at : at + 4] = np.float32(bad).tobytes()
    path.write_bytes(content)
    with File(path) as file, pytest.raises(ValueError, match=f"tensor '{name}': row {row}") as e:
        for _ in write(plan(file, mix_for(file, "q4_k_m")), tmp_path / "out.gguf", workers):
            pass
    assert "NaN or inf" in str(e.value)
    assert [p.name for p in tmp_path.iterdir()] == ["bad.gguf"]


def test_an_interrupt_leaves_nothing(source: Path, tmp_path: Path, workers: Workers) -> None:
    with File(source) as file:
        steps = write(plan(file, mix_for(file, "q8_0")), tmp_path / "out.gguf", workers)
        next(steps)
        assert list(tmp_path.iterdir()) == list(tmp_path.glob("out.gguf.????????.part")) != []
        steps.close()
    assert not list(tmp_path.iterdir())


def test_requantising_is_refused_unless_allowed(smollm2: Path) -> None:
    with File(smollm2) as file:
        with pytest.raises(ValueError, match=r"'blk.0.attn_k.weight' is in Q4_1 already.*allow"):
            plan(file, mix_for(file, "q4_0"))
        made = plan(file, mix_for(file, "q4_0"), allow_requantize=True)
    assert {c.format.name for c in made.choices if c.tensor.format.name == "Q4_1"} == {"Q4_0"}


def test_a_tensor_that_has_its_type_is_copied(smollm2: Path) -> None:
    with File(smollm2) as file:
        made = plan(file, mix_for(file, "q4_1"), allow_requantize=True)
        same = [c for c in made.choices if c.tensor.format.name == "Q4_1"]
        assert same
        assert not any(choice.changes for choice in same)


def test_integers_are_no_weights(tmp_path: Path) -> None:
    slots = [Slot("blk.0.ffn_up.weight", (4, 32), by_name("I32"))]
    metadata = WEIGHTS.metadata()
    with Writer(tmp_path / "in.gguf", metadata, slots) as out:
        out.write(np.zeros((4, 32), "<i4"))
    with File(tmp_path / "in.gguf") as file, pytest.raises(ValueError, match="holds integers, I32"):
        plan(file, mix_for(file, "q8_0"))


def test_q2_k_s_needs_an_importance_matrix(source: Path) -> None:
    with File(source) as file:
        with pytest.raises(ValueError, match=r"'blk.0.attn_k.weight' in Q2_K needs an importance"):
            plan(file, mix_for(file, "q2_k_s"))
        plan(file, mix_for(file, "q2_k_s", has_imatrix=True), importance_of(WEIGHTS).weights())


def test_importance_that_does_not_fit(source: Path) -> None:
    weights = importance_of(WEIGHTS).weights()
    del weights["blk.0.attn_k.weight"]
    weights["token_embd.weight"] = np.ones(3, np.float32)
    with File(source) as file:
        made = plan(file, mix_for(file, "q4_0", has_imatrix=True), weights)
        assert made.notes == [
            "did not find weights for output.weight",
            "imatrix size 3 is different from tensor size 256 for token_embd.weight",
            "did not find weights for blk.0.attn_k.weight",
        ]
        weights["blk.0.attn_k.weight"] = np.ones(3, np.float32)
        with pytest.raises(ValueError, match=r"imatrix size 3 is different .* another model"):
            plan(file, mix_for(file, "q4_0", has_imatrix=True), weights)


def test_without_a_mix_it_is_a_copy(source: Path, tmp_path: Path, workers: Workers) -> None:
    with File(source) as file:
        for _ in write(plan(file, None, keep_order=True), tmp_path / "out.gguf", workers):
            pass
        with File(tmp_path / "out.gguf") as copy:
            assert list(copy.tensors) == list(file.tensors)
            for name, tensor in file.tensors.items():
                assert (copy.tensors[name].data == tensor.data).all()
            extra = copy.metadata.keys() - file.metadata.keys()
            assert extra == {"general.quantization_version"}


def test_parts(source: Path, tmp_path: Path, workers: Workers) -> None:
    """Split, quantised in parts, joined: the same as quantised whole."""
    with File(source) as file:
        split(file, tmp_path)
    whole = tmp_path / "whole.gguf"
    with File(tmp_path / "in-00001-of-00002.gguf") as parts:
        for _ in write(plan(parts, mix_for(parts, "q4_k_m")), whole, workers):
            pass
        made = plan(parts, mix_for(parts, "q4_k_m"), keep_order=True)
        for _ in write_parts(made, tmp_path / "out.gguf", workers):
            pass
    assert digest_of_file(whole) == GOLDEN["files"]["Q4_K_M"]
    with File(part_name(tmp_path / "out", 1, 2)) as parts, File(whole) as one:
        assert parts.tensors.keys() == one.tensors.keys()
        assert parts.types["split.no"] == "u16"
        for name, tensor in one.tensors.items():
            other = parts.tensors[name]
            assert other.format is tensor.format
            assert (other.data == tensor.data).all()


def split(file: File, folder: Path) -> None:
    """The file in two parts, by layers, so that counting layers by file or by name is the same."""
    ordered = plan(file, None).choices
    halves = ordered[: len(ordered) // 2], ordered[len(ordered) // 2 :]
    for i, half in enumerate(halves):
        metadata = {key: (file.types[key], value) for key, value in file.metadata.items()}
        metadata = metadata if i == 0 else {}
        metadata |= {"split.no": ("u16", i), "split.count": ("u16", 2)}
        metadata["split.tensors.count"] = ("i32", len(ordered))
        path = part_name(folder / "in.gguf", i + 1, 2)
        with Writer(path, metadata, [choice.slot for choice in half]) as out:
            for choice in half:
                out.write(choice.tensor.data)


def test_a_file_without_dimensions_has_no_mix(tmp_path: Path) -> None:
    with Writer(tmp_path / "in.gguf", {"general.architecture": ("str", "llama")}, []):
        pass
    with File(tmp_path / "in.gguf") as file, pytest.raises(GGUFError, match="head_count is None"):
        mix_for(file, "q8_0")
    with Writer(tmp_path / "in.gguf", {}, []):
        pass
    with File(tmp_path / "in.gguf") as file, pytest.raises(GGUFError, match="architecture"):
        mix_for(file, "q8_0")


def test_heads_that_differ_from_layer_to_layer_count_as_the_first(tmp_path: Path) -> None:
    metadata = {
        "general.architecture": ("str", "llama"),
        "llama.block_count": ("u32", 3),
        "llama.attention.head_count": ("arr[u32]", [32, 16, 8]),
        "llama.attention.head_count_kv": ("arr[u32]", [8, 0, 8]),
    }
    with Writer(tmp_path / "in.gguf", metadata, []):
        pass
    with File(tmp_path / "in.gguf") as file:
        mix = mix_for(file, "q8_0")
    assert (mix.n_layer, mix.n_head, mix.n_head_kv, mix.n_expert) == (3, 32, 8, 0)
    assert mix.tied


def test_experts_have_importances_of_their_own(tmp_path: Path, workers: Workers) -> None:
    case = Case("llama", 2, 4, 4, n_expert=3, rows=4)
    path = write_case(case, tmp_path / "in.gguf")
    write_gguf(tmp_path / "imatrix.gguf", importance_of(case))
    weights = importance_of(case).weights()
    with File(path) as file:
        mix = mix_for(file, "q4_k_s", has_imatrix=True)
        for _ in write(plan(file, mix, weights), tmp_path / "out.gguf", workers):
            pass
        name = "blk.1.ffn_up_exps.weight"
        tensor, importance = file.tensors[name].dequantize(), weights[name].reshape(3, -1)
        with File(tmp_path / "out.gguf") as out:
            found = out.tensors[name]
            for i in range(3):
                expected = found.format.quantize(tensor[i], importance[i])
                assert (found.data[i] == expected).all()
