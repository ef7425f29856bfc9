"""Checkpoints with gated delta nets: transformers' logits, llama.cpp's bytes and its texts."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import to_gguf
from hybrid_checkpoints import HYBRID_KINDS, D, F, hybrid_weights_of, write_hybrid

import ggpy
from ggpy.arch.config import UnsupportedModel
from ggpy.convert import ConvertError
from ggpy.gguf import GGUFError

from .checks import check_greedy_text, check_logits
from .test_model import ADDS, described

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "hybrid"
LOGITS = np.load(GOLDEN / "checkpoints.npz")
THEIRS = json.loads((GOLDEN / "checkpoints.json").read_text(encoding="utf-8"))["files"]
Converted = Callable[[str], Path]
PADDING = "tokenizer.ggml.padding_token_id"  # llama.cpp finds none beside images


@pytest.fixture(scope="session")
def hybrid_file(tmp_path_factory: pytest.TempPathFactory) -> Converted:
    """The file in F32 of a kind."""
    root = tmp_path_factory.mktemp("hybrid")
    return cache(lambda name: to_gguf(write_hybrid(root / name, name), root / f"{name}.gguf"))


@pytest.mark.parametrize("key", [key for key in LOGITS.files if key.endswith("/logits")])
def test_logits_are_those_of_transformers(key: str, hybrid_file: Converted) -> None:
    check_logits(hybrid_file(key.partition("/")[0]), LOGITS, key)


@pytest.mark.parametrize("name", HYBRID_KINDS)
def test_tensors_and_metadata_are_those_of_llama_cpp(name: str, hybrid_file: Converted) -> None:
    scalars, arrays, digests = described(hybrid_file(name))
    theirs = THEIRS[name]
    assert digests.keys() == theirs["tensors"].keys()
    other = {key for key, digest in digests.items() if digest != theirs["tensors"][key]}
    assert all(key.endswith("ssm_a") for key in other), "of which exp may differ in the last bit"
    for ours, wanted in ((scalars, theirs["metadata"]), (arrays, theirs["arrays"])):
        differing = {k for k in ours.keys() | wanted.keys() if ours.get(k) != wanted.get(k)}
        assert differing - {"tokenizer.ggml.merges", PADDING} <= ADDS


@pytest.mark.parametrize("name", HYBRID_KINDS)
def test_llama_cpp_continues_a_text_alike(name: str, hybrid_file: Converted) -> None:
    check_greedy_text(hybrid_file(name))


def test_the_block_that_predicts_further_tokens_is_left_out(
    tmp_path: Path, hybrid_file: Converted
) -> None:
    weights = hybrid_weights_of("qwen35")
    more = {"mtp.fc.weight": (D, 2 * D), "mtp.norm.weight": (D,)}
    more |= {"mtp.layers.0.mlp.up_proj.weight": (F, D), "model.visual.patch.weight": (2, 2)}
    weights |= {name: np.ones(shape, np.float32) for name, shape in more.items()}
    folder = write_hybrid(tmp_path / "qwen35", "qwen35", weights, mtp_num_hidden_layers=1)
    assert to_gguf(folder, tmp_path / "f").read_bytes() == hybrid_file("qwen35").read_bytes()


def test_other_types_of_files(tmp_path: Path, hybrid_file: Converted) -> None:
    """Taps stay floats, and what is computed of a checkpoint is rounded once."""
    folder = write_hybrid(tmp_path / "qwen35", "qwen35")
    path = to_gguf(folder, tmp_path / "q8.gguf", "q8_0")
    ids = LOGITS["qwen35/40/ids"].tolist()
    with ggpy.load(str(path), device="cpu", n_ctx=64) as model:
        assert {t.format.name for n, t in model.file.tensors.items() if "conv1d" in n} == {"F32"}
        got = model.logits(ids)[-1]
    wanted = LOGITS["qwen35/40/logits"][-1]
    assert 1e-6 < np.square(got - wanted).sum() / np.square(wanted).sum() < 1e-2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attn_output_gate": False}, r"attn_output_gate = False"),
        ({"linear_value_head_dim": 32}, r"linear_value_head_dim = 32.* only that of keys, 16"),
        ({"linear_num_value_heads": 5}, r"time_step_rank = 5: .* 2 key heads"),
        ({"linear_conv_kernel_dim": 1}, r"linear_conv_kernel_dim = 1"),
        ({"layer_types": ["full_attention"] * 3}, r"layer_types.* one type for each layer"),
        ({"layer_types": ["mamba"] * 4}, r"layer_types.* only linear_attention and full_att"),
        ({"layer_types": ["linear_attention"] * 4}, r"none of 4 layers attends"),
        ({"hidden_act": "gelu"}, r"hidden_act"),
        ({"linear_key_norm": True}, r"linear_key_norm = True"),
    ],
)
def test_settings_are_refused_by_name(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = write_hybrid(tmp_path / "qwen35", "qwen35", **changes)
    with pytest.raises((ConvertError, UnsupportedModel, GGUFError), match=message):
        to_gguf(folder, tmp_path / "out.gguf")


def test_tensors_of_another_shape_are_refused(tmp_path: Path) -> None:
    weights = hybrid_weights_of("qwen35")
    name = "model.layers.0.linear_attn.conv1d.weight"
    folder = write_hybrid(tmp_path / "a", "qwen35", {**weights, name: weights[name][:, :, :3]})
    with pytest.raises(ConvertError, match=r"conv1d.weight' has the shape \(160, 1, 3\)"):
        to_gguf(folder, tmp_path / "out.gguf")
