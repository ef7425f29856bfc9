"""Scales of rows and settings under "ggpy." in a file: what is handed over, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_gemma4 import EXPERTS, write_tiny_gemma4

import ggpy
from ggpy import arch
from ggpy.arch.scheme import settings_for
from ggpy.backends.interface import Demand
from ggpy.backends.numpy.backend import Reference
from ggpy.formats import by_name
from ggpy.gguf import File
from ggpy.gguf.writer import Slot, Writer

UP = "blk.0.ffn_up"
SCALED = (  # ends of names of matrices that get a scale
    *("attn_q.weight", "attn_k.weight", "ffn_down.weight", "ssm_out.weight", "_up_exps.weight"),
    "ffn_gate_exps.weight",
)


class Kept(Reference):
    """Remembers what it is given."""

    def __init__(self) -> None:
        super().__init__(1)
        self.given: dict[str, tuple[Any, ...]] = {}

    def plan_memory(self, demand: Demand) -> int:
        self.demand = demand
        return demand.n_batch

    def weight(self, tensor, role, scale=None, activations="f16"):
        self.given[tensor.name] = tensor.format.name, tensor.shape, scale, activations
        return super().weight(tensor, role, scale, activations)


def rewritten(
    source: Path, out: Path, metadata: dict[str, tuple[str, Any]], tensors: dict[str, np.ndarray]
) -> Path:
    """The file with more metadata, and tensors in place of its own: int8, or float32."""
    with File(source) as file:
        typed = {key: (file.types[key], value) for key, value in file.metadata.items()}
        found = {name: (x.shape, x.format, x.data) for name, x in file.tensors.items()}
        for name, array in tensors.items():
            format = by_name("I8" if array.dtype == np.int8 else "F32")
            found[name] = array.shape, format, array.view(np.uint8)
        slots = [Slot(name, shape, format) for name, (shape, format, _) in found.items()]
        with Writer(out, {**typed, **metadata}, slots) as writer:
            for _, _, data in found.values():
                writer.write(data)
    return out


def loaded(path: Path) -> Kept:
    ops = Kept()
    with File(path) as file:
        arch.load(file, ops, 64)
    return ops


@pytest.fixture
def scaled(tiny_path, tmp_path: Path):
    """The tiny model with a matrix of bytes that has scales, and these settings."""
    path = tiny_path("llama")
    with File(path) as file:
        shape = file.tensors[f"{UP}.weight"].shape
    values = np.random.default_rng(0).integers(-127, 128, shape).astype(np.int8)
    values[values.view(np.uint8) & 127 == 127] = 0  # no NaN where they are floats
    scale = np.full(shape[0], 1e-3, np.float32)

    def write(metadata: dict[str, Any], **changes: Any) -> Path:
        tensors = {f"{UP}.weight": values, f"{UP}.scale": scale}
        tensors |= {name.replace("__", "."): array for name, array in changes.items()}
        typed = {k: ("str" if isinstance(v, str) else "u32", v) for k, v in metadata.items()}
        return rewritten(path, tmp_path / "out.gguf", typed, tensors)

    return write


@pytest.mark.parametrize(
    ("settings", "format", "activations"),
    [
        ({}, "I8", "f16"),
        ({"ggpy.activations": "int8"}, "I8", "int8"),
        ({"ggpy.i8": "e4m3"}, "F8_E4M3", "f16"),
        ({"ggpy.i8": "e4m3", "ggpy.activations": "e4m3"}, "F8_E4M3", "e4m3"),
        ({"ggpy.i8": "int8", "ggpy.activations": "f16"}, "I8", "f16"),
    ],
)
def test_bytes_are_handed_over_with_their_scales(scaled, settings, format, activations) -> None:
    ops = loaded(scaled(settings))
    name, shape, scale, kind = ops.given[f"{UP}.weight"]
    assert (name, kind, scale.shape) == (format, activations, shape[:1])
    assert f"{UP}.scale" not in ops.given
    others = [x for key, x in ops.given.items() if key != f"{UP}.weight"]
    assert all(x[2:] == (None, "f16") for x in others)
    assert {t.name: role.axes for t, role in ops.demand.weights}[f"{UP}.scale"] == "F"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ggpy.i8": "e5m2"}, r"ggpy\.i8 = 'e5m2' is not supported \(only int8 or e4m3 is\)"),
        ({"ggpy.activations": "int4"}, r"ggpy\.activations = 'int4' is not supported \(only f16"),
        ({"ggpy.activations": 8}, r"ggpy\.activations = 8 is not supported"),
        ({"ggpy.activations": "e4m3"}, r"'e4m3' is not supported with ggpy\.i8 = 'int8'"),
        ({"ggpy.i8": "e4m3", "ggpy.activations": "int8"}, "both have to be of one kind"),
        ({"ggpy.kv": "int8"}, r"not supported: ggpy\.kv = 'int8'"),
    ],
)
def test_settings_that_are_not_known_are_refused(scaled, settings, message) -> None:
    with pytest.raises(ValueError, match=message):
        loaded(scaled(settings))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"blk__0__ffn_up__scale": np.ones(5, np.float32)}, r"'blk\.0\.ffn_up\.scale' has shape"),
        ({"blk__0__ffn_up__scale": np.ones(2, np.float32)}, r"shape \(2,\), the settings say"),
        (
            {"blk__0__ffn_up__input_scale": np.ones(5, np.float32)},
            r"'blk\.0\.ffn_up\.input_scale' has shape \(5,\), 'blk\.0\.ffn_up\..*' needs \(1,\)",
        ),
        ({"blk__0__attn_norm__input_scale": np.ones(1, np.float32)}, "has no use for tensor"),
        ({"blk__0__attn_norm__scale": np.ones(5, np.float32)}, "has no use for tensor"),
        ({"blk__9__ffn_up__scale": np.ones(5, np.float32)}, "has no use for tensor"),
    ],
)
def test_scales_that_do_not_fit_are_refused(scaled, tensors, message) -> None:
    with pytest.raises(ValueError, match=message):
        loaded(scaled({}, **tensors))


@pytest.mark.parametrize("name", ["qwen35", "qwen3moe", "gemma4", "gate and up together"])
def test_one_scale_of_a_matrix_and_one_of_each_expert(
    name: str, tiny_path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files in NVFP4 have them, and scales of activations, which change nothing."""
    if name == "gate and up together":
        plain = write_tiny_gemma4(tmp_path, monkeypatch, EXPERTS, together=True)
    else:
        plain = tiny_path(name)
    scaled, folded = tmp_path / "scaled.gguf", tmp_path / "folded.gguf"
    scales, whole, rng = {}, {}, np.random.default_rng(0)
    with File(plain) as file:
        for tensor in (x for key, x in file.tensors.items() if key.endswith(SCALED)):
            stem = tensor.name.removesuffix(".weight")
            factors = rng.uniform(0.5, 1.5, tensor.shape[:1] if len(tensor.shape) == 3 else 1)
            scales[f"{stem}.scale"] = scales[f"{stem}.input_scale"] = factors.astype(np.float32)
            axes = (-1, *[1] * (len(tensor.shape) - 1))
            whole[tensor.name] = tensor.dequantize() * scales[f"{stem}.scale"].reshape(axes)
    logits = []
    for out, tensors in ((scaled, scales), (folded, whole)):
        rewritten(plain, out, {}, tensors)
        with ggpy.load(str(out), device=Reference(1), n_ctx=64) as model:
            logits.append(model.logits(list(range(3, 23))))
    np.testing.assert_allclose(*logits, atol=1e-4)


