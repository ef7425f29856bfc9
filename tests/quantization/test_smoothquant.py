"""Types with a scale for each row, and SmoothQuant: what they hold, and what they cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from checkpoints import KINDS, to_gguf, weights_of, write, write_weights
from small_vocab import TEXTS

import ggpy
from ggpy.backends.numpy.backend import Reference
from ggpy.convert import Checkpoint, Folder, mix_of, read_config, read_model
from ggpy.convert import plan as plan_conversion
from ggpy.convert import write as convert
from ggpy.evaluate.perplexity import Requantized
from ggpy.formats import by_name
from ggpy.formats.rows import encode_rows, row_scales
from ggpy.gguf import File, Tensor
from ggpy.quantization.mix import BY_ROW, Mix, find_mix
from ggpy.quantization.requantize import Factors, mix_for, part_name, plan, write_parts
from ggpy.quantization.requantize import write as write_plan
from ggpy.quantization.smoothquant import Largest, calibrate, factors
from ggpy.quantization.workers import Workers

IDS = [5, 300, 17, 99, 401, 260, 12, 77]
TEXT = "".join(TEXTS) * 2
CHANNELS = [3, 17]  # that are large in what norms make


def with_outliers(folder: Path, name: str, factor: float = 40) -> Path:
    """The checkpoint `name` with two channels whose activations are large, and what is multiplied
    with them as much smaller: the same function.
    """
    write(folder, name, torch_dtype=None)
    for part in folder.glob("model*"):
        part.unlink()
    weights = weights_of(name)
    inputs = ("q_proj", "k_proj", "v_proj", "qkv_proj", "gate_proj", "up_proj", "gate_up_proj")
    for key, w in weights.items():
        if key.endswith(("input_layernorm.weight", "post_attention_layernorm.weight")):
            w[CHANNELS] *= factor
        if key.endswith(tuple(f"{x}.weight" for x in inputs)):
            w[:, CHANNELS] /= factor
    write_weights(folder, weights, "float32")
    return folder


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The file in F32 of a checkpoint with outliers."""
    root = tmp_path_factory.mktemp("outliers")

    def made(name: str) -> Path:
        out = root / f"{name}.gguf"
        return out if out.exists() else to_gguf(with_outliers(root / name, name), out)

    return made


def quantized(source: Path, out: Path, type: str, moved: Factors | None = None, **more) -> Path:
    with File(source) as file, Workers(1) as workers:
        for _ in write_plan(plan(file, mix_for(file, type), factors=moved, **more), out, workers):
            pass
    return out


def smoothed(source: Path, alpha: float) -> Factors:
    with File(source) as file:
        return factors(file, calibrate(file, TEXT, Reference(1)), alpha)


def logits(path: Path) -> np.ndarray:
    with ggpy.load(str(path), device="cpu", n_ctx=64) as model:
        return model.logits(IDS)


def error(path: Path, source: Path) -> float:
    wanted = logits(source)
    return float(np.square(logits(path) - wanted).sum() / np.square(wanted).sum())


# Types with a scale for each row

TYPES = {
    "W8A16": ("I8", {}),
    "W8A8": ("I8", {"ggpy.activations": "int8"}),
    "W4A16": ("Q4_0", {}),
    "W8A16_FP8": ("F8_E4M3", {"ggpy.i8": "e4m3"}),
    "W8A8_FP8": ("F8_E4M3", {"ggpy.i8": "e4m3", "ggpy.activations": "e4m3"}),
}


def test_every_such_type_is_here() -> None:
    assert tuple(TYPES) == BY_ROW and find_mix("fp8") == "W8A8_FP8"


