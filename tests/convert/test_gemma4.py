"""Gemma 4's checkpoints: the logits of transformers, llama.cpp's metadata, bytes and texts."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import to_gguf
from gemma4_checkpoints import GEMMA4_KINDS, MARKS, gemma4_weights_of, write_gemma4

import ggpy
from ggpy.arch.config import UnsupportedModel
from ggpy.convert import ConvertError
from ggpy.gguf import File
from ggpy.tokenizer import TokenType

from .checks import check_greedy_text, check_logits
from .test_model import described

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "gemma4"
LOGITS = np.load(GOLDEN / "checkpoints.npz")
THEIRS = json.loads((GOLDEN / "checkpoints.json").read_text(encoding="utf-8"))["files"]
UNKNOWN = "tokenizer.ggml.unknown_token_id"  # tokenizer.json knows it
EXPERTS = "gemma4-experts"
Converted = Callable[[str], Path]


@pytest.fixture(scope="module")
def gemma4_file(tmp_path_factory: pytest.TempPathFactory) -> Converted:
    """The file in F32 of a kind."""
    root = tmp_path_factory.mktemp("gemma4")
    return cache(lambda name: to_gguf(write_gemma4(root / name, name), root / f"{name}.gguf"))


@pytest.mark.parametrize("key", [key for key in LOGITS.files if key.endswith("/logits")])
def test_logits_are_those_of_transformers(key: str, gemma4_file: Converted) -> None:
    check_logits(gemma4_file(key.partition("/")[0]), LOGITS, key)


@pytest.mark.parametrize("name", GEMMA4_KINDS)
def test_tensors_and_metadata_are_those_of_llama_cpp(name: str, gemma4_file: Converted) -> None:
    scalars, arrays, digests = described(gemma4_file(name))
    theirs = THEIRS[name]
    assert digests == theirs["tensors"]
    assert scalars == theirs["metadata"] and arrays == theirs["arrays"]


@pytest.mark.parametrize("name", GEMMA4_KINDS)
def test_llama_cpp_continues_a_text_alike(name: str, gemma4_file: Converted) -> None:
    check_greedy_text(gemma4_file(name))


def test_tokens_are_merged_of_characters(gemma4_file: Converted) -> None:
    """What tells the parts of an answer apart is visible, what ends a turn is not."""
    with File(gemma4_file("gemma4-kv")) as file:
        texts = file.metadata["tokenizer.ggml.tokens"]
        types = file.metadata["tokenizer.ggml.token_type"]
        assert file.metadata["tokenizer.ggml.model"] == "gemma4"
    kinds = {text: types[texts.index(text)] for text in MARKS}
    control = {"<|turn>", "<turn|>", "<|think|>"}
    assert {text for text, kind in kinds.items() if kind == TokenType.CONTROL} == control
    assert {kinds[text] for text in kinds if text not in control} == {TokenType.USER_DEFINED}
    with ggpy.load(str(gemma4_file("gemma4-kv")), device="cpu", n_ctx=64) as model:
        ids = model.tokenizer.encode("a <|channel>b\n")
        assert texts.index("<|channel>") in ids and texts.index("<0x0A>") in ids


@pytest.mark.parametrize(
    ("kind", "name"),
    [("Gemma4", "gemma4-kv"), ("Gemma4Unified", "gemma4-kv"), ("Gemma4", "gemma4-experts")],
)
def test_a_text_model_beside_others_is_taken_out(
    kind: str, name: str, tmp_path: Path, gemma4_file: Converted
) -> None:
    """Names and settings lie a level deeper; sizes of some layers may stand in an object."""
    from checkpoints import config_of, write_weights

    folder = write_gemma4(tmp_path / name, name)
    unused = ("architectures", "hidden_size_per_layer_input", "vocab_size_per_layer_input")
    text = {
        k: v
        for k, v in config_of(GEMMA4_KINDS[name]).items()
        if k not in unused[: 1 + 2 * (kind != "Gemma4")]
    }
    own = {"head_dim": text.pop("global_head_dim")}
    own["num_key_value_heads"] = text.pop("num_global_key_value_heads")
    text["per_layer_config"] = {str(text["num_hidden_layers"] - 1): own}
    top = {"architectures": [f"{kind}ForConditionalGeneration"], "model_type": "gemma4"}
    top |= {"text_config": text, "vision_config": {"hidden_size": 8}, "image_token_id": 4}
    (folder / "config.json").write_text(json.dumps(top))
    weights = {k.replace("model.", "model.language_model.", 1): v
               for k, v in gemma4_weights_of(name).items()}  # fmt: skip
    weights |= {f"model.{x}.w.weight": np.ones((2, 2), np.float32)
                for x in ("vision_tower", "vision_embedder", "embed_audio")}  # fmt: skip
    write_weights(folder, weights, "float32")
    ours = described(to_gguf(folder, tmp_path / "out.gguf"))
    assert ours[1:] == described(gemma4_file(name))[1:]


def test_experts_each_in_tensors_of_its_own(tmp_path: Path, gemma4_file: Converted) -> None:
    """Gate and up are two tensors in the file then, and the logits are the same."""
    weights = gemma4_weights_of(EXPERTS)
    for name in [name for name in weights if ".experts." in name]:
        stem, part = name.rsplit(".", 1)
        for e, matrix in enumerate(weights.pop(name)):
            names = ("gate_proj", "up_proj") if part == "gate_up_proj" else (part,)
            for one, rows in zip(names, np.split(matrix, len(names)), strict=True):
                weights[f"{stem}.{e}.{one}.weight"] = rows
    folder = write_gemma4(tmp_path / EXPERTS, EXPERTS, weights)
    path = to_gguf(folder, tmp_path / "out.gguf")
    with File(path) as file, File(gemma4_file(EXPERTS)) as together:
        parts = [file.tensors[f"blk.0.ffn_{x}_exps.weight"].data for x in ("gate", "up")]
        whole = together.tensors["blk.0.ffn_gate_up_exps.weight"].data
        assert np.concatenate(parts, axis=1).tobytes() == whole.tobytes()
    check_logits(path, LOGITS, f"{EXPERTS}/40/logits")


def test_experts_are_quantised_with_scales_of_their_own(
    tmp_path: Path, gemma4_file: Converted
) -> None:
    """Q4_K_M as `ggpy quantize` makes it of the F32 file; scales of experts are none of rows."""
    from ggpy.quantization.requantize import mix_for, plan, write
    from ggpy.quantization.workers import Workers

    once = to_gguf(write_gemma4(tmp_path / EXPERTS, EXPERTS), tmp_path / "once.gguf", "q4_k_m")
    with File(gemma4_file(EXPERTS)) as file, Workers(1) as workers:
        for _ in write(plan(file, mix_for(file, "q4_k_m")), tmp_path / "again.gguf", workers):
            pass
    assert described(once)[2] == described(tmp_path / "again.gguf")[2]
    with File(once) as file:
        types = {name: tensor.format.name for name, tensor in file.tensors.items()}
    assert types["blk.0.ffn_gate_up_exps.weight"] == "Q5_0"  # rows are no blocks of 256
    assert types["blk.0.ffn_down_exps.scale"] == types["blk.0.ffn_gate_inp.weight"] == "F32"
    with ggpy.load(str(once), device="cpu", n_ctx=64) as model:
        assert len(list(model.generate([5, 300, 17], max_tokens=3, temperature=0))) == 3


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_experts": 4}, "has the shape (8, 64, 32), config.json says (4, 64, 32)"),
        ({"top_k_experts": 9}, "expert_used_count = 9: expected between 1 and 8"),
        ({"moe_intermediate_size": 16}, "has the shape (8, 64, 32), config.json says (8, 64, 16)"),
        ({"enable_moe_block": False}, "gemma4 has no use for tensor"),
        ({"enable_moe_block": "yes"}, "enable_moe_block = 'yes': expected true or false"),
    ],
)
def test_settings_of_experts_that_do_not_fit(
    changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    folder = write_gemma4(tmp_path / "a", EXPERTS, **changes)
    with pytest.raises((ConvertError, ggpy.GGUFError)) as info:
        to_gguf(folder, tmp_path / "out.gguf")
    assert said in str(info.value)


def test_experts_that_are_missing(tmp_path: Path) -> None:
    weights = gemma4_weights_of(EXPERTS)
    del weights["model.layers.1.experts.gate_up_proj"]
    with pytest.raises(ConvertError, match=r"no tensor for 'blk\.1\.ffn_gate_exps\.weight'"):
        to_gguf(write_gemma4(tmp_path / "a", EXPERTS, weights), tmp_path / "out.gguf")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention = 'all'"),
        ({"vocab_size_per_layer_input": 500}, "only 512, as vocab_size, is"),
        (
            {"num_kv_shared_layers": 5},
            "layer 1 shares keys and values, but no layer with no window",
        ),
        ({"num_kv_shared_layers": 6}, "num_kv_shared_layers = 6: expected between 0 and 5"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "rope_type = 'yarn'"),
        (
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
            "rope_type = 'linear'",
        ),
        ({"per_layer_config": {"1": {"head_dim": 32}, "3": {"head_dim": 64}}}, "one head_dim of"),
        ({"global_head_dim": 64}, "has the shape (32,), config.json says (64,)"),
        ({"hidden_activation": "silu"}, "hidden_activation = 'silu'"),
        ({"altup_num_inputs": 4}, "altup_num_inputs = 4"),
    ],
)
def test_settings_that_a_file_cannot_have(
    changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    folder = write_gemma4(tmp_path / "a", "gemma4-inputs", **changes)
    with pytest.raises((UnsupportedModel, ConvertError, ggpy.GGUFError)) as info:
        to_gguf(folder, tmp_path / "out.gguf")
    assert said in str(info.value)
