"""Mixtures of experts: checkpoints with a tensor for each expert, one for all, or MXFP4 codes."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import to_gguf
from moe_checkpoints import FX, MOE_KINDS, D, X, moe_weights_of, write_moe
from quantised_checkpoints import awq, gptq, grouped
from safetensors.numpy import save_file

import ggpy
from ggpy.convert import ConvertError
from ggpy.gguf import File

from .checks import check_greedy_text, check_logits
from .test_model import ADDS, UNKNOWN, described

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "moe"
LOGITS = np.load(GOLDEN / "checkpoints.npz")
THEIRS = json.loads((GOLDEN / "checkpoints.json").read_text(encoding="utf-8"))["files"]
Converted = Callable[[str], Path]
# Where we write more than llama.cpp's converter does
SIZES = {f"llama.attention.{name}_length" for name in ("key", "value")}
OURS = {**dict.fromkeys(MOE_KINDS, ADDS), "mixtral": ADDS | SIZES, "ernie4_5-moe": {UNKNOWN}}
OURS["exaone-moe"] = ADDS | {"exaone-moe.nextn_predict_layers"}  # 0
OURS["qwen3vlmoe"] = {*ADDS, "tokenizer.ggml.padding_token_id"}
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6}
MAGNITUDES = (0, 0.5, 1, 1.5, 2, 3, 4, 6)
E2M1 = np.array([*MAGNITUDES, *(-x for x in MAGNITUDES)], np.float32)


@pytest.fixture(scope="session")
def moe_file(tmp_path_factory: pytest.TempPathFactory) -> Converted:
    """The file in F32 of a kind."""
    root = tmp_path_factory.mktemp("experts")
    return cache(lambda name: to_gguf(write_moe(root / name, name), root / f"{name}.gguf"))


@pytest.mark.parametrize("key", [key for key in LOGITS.files if key.endswith("/logits")])
def test_logits_are_those_of_transformers(key: str, moe_file: Converted) -> None:
    check_logits(moe_file(key.partition("/")[0]), LOGITS, key)


@pytest.mark.parametrize("name", MOE_KINDS)
def test_tensors_and_metadata_are_those_of_llama_cpp(name: str, moe_file: Converted) -> None:
    scalars, arrays, digests = described(moe_file(name))
    theirs = THEIRS[name]
    assert digests == theirs["tensors"]
    for ours, wanted in ((scalars, theirs["metadata"]), (arrays, theirs["arrays"])):
        differing = {k for k in ours.keys() | wanted.keys() if ours.get(k) != wanted.get(k)}
        assert differing - {"tokenizer.ggml.merges"} <= OURS[name]


@pytest.mark.parametrize("name", MOE_KINDS)
def test_llama_cpp_continues_a_text_alike(name: str, moe_file: Converted) -> None:
    check_greedy_text(moe_file(name))


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("bailingmoe2", ("model.layers.2.eh_proj", "model.layers.2.final_layernorm")),
        ("exaone-moe", ("mtp.fc", "mtp.layers.0.self_attn.q_proj")),
    ],
)
def test_blocks_behind_the_layers_are_left_out(
    name: str, parts: tuple[str, ...], tmp_path: Path, moe_file: Converted
) -> None:
    blocks = {f"{part}.weight": np.ones((2, 2), np.float32) for part in parts}
    folder = write_moe(
        tmp_path / name, name, {**moe_weights_of(name), **blocks}, num_nextn_predict_layers=1
    )
    assert to_gguf(folder, tmp_path / "f").read_bytes() == moe_file(name).read_bytes()


def test_experts_in_one_tensor(tmp_path: Path, moe_file: Converted) -> None:
    """Gate above up, as transformers 5 keeps them in memory."""
    weights = moe_weights_of("qwen3moe")
    for i in range(2):
        at = f"model.layers.{i}.mlp.experts."
        names = ("gate_proj", "up_proj", "down_proj")
        gate, up, down = (
            np.stack([weights.pop(f"{at}{e}.{x}.weight") for e in range(X)]) for x in names
        )
        weights |= {at + "gate_up_proj": np.concatenate([gate, up], 1), at + "down_proj": down}
    folder = write_moe(tmp_path / "qwen3moe", "qwen3moe", weights)
    assert to_gguf(folder, tmp_path / "f").read_bytes() == moe_file("qwen3moe").read_bytes()


def test_experts_in_one_tensor_in_the_usual_order(tmp_path: Path, moe_file: Converted) -> None:
    """As transformers 5 saves Qwen3-VL, with a text model that is tied by default, and is not."""
    weights = moe_weights_of("qwen3vlmoe")
    for name in [name for name in weights if ".experts." in name]:
        weights[name] = np.ascontiguousarray(weights[name].swapaxes(1, 2))
    folder = write_moe(tmp_path / "qwen3vlmoe", "qwen3vlmoe", weights)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["tie_word_embeddings"] = True
    (folder / "config.json").write_text(json.dumps(config))
    assert to_gguf(folder, tmp_path / "f").read_bytes() == moe_file("qwen3vlmoe").read_bytes()


def oss_in_mxfp4(folder: Path, exponent: int | None = None) -> dict[str, np.ndarray]:
    """A gpt-oss whose experts are MXFP4 codes; what they stand for, by GGUF name."""
    weights = moe_weights_of("gpt-oss")
    rng, expected = np.random.default_rng(3), {}
    stored: dict[str, np.ndarray] = {}
    for i in range(2):
        for part, rows, columns in (("gate_up_proj", 192, 64), ("down_proj", 64, 96)):
            name = f"model.layers.{i}.mlp.experts.{part}"
            del weights[name]
            codes = rng.integers(0, 16, (X, rows, columns // 32, 16, 2), np.uint8)
            scales = rng.integers(120, 124, (X, rows, columns // 32), np.uint8)
            if exponent is not None and part == "down_proj":
                scales[3, 5, 1] = exponent
            stored[name + "_blocks"] = codes[..., 0] | codes[..., 1] << 4
            stored[name + "_scales"] = scales
            values = E2M1[codes].reshape(*scales.shape, 32)
            powers = np.ldexp(1.0, np.minimum(scales.astype(int), 200) - 127)
            w = (values * powers[..., None]).reshape(X, rows, columns).astype(np.float32)
            parts = {"gate": w[:, ::2], "up": w[:, 1::2]} if "up" in part else {"down": w}
            expected |= {f"blk.{i}.ffn_{x}_exps.weight": v for x, v in parts.items()}
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    write_moe(folder, "gpt-oss", weights, quantization_config=quantization)
    from checkpoints import stored as as_bfloat16

    plain = {name: as_bfloat16(array, "bfloat16") for name, array in weights.items()}
    save_file({**plain, **stored}, folder / "model.safetensors", {"format": "pt"})
    return expected


@pytest.mark.parametrize("keep", [True, False])
def test_mxfp4_is_kept_bit_by_bit(tmp_path: Path, keep: bool) -> None:
    expected = oss_in_mxfp4(tmp_path / "oss")
    type = "bf16" if keep else "f32"
    path = to_gguf(tmp_path / "oss", tmp_path / "out.gguf", type, keep=keep)
    with File(path) as file:
        for name, values in expected.items():
            tensor = file.tensors[name]
            assert tensor.format.name == ("MXFP4" if keep else "F32")
            np.testing.assert_array_equal(tensor.dequantize(), values, err_msg=name)
        assert file.tensors["blk.0.attn_q.weight"].format.name == ("BF16" if keep else "F32")
        assert file.metadata["general.file_type"] == (38 if keep else 0)


def test_mxfp4_scales_that_are_not_numbers(tmp_path: Path) -> None:
    oss_in_mxfp4(tmp_path / "oss", exponent=255)
    with pytest.raises(ConvertError, match=r"experts\.down_proj_scales' has a scale that is NaN"):
        to_gguf(tmp_path / "oss", tmp_path / "out.gguf", keep=True)


EXPERT = "model.layers.0.mlp.experts."
ROW = np.zeros((FX, D), np.float32)
BAD_WEIGHTS: dict[str, tuple[str, dict[str, np.ndarray | None], str]] = {
    "missing": ("qwen3moe", {f"{EXPERT}3.up_proj.weight": None}, r"up_proj.weight' of expert 3"),
    "last": (
        "qwen3moe",
        {f"{EXPERT}7.up_proj.weight": None},
        r"up_proj.weight' has the shape \(7, 32, 64\), config.json says \(8, 32, 64\)",
    ),
    "shapes": ("qwen3moe", {f"{EXPERT}3.up_proj.weight": ROW[:16]}, r"has the shapes \[\(16, 64"),
    "bias": (
        "qwen3moe",
        {f"{EXPERT}{i}.up_proj.bias": ROW[0] for i in range(X)},
        r"up_proj.bias' has the shapes \[\(64,\)\]: one of two axes",
    ),
    "odd": (
        "gpt-oss",
        {EXPERT + "gate_up_proj": np.zeros((X, D, 191), np.float32)},
        r"shape \(8, 64, 191\), expected 3 axes",
    ),
    "axes": ("gpt-oss", {EXPERT + "down_proj": ROW}, "expected 3 axes, experts first"),
    "no scales": (
        "gpt-oss",
        {EXPERT + "down_proj_blocks": np.zeros((X, D, 3, 16), np.float32)},
        "down_proj_blocks', BF16 .* has no scales that fit",
    ),
    "unknown": ("mixtral", {EXPERT + "0.w9.weight": ROW}, "llama has no use|no use for tensor"),
}


@pytest.mark.parametrize("case", BAD_WEIGHTS.values(), ids=BAD_WEIGHTS)
def test_weights_that_do_not_fit(case: Any, tmp_path: Path) -> None:
    name, changes, message = case
    found = {**moe_weights_of(name), **changes}
    weights = {key: array for key, array in found.items() if array is not None}
    with pytest.raises(ConvertError, match=message):
        to_gguf(write_moe(tmp_path / "bad", name, weights), tmp_path / "out.gguf")


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("qwen3moe", {"norm_topk_prob": False}, "norm_topk_prob = False is not supported"),
        ("qwen3moe", {"decoder_sparse_step": 2}, "decoder_sparse_step = 2 is not supported"),
        ("qwen3moe", {"mlp_only_layers": [1]}, r"mlp_only_layers = \[1\] is not supported"),
        ("qwen3moe", {"num_experts_per_tok": 9}, "expert_used_count = 9: expected between 1 and 8"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv = 8.0 is not supported"),
        ("olmoe", {"norm_topk_prob": True}, "norm_topk_prob = True is not supported"),
        ("qwen3vlmoe", {"norm_topk_prob": False}, "norm_topk_prob = False is not supported"),
        ("qwen2moe", {"norm_topk_prob": True}, "norm_topk_prob = True is not supported"),
        ("glm4moe", {"num_nextn_predict_layers": 0}, r"no use for tensor 'model\.layers\.2\."),
        ("glm4moe", {"norm_topk_prob": "yes"}, "norm_topk_prob = 'yes': expected true or false"),
        ("bailingmoe2", {"score_function": "softmax"}, "score_function = 'softmax' is not suppor"),
        ("bailingmoe2", {"num_shared_experts": 2}, "num_shared_experts = 2 is not supported"),
        ("dots1", {"sliding_window": 8, "max_window_layers": 1}, "1 layers would have a window"),
        ("exaone-moe", {"is_moe_layer": [False] * 4}, "1 dense layers and then experts are"),
        ("exaone-moe", {"rope_parameters": LINEAR}, "rope that is not scaled is"),
        ("ernie4_5-moe", {"moe_layer_end_index": 0}, "moe_layer_end_index = 0 is not supported"),
        ("ernie4_5-moe", {"moe_layer_interval": 3}, "interleave_moe_layer_step = 3: expected"),
        ("hunyuan-moe", {"moe_topk": [2, 1]}, r"moe_topk = \[2, 1\] is not supported: one number"),
        ("hunyuan-moe", {"moe_intermediate_size": [16, 16]}, "intermediate_size is 96, and exper"),
        ("hunyuan-moe", {"num_shared_expert": [2, 2]}, "num_shared_expert = .* not supported"),
        ("minimax-m2", {"scoring_func": "softmax"}, "scoring_func = 'softmax' is not supported"),
        ("minimax-m2", {"attn_type_list": [0, 1]}, r"attn_type_list = \[0, 1\] is not supported"),
        ("gpt-oss", {"swiglu_limit": 5.0}, "swiglu_limit = 5.0 is not supported"),
        (
            "gpt-oss",
            {"layer_types": ["full_attention"] * 2},
            "layer_types = .* is not supported: windows in every second",
        ),
    ],
)
def test_settings_that_are_not_supported(
    name: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises((ConvertError, ggpy.GGUFError), match=message):
        to_gguf(write_moe(tmp_path / "bad", name, **changes), tmp_path / "out.gguf")


def test_ends_of_the_ramp_may_be_told_not_to_be_rounded(
    tmp_path: Path, moe_file: Converted
) -> None:
    """gpt-oss asks for that; a file cannot say it, and no runtime of files does it."""
    rope = {**MOE_KINDS["gpt-oss"].config["rope_parameters"], "truncate": False}
    folder = write_moe(tmp_path / "gpt-oss", "gpt-oss", rope_parameters=rope)
    assert to_gguf(folder, tmp_path / "f").read_bytes() == moe_file("gpt-oss").read_bytes()


def test_quantised_in_one_go(tmp_path: Path, moe_file: Converted) -> None:
    """Q4_K_M as `ggpy quantize` makes it of the F32 file: each expert is quantised by itself."""
    from ggpy.quantization.requantize import mix_for, plan, write
    from ggpy.quantization.workers import Workers

    folder = write_moe(tmp_path / "mixtral", "mixtral")
    with File(moe_file("mixtral")) as file, Workers(1) as workers:
        for _ in write(plan(file, mix_for(file, "q4_k_m")), tmp_path / "again.gguf", workers):
            pass
    once, again = (
        described(path)[2]
        for path in (to_gguf(folder, tmp_path / "out.gguf", "q4_k_m"), tmp_path / "again.gguf")
    )
    assert once == again
    with File(tmp_path / "out.gguf") as file:
        kinds = {n: t.format.name for n, t in file.tensors.items()}
    assert kinds["blk.0.ffn_gate_inp.weight"] == "F32"
    assert kinds["blk.0.attn_k.weight"] == "Q8_0"  # of eight experts
    assert kinds["blk.0.ffn_up_exps.weight"] == "Q5_0"  # whose rows are no blocks of 256


@pytest.mark.parametrize(
    ("type", "experts"), [("w8a8", "Q8_0"), ("w8a16_fp8", "Q8_0"), ("w4a16", "Q4_0")]
)
def test_scales_of_rows_beside_experts_in_blocks(
    type: str, experts: str, tmp_path: Path, moe_file: Converted
) -> None:
    """Experts have no scales of rows; converted and quantised files are equal, and run."""
    from ggpy.quantization.requantize import mix_for, plan, write
    from ggpy.quantization.workers import Workers

    path = to_gguf(write_moe(tmp_path / "a", "qwen3moe"), tmp_path / "out.gguf", type)
    with File(moe_file("qwen3moe")) as file, Workers(1) as workers:
        for _ in write(plan(file, mix_for(file, type)), tmp_path / "again.gguf", workers):
            pass
    assert described(path)[2] == described(tmp_path / "again.gguf")[2]
    with File(path) as file:
        names = {name for name in file.tensors if name.startswith("blk.0.ffn_")}
        assert {file.tensors[n].format.name for n in names if "_exps" in n} == {experts}
        assert "blk.0.attn_q.scale" in file.tensors and not any(n.endswith("scale") for n in names)
    with ggpy.load(str(path), device="cpu", n_ctx=64) as model:
        assert len(list(model.generate([5, 300, 17], max_tokens=3, temperature=0))) == 3


@pytest.mark.parametrize("symmetric", [True, False])
def test_codes_of_experts_are_kept(symmetric: bool, tmp_path: Path) -> None:
    """AWQ's, and GPTQ's with zero points of 8, as of any other matrix."""
    arrays, wanted = {}, {}
    for name, w in moe_weights_of("mixtral").items():
        arrays[name] = w
        if ".experts." in name:
            del arrays[name]
            group = grouped(w, 32, symmetric)
            stem = name.removesuffix(".weight")
            arrays |= gptq(stem, group) if symmetric else awq(stem, group)
            wanted[name] = group.rounded
    kind = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
    if not symmetric:
        kind = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}
    folder = write_moe(tmp_path / "a", "mixtral", quantization_config=kind, torch_dtype="float16")
    for part in folder.glob("model*"):
        part.unlink()
    save_file(arrays, folder / "model.safetensors")
    with File(to_gguf(folder, tmp_path / "out.gguf", "f16", keep=True)) as file:
        experts = file.tensors["blk.1.ffn_down_exps.weight"]
        assert experts.format.name == ("Q4_0" if symmetric else "Q4_1")
        for e, weights in enumerate(experts.dequantize()):
            theirs = wanted[f"model.layers.1.block_sparse_moe.experts.{e}.w2.weight"]
            np.testing.assert_array_equal(weights, theirs)