@pytest.mark.parametrize("type", TYPES)
def test_values_and_scales_of_a_file(type: str, source, tmp_path: Path) -> None:
    name, settings = TYPES[type]
    path, format = source("llama-linear"), by_name(name)
    with File(quantized(path, tmp_path / "out.gguf", type)) as file, File(path) as original:
        assert {k: v for k, v in file.metadata.items() if k.startswith("ggpy.")} == settings
        assert "general.file_type" not in file.metadata
        for at in ("blk.0.attn_q", "blk.1.ffn_down"):
            weights = original.tensors[f"{at}.weight"].dequantize()
            scales = row_scales(weights, format)
            ours = file.tensors[f"{at}.weight"]
            assert np.array_equal(file.tensors[f"{at}.scale"].dequantize(), scales)
            assert np.array_equal(ours.data, encode_rows(weights, scales, format))
            assert ours.format.name == ("Q4_0" if name == "Q4_0" else "I8")
        for table in ("token_embd.weight", "output.weight"):
            assert file.tensors[table].format.name == "Q8_0"
        assert file.tensors["blk.0.attn_norm.weight"].format.name == "F32"


@pytest.mark.parametrize("type", TYPES)
def test_converting_makes_the_same(type: str, source, tmp_path: Path) -> None:
    theirs = quantized(source("phi3"), tmp_path / "a.gguf", type)
    ours = to_gguf(with_outliers(tmp_path / "phi3", "phi3"), tmp_path / "b.gguf", type)
    with File(ours) as a, File(theirs) as b:
        assert list(a.tensors) == list(b.tensors)
        for name, tensor in a.tensors.items():
            assert np.array_equal(tensor.data, b.tensors[name].data), name
        assert {k: v for k, v in a.metadata.items() if k.startswith("ggpy.")} == TYPES[type][1]


@pytest.mark.parametrize(
    ("type", "most"),
    [("W8A16", 2), ("W8A8", 4), ("W4A16", 150), ("W8A16_FP8", 20), ("W8A8_FP8", 25)],
)
def test_what_types_cost(type: str, most: float, tmp_path: Path) -> None:
    """Errors as multiples of Q8_0's."""
    source = to_gguf(write(tmp_path / "in", "qwen2"), tmp_path / "in.gguf")
    usual = error(quantized(source, tmp_path / "q8_0.gguf", "Q8_0"), source)
    assert error(quantized(source, tmp_path / "out.gguf", type), source) < most * usual


def test_a_mix_leaves_tables_and_short_rows_alone() -> None:
    mix = Mix("w4a16", "llama", 2, 4, 2, tied=True)
    assert mix.by_row and mix.file_type is None
    assert mix.choose("blk.0.ffn_up.weight", (64, 96)) is by_name("Q4_0")
    assert mix.choose("blk.0.attn_q.weight", (64, 72)) is by_name("F16")
    assert mix.choose("token_embd.weight", (512, 64)) is by_name("Q8_0")
    assert mix.choose("blk.0.attn_norm.weight", (64,)) is None


def test_scales_are_multiplied_out_for_another_type(source, tmp_path: Path) -> None:
    path = source("llama-linear")
    for type in ("W8A8", "W8A8_FP8", "W4A16"):
        scaled = quantized(path, tmp_path / "scaled.gguf", type)
        with pytest.raises(ValueError, match=r"is in \w+ already.*--allow-requantize"):
            quantized(scaled, tmp_path / "out.gguf", "f32")
        out = quantized(scaled, tmp_path / "out.gguf", "f32", allow_requantize=True)
        with File(out) as file, File(scaled) as original:
            assert not [name for name in file.tensors if name.endswith(".scale")]
            assert not [key for key in file.metadata if key.startswith("ggpy.")]
            values = original.tensors["blk.1.attn_v.weight"]
            format = by_name("F8_E4M3") if type == "W8A8_FP8" else values.format
            scale = original.tensors["blk.1.attn_v.scale"].dequantize()
            wanted = format.dequantize(values.data) * scale[:, None]
            assert np.array_equal(file.tensors["blk.1.attn_v.weight"].dequantize(), wanted)