def test_scales_are_checked(scaled) -> None:
    with File(scaled({})) as file:
        n = file.tensors[f"{UP}.scale"].shape[0]
    bad = np.ones(n, np.float32)
    bad[3] = np.nan
    with pytest.raises(ValueError, match=r"'blk\.0\.ffn_up\.scale'.*weight 3 is NaN"):
        loaded(scaled({}, blk__0__ffn_up__scale=bad))
    with pytest.raises(ValueError, match=r"'blk\.0\.ffn_up\.scale' is I8: scales are F32"):
        loaded(scaled({}, blk__0__ffn_up__scale=np.ones(n, np.int8)))


def test_floats_that_are_none_are_found(scaled) -> None:
    with File(scaled({})) as file:
        values = file.tensors[f"{UP}.weight"].data.view(np.int8).copy()
    values[2, 1] = 127
    loaded(scaled({}, blk__0__ffn_up__weight=values))
    with pytest.raises(ValueError, match=r"'blk\.0\.ffn_up\.weight': row 2: .* weight 1 is NaN"):
        loaded(scaled({"ggpy.i8": "e4m3"}, blk__0__ffn_up__weight=values))


def test_settings_of_a_file_that_is_written() -> None:
    i8, e4m3, q4_0 = map(by_name, ("I8", "F8_E4M3", "Q4_0"))
    assert settings_for([q4_0], "int8") == {}
    assert settings_for([i8], "f16") == {}
    assert settings_for([i8, q4_0], "int8") == {"ggpy.activations": ("str", "int8")}
    assert settings_for([e4m3], "e4m3").keys() == {"ggpy.i8", "ggpy.activations"}
    with pytest.raises(ValueError, match="cannot hold both bytes that are whole numbers and"):
        settings_for([i8, e4m3], "f16")
    with pytest.raises(ValueError, match="int8 weights cannot be multiplied with e4m3"):
        settings_for([i8], "e4m3")
