"""Checkpoints that are quantised already: their codes in the file, and the logits of the weights
that they stand for.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import KINDS, to_gguf, write, write_weights
from quantised_checkpoints import (
    Group,
    Make,
    awq,
    by_rows,
    compressed,
    gptq,
    grouped,
    save,
    words_of,
)

import ggpy
from ggpy.convert import Checkpoint, Folder, mix_of, plan, read_config, read_model
from ggpy.convert.packed import along_first, along_last, awq_columns
from ggpy.formats import by_name
from ggpy.gguf import File

NMSE = 1e-6
NMSE_OF_MINIMUMS = 4e-6  # where zero * scale is rounded to a half, on models as small as these
IDS = [5, 300, 17, 99, 401, 260, 12, 77]

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}


def compressed_config(type: str, bits: int, **more: Any) -> dict[str, Any]:
    weights = {"type": type, "num_bits": bits, "strategy": "channel", "symmetric": True}
    group = {"targets": ["Linear"], "weights": {**weights, **more.pop("weights", {})}}
    group["input_activations"] = more.pop("activations", None)
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, **more}


def dynamic(type: str, **more: Any) -> dict[str, Any]:
    found = {"type": type, "num_bits": 8, "strategy": "token", "dynamic": True, "symmetric": True}
    return {**found, **more}


def packed(kind: str, size: int = 32, symmetric: bool = True, offset: int = 1) -> Make:
    def make(stem: str, w: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
        g = grouped(w, size, symmetric)
        if kind == "gptq":
            return gptq(stem, g, offset), g.weights
        return (awq(stem, g) if kind == "awq" else compressed(stem, g, symmetric)), g.weights

    return make


def bytes_by_row(kind: str, one: bool = False) -> Make:
    def make(stem: str, w: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
        values, scales = by_rows(w, kind, one)
        plain = (
            values.astype(np.float32) if kind == "int8" else by_name("F8_E4M3").dequantize(values)
        )
        stored = {f"{stem}.weight": values, f"{stem}.weight_scale": scales}
        return stored, plain * scales

    return make


def logits(path: Path) -> np.ndarray:
    with ggpy.load(str(path), device="cpu", n_ctx=64) as model:
        return model.logits(IDS)


def nmse(got: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.square(got - wanted).sum() / np.square(wanted).sum())


def both(
    folder: Path, name: str, make: Make, quantization: Any, **changes: Any
) -> tuple[Path, Path]:
    """(the file of a quantised checkpoint as it is, the file of the weights it stands for)."""
    plain = save(folder / "quantised", name, make, quantization, **changes)
    write(folder / "plain", name, torch_dtype=None)
    write_weights(folder / "plain", plain, "float32")
    for part in (folder / "plain").glob("model-*"):
        part.unlink()
    (folder / "plain" / "model.safetensors.index.json").unlink(missing_ok=True)
    ours = to_gguf(folder / "quantised", folder / "ours.gguf", "f32", keep=True)
    return ours, to_gguf(folder / "plain", folder / "plain.gguf")


# Orders of codes


@pytest.mark.parametrize("order", ["along first", "along last", "awq"])
def test_words_are_unpacked_as_plain_loops_do(order: str) -> None:
    codes = np.random.default_rng(0).integers(0, 16, (16, 24))
    unpacked = {
        "along first": lambda: along_first(words_of(codes.T, tuple(range(8))).T),
        "along last": lambda: along_last(words_of(codes, tuple(range(8)))),
        "awq": lambda: awq_columns(words_of(codes, (0, 2, 4, 6, 1, 3, 5, 7))),
    }
    assert np.array_equal(unpacked[order](), codes)


# Codes are kept


@pytest.mark.parametrize("size", [32, 64, 128, -1])
@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "zero points"])
@pytest.mark.parametrize("kind", ["gptq", "awq", "compressed"])
def test_codes_and_scales_of_a_matrix(
    kind: str, symmetric: bool, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"hidden_size": 128, "intermediate_size": 256}
    monkeypatch.setitem(KINDS, "wide", replace(KINDS["llama-linear"], config=config))
    made: dict[str, Group] = {}

    def make(stem: str, w: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
        made[stem] = grouped(w, size, symmetric)
        return packed(kind, size, symmetric)(stem, w)

    quantization = {"gptq": GPTQ, "awq": AWQ}.get(kind) or compressed_config("int", 4)
    if kind != "compressed":
        quantization = {**quantization, "group_size": size}
    save(tmp_path, "wide", make, quantization)
    format = by_name("Q4_0" if symmetric else "Q4_1")
    with File(to_gguf(tmp_path, tmp_path / "out.gguf", "f16", keep=True)) as file:
        tensor = file.tensors["blk.1.ffn_down.weight"]
        group = made["model.layers.1.mlp.down_proj"]
        assert tensor.format is format and file.metadata["general.file_type"] == 3 - symmetric
        blocks = format.blocks(tensor.data).reshape(128, 8)
        low, high = blocks["qs"] & 15, blocks["qs"] >> 4
        assert np.array_equal(np.concatenate([low, high], axis=2).reshape(128, -1), group.codes)
        scales = group.scales[:, group.groups[::32]]
        assert np.array_equal(blocks["d"], scales)
        if not symmetric:
            zeros = group.zeros[:, group.groups[::32]]
            assert np.array_equal(blocks["m"], (-zeros * scales.astype(np.float32)).astype("<f2"))
        heads = file.tensors["blk.0.attn_q.weight"].dequantize()
        q = made["model.layers.0.self_attn.q_proj"].weights.reshape(4, 2, 16, 128)
        wanted = q.swapaxes(1, 2).reshape(128, 128)
        assert np.allclose(heads, wanted, rtol=0, atol=2**-9 * np.abs(wanted).max())
        assert file.tensors["token_embd.weight"].format.name == "F16"


GROUPED: dict[str, tuple[str, Make, dict[str, Any]]] = {
    "gptq": ("llama-linear", packed("gptq"), GPTQ),
    "gptq zeros": ("qwen2", packed("gptq", symmetric=False), {**GPTQ, "sym": False}),
    "gptq v2": (
        *("qwen3", packed("gptq", symmetric=False, offset=0)),
        {**GPTQ, "checkpoint_format": "gptq_v2"},
    ),
    "awq": ("llama-linear", packed("awq", symmetric=False), AWQ),
    "awq fused": ("phi3", packed("awq", symmetric=False), AWQ),
    "compressed": ("llama", packed("compressed"), compressed_config("int", 4)),
    "compressed zeros": (
        *("mistral", packed("compressed", symmetric=False)),
        compressed_config("int", 4, weights={"strategy": "group", "group_size": 32}),
    ),
    "int8": ("llama", bytes_by_row("int8"), compressed_config("int", 8)),
    "int8 fused": ("phi3", bytes_by_row("int8"), compressed_config("int", 8)),
    "fp8": ("gemma3", bytes_by_row("e4m3"), compressed_config("float", 8)),
    "fp8 of one scale": ("qwen2", bytes_by_row("e4m3", True), {"quant_method": "fp8"}),
}


@pytest.mark.parametrize("case", GROUPED)
def test_logits_are_those_of_the_weights(case: str, tmp_path: Path) -> None:
    name, make, quantization = GROUPED[case]
    ours, plain = both(tmp_path, name, make, quantization)
    with File(ours) as file:
        shifted = file.tensors["blk.0.attn_output.weight"].format.name == "Q4_1"
    assert nmse(logits(ours), logits(plain)) <= (NMSE_OF_MINIMUMS if shifted else NMSE)


@pytest.mark.parametrize("case", ["gptq zeros", "awq fused", "compressed zeros"])
def test_nothing_but_minimums_is_rounded(case: str, tmp_path: Path) -> None:
    name, make, quantization = GROUPED[case]

    def rounded(stem: str, w: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
        return make(stem, w)[0], grouped(w, 32, False).rounded

    ours, plain = both(tmp_path, name, rounded, quantization)
    assert nmse(logits(ours), logits(plain)) <= 1e-10


@pytest.mark.parametrize("kind", ["int8", "e4m3"])
def test_bytes_and_scales_are_kept(kind: str, tmp_path: Path) -> None:
    type = "int" if kind == "int8" else "float"
    made: dict[str, np.ndarray] = {}

    def make(stem: str, w: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
        stored, plain = bytes_by_row(kind)(stem, w)
        made.update(stored)
        return stored, plain

    save(tmp_path, "llama-linear", make, compressed_config(type, 8, activations=dynamic(type)))
    with File(to_gguf(tmp_path, tmp_path / "out.gguf", "f16", keep=True)) as file:
        assert file.metadata.get("ggpy.i8", "int8") == file.metadata["ggpy.activations"] == kind
        assert "general.file_type" not in file.metadata
        names = list(file.tensors)
        assert names.index("blk.0.attn_k.weight") == names.index("blk.0.attn_k.scale") + 1
        for ours, theirs, heads in (
            ("attn_k", "self_attn.k_proj", 2),
            ("ffn_up", "mlp.up_proj", 0),
        ):
            values = made[f"model.layers.0.{theirs}.weight"].view(np.uint8)
            scales = made[f"model.layers.0.{theirs}.weight_scale"].reshape(-1)
            order = np.arange(len(values))
            if heads:
                order = order.reshape(heads, 2, -1).swapaxes(1, 2).reshape(-1)
            tensor = file.tensors[f"blk.0.{ours}.weight"]
            assert tensor.format.name == "I8" and np.array_equal(tensor.data, values[order])
            assert np.array_equal(file.tensors[f"blk.0.{ours}.scale"].dequantize(), scales[order])


def test_another_type_rounds_the_weights_again(tmp_path: Path) -> None:
    ours, plain = tmp_path / "a.gguf", tmp_path / "b.gguf"
    for case in ("gptq zeros", "int8"):
        name, make, quantization = GROUPED[case]
        folder = tmp_path / case
        both(folder, name, make, quantization)
        to_gguf(folder / "quantised", ours, "q8_0")
        to_gguf(folder / "plain", plain, "q8_0")
        assert nmse(logits(ours), logits(plain)) <= 1e-3
        with File(ours) as file:
            assert not [name for name in file.tensors if name.endswith(".scale")]
            assert file.tensors["blk.0.ffn_up.weight"].format.name == "Q8_0"


@pytest.mark.parametrize("value", [0.0, 0.5])
def test_biases_of_zeros_are_left_out(value: float, tmp_path: Path) -> None:
    def make(stem: str, w: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
        found, plain = packed("gptq")(stem, w)
        return {**found, f"{stem}.bias": np.full(len(w), value, np.float16)}, plain

    save(tmp_path, "llama-linear", make, GPTQ)
    if value:
        with pytest.raises(ValueError, match=r"has no use for tensor 'model.*_proj\.bias'"):
            to_gguf(tmp_path, tmp_path / "out.gguf", "f16", keep=True)
    else:
        with File(to_gguf(tmp_path, tmp_path / "out.gguf", "f16", keep=True)) as file:
            assert "blk.0.ffn_down.bias" not in file.tensors


def test_a_type_of_a_single_tensor_counts(tmp_path: Path) -> None:
    save(tmp_path, "llama-linear", packed("gptq"), GPTQ)
    folder = Folder(tmp_path)
    config, architecture, kind = read_config(folder)
    with Checkpoint(folder, config["quantization_config"]) as checkpoint:
        model = read_model(folder, config, architecture, kind, checkpoint)
        options = {"tensor_types": [("ffn_down", by_name("Q8_0"))], "output_type": by_name("Q6_K")}
        made = plan(model, mix_of(model, "f16", **options), tmp_path / "out.gguf", keep=True)
    kinds = {choice.source.name: choice.format.name for choice in made.choices}
    assert kinds["blk.0.ffn_down.weight"] == "Q8_0" and kinds["blk.0.ffn_up.weight"] == "Q4_0"


@pytest.mark.parametrize(
    ("file", "content", "make"),
    [
        ("quantize_config.json", {"bits": 4, "group_size": 32, "damp_percent": 0.1}, "gptq"),
        ("quant_config.json", {"w_bit": 4, "q_group_size": 32, "version": "GEMM"}, "awq"),
    ],
)
def test_settings_in_a_file_of_their_own(
    file: str, content: dict[str, Any], make: str, tmp_path: Path
) -> None:
    save(tmp_path, "llama-linear", packed(make), None)
    (tmp_path / file).write_text(json.dumps(content))
    with File(to_gguf(tmp_path, tmp_path / "out.gguf", "f16", keep=True)) as found:
        assert found.tensors["blk.0.ffn_up.weight"].format.name == "Q4_0"
    (tmp_path / file).write_text(json.dumps({**content, "bits": 3}))
    with pytest.raises(ValueError, match=f"{file}: bits = 3 is not supported"):
        Checkpoint(Folder(tmp_path))


# Columns in another order


def shuffled(stem: str, w: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
    g = grouped(w, 32, True)
    g = g._replace(groups=np.random.default_rng(0).permutation(g.groups))
    return gptq(stem, g), g.weights


def test_an_order_of_columns_is_refused_or_rounded_again(tmp_path: Path) -> None:
    plain = save(tmp_path / "a", "llama-linear", shuffled, {**GPTQ, "desc_act": True})
    with pytest.raises(ValueError, match=r"_proj\.weight': its columns are not in .*--type"):
        to_gguf(tmp_path / "a", tmp_path / "out.gguf", "f16", keep=True)
    with File(to_gguf(tmp_path / "a", tmp_path / "out.gguf", "f32")) as file:
        ours = file.tensors["blk.0.ffn_down.weight"].dequantize()
    assert np.array_equal(ours, plain["model.layers.0.mlp.down_proj.weight"])


def test_groups_that_are_no_blocks_are_refused(tmp_path: Path) -> None:
    save(tmp_path, "llama-linear", packed("gptq", 16), {**GPTQ, "group_size": 16})
    with pytest.raises(ValueError, match="groups of 16 columns are no multiples of 32"):
        to_gguf(tmp_path, tmp_path / "out.gguf", "f16", keep=True)


# What is refused


Change = Callable[[dict[str, np.ndarray]], Any]


def without(part: str) -> Change:
    return lambda found: found.pop(next(k for k in found if k.endswith(part)))


def replaced(part: str, change: Callable[[np.ndarray], np.ndarray]) -> Change:
    def apply(found: dict[str, np.ndarray]) -> None:
        key = next(k for k in found if k.endswith(part))
        found[key] = np.ascontiguousarray(change(found[key]))

    return apply


BROKEN: dict[str, tuple[str, dict[str, Any], Change, str]] = {
    "no scales": ("gptq", GPTQ, without(".scales"), "is quantised, but there is no '.*scales'"),
    "no zeros": ("awq", AWQ, without(".qzeros"), "there is no 'model.*qzeros'"),
    "floats": ("gptq", GPTQ, replaced(".qweight", np.float32), "F32 .* expected a matrix of I32"),
    "one axis": ("gptq", GPTQ, replaced(".qweight", np.ravel), "expected a matrix of I32"),
    "half of the zeros": (
        *("gptq", GPTQ, replaced(".qzeros", lambda a: a[:, ::2])),
        r"qzeros' is I32 of shape .*: expected I32 of shape \(2, 8\)",
    ),
    "too few groups": (
        *("gptq", GPTQ, replaced(".scales", lambda a: a[:1])),
        "group_size in config.json says 2 groups of 32 for 64 columns",
    ),
    "a group beyond": (
        *("gptq", GPTQ, replaced(".g_idx", lambda a: a + 9)),
        "expected groups from 0 to 1",
    ),
    "infinite scales": (
        *("gptq", GPTQ, replaced(".scales", lambda a: a * np.float16(np.inf))),
        "row 0 holds a scale that is NaN, infinite",
    ),
    "another method": ("awq", GPTQ, lambda found: None, "24 groups of 32 for 768 columns"),
    "not said": ("gptq", {"quant_method": "fp8"}, lambda found: None, "holds packed codes"),
    "wrong shape": (
        *("compressed", compressed_config("int", 4)),
        replaced(".weight_shape", lambda a: a + 8),
        "weight_shape says 72 x 72 weights of 4 bits",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_parts_that_do_not_fit_are_refused(case: str, tmp_path: Path) -> None:
    kind, quantization, change, message = BROKEN[case]
    first = True

    def make(stem: str, w: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
        nonlocal first
        found, plain = packed(kind)(stem, w)
        if first:
            change(found)
        first = False
        return found, plain

    save(tmp_path / "in", "llama-linear", make, quantization)
    with pytest.raises(ValueError, match=message) as caught:
        to_gguf(tmp_path / "in", tmp_path / "out.gguf", "f16", keep=True)
    assert "\n" not in str(caught.value) and [p.name for p in tmp_path.iterdir()] == ["in"]


BYTES: dict[str, tuple[str, Change, str]] = {
    "no scales": ("int8", without("_scale"), "is I8: only weights in"),
    "no scales of floats": ("e4m3", without("_scale"), "in F8_E4M3, has no scales"),
    "integers": ("int8", replaced("_scale", lambda a: a.astype(np.int32)), "in I8, has no scales"),
    "another axis": (
        *("int8", replaced("_scale", lambda a: a.reshape(1, -1))),
        "expected one scale for each of 64 rows",
    ),
    "groups": (
        *("int8", replaced("_scale", lambda a: np.repeat(a, 2, axis=1))),
        "has 128 scales, which do not fit to blocks of None",
    ),
    "zero points": (
        *("int8", lambda found: found.update(zero_points(found))),
        "zero_point' is I8 of shape .*: bytes with zero points cannot be converted",
    ),
    "NaN": (
        *("e4m3", replaced(".weight", lambda a: np.where(a == a[0, 5], 127, a).astype(np.uint8))),
        r"tensor 'blk\.0\.ffn_down\.weight': row 0 holds NaN or infinity",
    ),
    "infinite scales": (
        *("int8", replaced("_scale", lambda a: a * np.float32(np.inf))),
        r"tensor 'blk\.0\.ffn_down\.scale': row 0 holds NaN or infinity",
    ),
}


def zero_points(found: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    name = next(k for k in found if k.endswith(".weight"))
    return {f"{name}_zero_point": np.ones((64, 1), np.int8)}


@pytest.mark.parametrize("case", BYTES)
def test_bytes_that_do_not_fit_are_refused(case: str, tmp_path: Path) -> None:
    kind, change, message = BYTES[case]

    def make(stem: str, w: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
        found, plain = bytes_by_row(kind)(stem, w)
        if stem.endswith("layers.0.mlp.down_proj"):
            change(found)
        return found, plain

    save(tmp_path / "in", "llama-linear", make, compressed_config("int", 8))
    with pytest.raises(ValueError, match=message):
        to_gguf(tmp_path / "in", tmp_path / "out.gguf", "f16", keep=True)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_zero_points_of_zero_are_none(tmp_path: Path) -> None:
    def make(stem: str, w: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
        found, plain = bytes_by_row("int8")(stem, w)
        return {**found, f"{stem}.weight_zero_point": np.zeros((len(w), 1), np.int8)}, plain

    save(tmp_path, "llama-linear", make, compressed_config("int", 8))
    with File(to_gguf(tmp_path, tmp_path / "out.gguf", "f16", keep=True)) as file:
        assert "blk.0.attn_q.scale" in file.tensors


def test_bytes_of_two_kinds_are_refused(tmp_path: Path) -> None:
    def make(stem: str, w: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
        return bytes_by_row("e4m3" if "mlp" in stem else "int8")(stem, w)

    save(tmp_path / "in", "llama-linear", make, compressed_config("int", 8))
    with pytest.raises(ValueError, match="whole numbers and bytes that are floats: give a --type"):
        to_gguf(tmp_path / "in", tmp_path / "out.gguf", "f16", keep=True)
    to_gguf(tmp_path / "in", tmp_path / "out.gguf", "q8_0")


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({**GPTQ, "bits": 3}, r"quantization_config\.bits = 3 is not supported \(only 4 is\)"),
        ({**GPTQ, "group_size": 0}, "group_size = 0: expected columns of a group, or -1"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format = 'marlin' is not"),
        ({**GPTQ, "dynamic": {"+:.*": {"bits": 8}}}, "dynamic = .* is not supported"),
        ({**AWQ, "version": "gemv"}, "version = 'gemv' is not supported"),
        ({**AWQ, "bits": 4.0}, "bits = 4.0 is not supported"),
        (compressed_config("int", 2), r"group_0\.weights\.num_bits = 2 is not supported"),
        (compressed_config("int", 4, format="marlin-24"), "format = 'marlin-24'"),
        (compressed_config("int", 4, transform_config={"groups": {}}), "transform_config = "),
        (
            compressed_config("int", 4, sparsity_config={"format": "2:4"}),
            r"sparsity_config\.format",
        ),
        ({"quant_method": "compressed-tensors", "config_groups": [1]}, "expected an object"),
        ({"quant_method": "bitsandbytes"}, "weights quantised with 'bitsandbytes' cannot be"),
        ([1], "expected an object"),
    ],
)
def test_configurations_that_are_not_known_are_refused(
    quantization: Any, message: str, tmp_path: Path
) -> None:
    write(tmp_path, "llama-linear")
    with pytest.raises(ValueError, match=message):
        Checkpoint(Folder(tmp_path), quantization)


def test_static_activations_are_said_not_to_be_kept(tmp_path: Path) -> None:
    activations = {**dynamic("int"), "dynamic": False}
    quantization = compressed_config("int", 8, activations=activations)
    save(tmp_path, "llama-linear", bytes_by_row("int8"), quantization)
    folder = Folder(tmp_path)
    config, architecture, kind = read_config(folder)
    with Checkpoint(folder, config["quantization_config"]) as checkpoint:
        model = read_model(folder, config, architecture, kind, checkpoint)
    assert model.kept_as == "W8A16" and "static are not quantised here" in model.warnings[0]