@pytest.mark.parametrize(("type", "n_scales"), [("f32", 1), ("f16", 0), ("W8A16", 32)])
def test_one_scale_of_a_matrix(type: str, n_scales: int, source, tmp_path: Path) -> None:
    """As files in NVFP4 have it: copied with its matrix, multiplied out, or with those of rows."""
    name, out, one = "blk.1.attn_v", tmp_path / "out.gguf", np.full(1, 0.5, np.float32)
    with File(source("llama-linear")) as file, Workers(1) as workers:
        weights = file.tensors[f"{name}.weight"].dequantize()
        scale = Tensor(f"{name}.scale", (1,), by_name("F32"), one.view(np.uint8), file.path)
        file.tensors[scale.name] = scale
        for _ in write_plan(plan(file, mix_for(file, type), allow_requantize=True), out, workers):
            pass
    with File(out) as file:
        found = file.tensors.get(scale.name)
        assert (0 if found is None else found.shape[0]) == n_scales
        factor = 1 if found is None else found.dequantize()[:, None]
        values = file.tensors[f"{name}.weight"].dequantize() * factor
    np.testing.assert_allclose(values, weights / 2, atol=np.abs(weights).max() / 500)


def test_quantising_on_the_fly_is_refused(source, tmp_path: Path) -> None:
    scaled = quantized(source("llama-linear"), tmp_path / "scaled.gguf", "W8A8_FP8")
    with File(scaled) as file, pytest.raises(ValueError, match="which --types leaves aside"):
        Requantized(file, by_name("Q8_0"))


def test_a_copy_keeps_scales_and_settings(source, tmp_path: Path) -> None:
    scaled = quantized(source("llama-linear"), tmp_path / "scaled.gguf", "W8A8_FP8")
    with File(scaled) as file, Workers(1) as workers:
        for _ in write_plan(plan(file, None), tmp_path / "copy.gguf", workers):
            pass
    assert np.array_equal(logits(tmp_path / "copy.gguf"), logits(scaled))


def test_nan_is_refused_by_name_and_row(source, tmp_path: Path) -> None:
    folder = write(tmp_path / "in", "qwen3")
    weights = weights_of("qwen3")
    weights["model.layers.1.mlp.down_proj.weight"][7, 3] = np.nan
    write_weights(folder, weights, "bfloat16")
    with pytest.raises(ValueError, match=r"tensor 'blk\.1\.ffn_down\.weight': row 7 holds NaN or"):
        to_gguf(folder, tmp_path / "out.gguf", "w8a8")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_parts_of_a_split_file_have_their_scales(source, tmp_path: Path) -> None:
    folder = with_outliers(tmp_path / "in", "qwen2")
    inside = Folder(folder)
    config, architecture, kind = read_config(inside)
    with Checkpoint(inside) as checkpoint, Workers(1) as workers:
        model = read_model(inside, config, architecture, kind, checkpoint)
        split = plan_conversion(model, mix_of(model, "f32"), tmp_path / "f32.gguf", 150_000)
        for _ in convert(split, workers):
            pass
        with File(split.parts[0].path) as file:
            made = plan(file, mix_for(file, "W8A16"), keep_order=True)
            for _ in write_parts(made, tmp_path / "out.gguf", workers):
                pass
    n = len(split.parts)
    assert n > 2
    ours = logits(part_name(tmp_path / "out.gguf", 1, n))
    whole = logits(quantized(split.parts[0].path, tmp_path / "whole.gguf", "W8A16"))
    assert np.array_equal(ours, whole)


# SmoothQuant


@pytest.mark.parametrize("name", ["llama-linear", "qwen2", "gemma3", "phi3", "muse-glimmer"])
def test_smoothing_changes_no_logits(name: str, source, tmp_path: Path) -> None:
    path = source(name)
    moved = smoothed(path, 0.5)
    out = quantized(path, tmp_path / "out.gguf", "f32", moved)
    assert error(out, path) < 1e-9
    with File(out) as a, File(path) as b:
        changed = {n for n, x in a.tensors.items() if not np.array_equal(x.data, b.tensors[n].data)}
    assert changed == moved.columns.keys() | moved.rows.keys()
    assert {"blk.1.attn_norm.weight", "blk.1.ffn_norm.weight", "blk.1.ffn_down.weight"} <= changed


@pytest.mark.parametrize("name", ["command-r", "exaone4", "granite", "olmo2", "seed_oss"])
def test_smoothing_heeds_where_norms_are(name: str, source, tmp_path: Path) -> None:
    """In parallel layers, after attention and feed-forward, or under another name."""
    path = source(name)
    moved = smoothed(path, 0.5)
    assert ("blk.1.ffn_gate.weight" in moved.columns) == (name in ("command-r", "granite"))
    assert error(quantized(path, tmp_path / "out.gguf", "f32", moved), path) < 1e-9


@pytest.mark.parametrize("name", ["qwen2", "phi3"])
def test_values_that_are_not_shared_are_smoothed_too(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = KINDS[name]
    config = {**kind.config, "num_key_value_heads": 4}
    monkeypatch.setitem(KINDS, "own", replace(kind, config=config))
    path = to_gguf(with_outliers(tmp_path / "in", "own"), tmp_path / "in.gguf")
    moved = smoothed(path, 0.5)
    assert "blk.1.attn_output.weight" in moved.columns
    assert error(quantized(path, tmp_path / "out.gguf", "f32", moved), path) < 1e-9


@pytest.mark.parametrize("name", ["llama-linear", "qwen2", "phi3"])
def test_smoothing_reduces_the_error_of_outliers(name: str, source, tmp_path: Path) -> None:
    path = source(name)
    plain = error(quantized(path, tmp_path / "plain.gguf", "W8A8"), path)
    smooth = error(quantized(path, tmp_path / "out.gguf", "W8A8", smoothed(path, 0.5)), path)
    assert smooth < plain / 4, (smooth, plain)


def test_factors_are_those_of_the_paper(source) -> None:
    path = source("llama-linear")
    with File(path) as file:
        largest = calibrate(file, TEXT, Reference(1))
        moved = factors(file, largest, 0.75)
        x = largest["blk.0.attn_q.weight"]
        assert np.array_equal(x, largest["blk.0.attn_v.weight"])
        w = np.max([np.abs(file.tensors[f"blk.0.attn_{n}.weight"].dequantize()).max(axis=0)
                    for n in "qkv"], axis=0)  # fmt: skip
        s = x**0.75 / w**0.25
        assert np.allclose(moved.columns["blk.0.attn_k.weight"], s, rtol=1e-5)
        assert np.allclose(moved.columns["blk.0.attn_norm.weight"] * s, 1, rtol=1e-5)
        down = moved.columns["blk.0.ffn_down.weight"]
        assert np.allclose(moved.rows["blk.0.ffn_up.weight"] * down, 1, rtol=1e-5)
        assert (x[CHANNELS] > 10 * np.median(x)).all()


def test_what_was_seen() -> None:
    largest = Largest()
    largest.see("w", np.array([[1, -5], [2, 3]], np.float32))
    largest.see("w", np.array([[-4, 0]], np.float32))
    assert largest.found["w"].tolist() == [4, 5]
    with pytest.raises(ArithmeticError, match="what meets w is NaN or infinite"):
        largest.see("w", np.array([[np.nan, 0]], np.float32))


def test_what_cannot_be_smoothed(source, tmp_path: Path) -> None:
    path = source("llama-linear")
    with File(path) as file:
        for alpha in (-0.1, 1.5, np.nan):
            with pytest.raises(ValueError, match="give one between 0"):
                factors(file, {}, alpha)
        with pytest.raises(ValueError, match=r"blk\.0\.attn_q\.weight was never used"):
            factors(file, {}, 0.5)
        with pytest.raises(ValueError, match=r"a calibration text of . tokens: give one of 16"):
            calibrate(file, "a b", Reference(1))
    with (
        File(quantized(path, tmp_path / "out.gguf", "W8A16")) as file,
        pytest.raises(ValueError, match="has a scale for each row already"),
    ):
        factors(file, calibrate(file, TEXT, Reference(1)), 0.5)
