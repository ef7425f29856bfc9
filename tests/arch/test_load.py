"""What a loader owes: every tensor and setting is checked before any weight is handed over."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ggpy import arch
from ggpy.arch.config import Config, UnsupportedModel
from ggpy.backends.numpy.backend import Reference
from ggpy.gguf import File, GGUFError
from tools import make_tiny


class Untouched(Reference):
    """Fails when it is given a weight."""

    def weight(self, tensor, lookup=False, scale=None, activations="f16"):
        raise AssertionError(f"{tensor.name} was handed over")


def load(path, n_ctx=64):
    with File(path) as file:
        return arch.load(file, Untouched(1), n_ctx)


def zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


REFUSED_SETTINGS = {
    # key, value -> what the message must say
    ("expert_count", 8): r"llama.expert_count = 8 is not supported \(only 0 is\)",
    ("rope.scaling.type", "magic"): "llama.rope.scaling.type = 'magic' is not supported .*yarn",
    ("expert_used_count", (0, 0)): r"expert_used_count = \[0, 0\] is not supported",
    ("rope.scaling.type", 3): "= 3 is not supported",
    ("attention.causal", False): "attention.causal = False",
    ("attention.clamp_kqv", 5.0): "clamp_kqv = 5.0",
    ("attention.max_alibi_bias", 8.0): "max_alibi_bias = 8.0",
    ("hidden_activation", "relu"): "hidden_activation = 'relu' is not supported .only silu",
    ("logit_scale", 0.5): "logit_scale = 0.5",
    ("use_parallel_residual", True): "use_parallel_residual = True",
    ("attention.q_lora_rank", 64): "not supported: llama.attention.q_lora_rank = 64",
    ("something.unheard_of", "x"): "not supported: llama.something.unheard_of = 'x'",
    ("attention.value_length", 8): "heads of 16 for keys and 8 for values",
    ("attention.head_count_kv", (2, 1)): r"head_count_kv = \[2, 1\] differs from layer to layer",
}
BAD_SETTINGS = {
    ("block_count", None): "llama.block_count is missing",
    ("block_count", 0): "llama.block_count = 0: expected between 1 and 4096",
    ("block_count", 3): "llama needs tensor 'blk.2.attn_norm.weight' and 8 more",
    ("block_count", 1): "has no use for tensor 'blk.1.",
    ("block_count", "two"): "block_count = 'two': expected an integer",
    ("embedding_length", True): "embedding_length = True: expected an integer",
    ("embedding_length", 32): r"shape \(453, 64\), the settings say \(453, 32\)",
    ("embedding_length", 1 << 30): "embedding_length = 1073741824: expected between",
    (
        "feed_forward_length",
        95,
    ): r"'blk.0.ffn_gate.weight' has shape \(96, 64\), the settings say \(95, 64\)",
    ("attention.head_count", 3): "3 query heads cannot share 2 key/value heads evenly",
    ("attention.head_count", 0): "head_count = 0",
    ("attention.head_count_kv", 1): r"'blk.0.attn_k.weight' has shape",
    ("attention.layer_norm_rms_epsilon", -1.0): "rms_epsilon = -1.0",
    ("attention.layer_norm_rms_epsilon", math.nan): "rms_epsilon = nan",
    ("attention.layer_norm_rms_epsilon", None): "layer_norm_rms_epsilon is missing",
    ("context_length", 0): "context_length = 0",
    ("vocab_size", 454): "vocab_size is 454, but the embedding table has 453 rows",
    ("rope.dimension_count", 15): "rope.dimension_count = 15 is odd",
    ("rope.dimension_count", 32): "rope.dimension_count = 32: expected between 2 and 16",
    ("rope.freq_base", 0.0): "rope.freq_base = 0.0",
    ("rope.freq_base", math.inf): "rope.freq_base = inf",
}


@pytest.mark.parametrize("setting, message", {**REFUSED_SETTINGS, **BAD_SETTINGS}.items())
def test_settings(setting, message, tmp_path):
    key, value = setting
    settings = {key: list(value) if isinstance(value, tuple) else value}
    path = make_tiny.write(tmp_path / "t.gguf", "llama", settings)
    expected = UnsupportedModel if setting in REFUSED_SETTINGS else GGUFError
    with pytest.raises(expected, match=message) as error:
        load(path)
    assert "t.gguf" in str(error.value) and "\n" not in str(error.value)


def test_harmless_settings_are_accepted(tmp_path):
    harmless = {
        "rope.scaling.finetuned": False,
        "pooling_type": 3,
        "expert_count": 0,
        "logit_scale": 1.0,
        "attention.causal": True,
        "hidden_activation": "silu",
        "vocab_size": 453,
        "attention.head_count_kv": [2, 2],
    }
    with File(make_tiny.write(tmp_path / "t.gguf", "llama", harmless)) as file:
        assert arch.load(file, Reference(1), 64).sizes.n_head_kv == 2


BAD_TENSORS = {
    "missing": ("blk.1.ffn_up.weight", None, "llama needs tensor 'blk.1.ffn_up.weight'$"),
    "shape": (
        "blk.1.attn_q.weight",
        zeros(64, 32),
        r"has shape \(64, 32\), the settings say \(64, 64\)",
    ),
    "1-d": ("blk.0.attn_q.weight", zeros(64), r"has shape \(64,\)"),
    "unknown": ("blk.0.attn_output.bias", zeros(64), "no use for tensor 'blk.0.attn_output.bias'"),
    "experts": (
        "blk.0.ffn_gate_inp.weight",
        zeros(8, 64),
        "no use for .* this variant is not supp",
    ),
    "table": ("token_embd.weight", None, "token_embd.weight, the embedding table, is missing"),
    "flat table": ("token_embd.weight", zeros(64), "is missing or no matrix"),
    "rope": ("rope_freqs.weight", zeros(4), r"'rope_freqs.weight' has shape \(4,\)"),
    "rope 0": (
        "rope_freqs.weight",
        zeros(8),
        "'rope_freqs.weight' has a factor that is not positive",
    ),
    "vocabulary": (
        "token_embd.weight",
        zeros(400, 64),
        "453 tokens, but the embedding table has 400",
    ),
}


@pytest.mark.parametrize("name, array, message", BAD_TENSORS.values(), ids=BAD_TENSORS)
def test_tensors(name, array, message, tmp_path):
    with pytest.raises(GGUFError, match=message):
        load(make_tiny.write(tmp_path / "t.gguf", "llama", tensors={name: array}))


@pytest.mark.parametrize("id", [-1, 453, "x"])
def test_special_ids_are_in_the_vocabulary(id, tmp_path):
    metadata = {"tokenizer.ggml.eos_token_id": str(id) if id == "x" else id}
    if id == -1:
        metadata = {"tokenizer.ggml.eos_token_id": 0xFFFFFFFF}
    path = make_tiny.write(tmp_path / "t.gguf", "llama", metadata=metadata)
    with pytest.raises(GGUFError, match=r"eos_token_id = .*: ids go from 0 to 452"):
        load(path)


def test_scales_that_are_not_finite_are_refused_before_anything_is_uploaded(tmp_path):
    weights = zeros(64)
    weights[5] = np.inf
    path = make_tiny.write(tmp_path / "t.gguf", "llama", tensors={"output_norm.weight": weights})
    with pytest.raises(GGUFError, match=r"output_norm\.weight"):
        load(path)


def test_an_unknown_architecture_lists_what_exists(tmp_path):
    path = make_tiny.write(tmp_path / "t.gguf", "llama")
    data = path.read_bytes().replace(b"llama", b"mamba", 1)
    path.write_bytes(data)
    expected = "architecture 'mamba' is not supported; supported are: gemma2, gemma3, llama, phi3"
    with pytest.raises(UnsupportedModel, match=expected):
        load(path)


def test_phi3_may_have_its_tensors_apart(tmp_path):
    m = make_tiny.MODELS["phi3"]
    base = make_tiny.tensors_of(m, 453)
    apart: dict = {}
    for i in range(m.n_layer):
        qkv, up = base[f"blk.{i}.attn_qkv.weight"], base[f"blk.{i}.ffn_up.weight"]
        parts = np.split(qkv, [64, 96])
        apart |= {f"blk.{i}.attn_{c}.weight": p for c, p in zip("qkv", parts, strict=True)}
        apart |= {f"blk.{i}.ffn_gate.weight": up[:96], f"blk.{i}.ffn_up.weight": up[96:]}
        apart[f"blk.{i}.attn_qkv.weight"] = None
    split = make_tiny.write(tmp_path / "apart.gguf", "phi3", tensors=apart)
    fused = make_tiny.write(tmp_path / "fused.gguf", "phi3", tensors={k: base[k] for k in base})
    shapes = []
    for path in (split, fused):
        with File(path) as file:
            decoder = arch.load(file, Reference(1), 64)
            shapes.append(
                [decoder.layers[1].attention.wv.array, decoder.layers[1].feed_forward.w_up.array]
            )
    for a, b in zip(*shapes, strict=True):
        np.testing.assert_allclose(a, b, atol=0.01)
    wrong = make_tiny.write(
        tmp_path / "w.gguf", "phi3", tensors={"blk.0.attn_qkv.weight": zeros(100, 64)}
    )
    with pytest.raises(
        GGUFError, match=r"'blk.0.attn_qkv.weight' has 100 rows, its parts have 128"
    ):
        load(wrong)


@pytest.mark.parametrize(
    "pattern, windows", [([True, False], [8, 0]), ([False, True], [0, 8]), (0, [8, 8])]
)
def test_gemma3_window_patterns(pattern, windows, tmp_path):
    settings = {"attention.sliding_window_pattern": pattern}
    with File(make_tiny.write(tmp_path / "t.gguf", "gemma3", settings)) as file:
        assert arch.load(file, Reference(1), 64).plan.windows == windows


def test_gemma3_refuses_a_pattern_that_does_not_cover_the_layers(tmp_path):
    path = make_tiny.write(
        tmp_path / "t.gguf", "gemma3", {"attention.sliding_window_pattern": [True]}
    )
    with pytest.raises(UnsupportedModel, match="one bool for each of 2 layers"):
        load(path)


def test_the_table_is_looked_up_only_where_there_is_an_output(tiny_path):
    class Recording(Reference):
        def weight(self, tensor, lookup=False, scale=None, activations="f16"):
            looked_up[tensor.name] = lookup
            return super().weight(tensor, lookup)

    for architecture, tied in (("llama", False), ("qwen3", True)):
        looked_up: dict[str, bool] = {}
        with File(tiny_path(architecture)) as file:
            decoder = arch.load(file, Recording(1), 64)
        assert [n for n, x in looked_up.items() if x] == ([] if tied else ["token_embd.weight"])
        assert (decoder.head.weight is decoder.table) == tied


def test_config_names_every_unread_setting_but_not_endlessly():
    metadata = {f"a.k{i}": i for i in range(6)} | {"b.other": 1}
    config = Config(metadata, "a", "file")
    assert config.integer("k1") == 1
    with pytest.raises(
        UnsupportedModel, match=r"file: not supported: a.k0 = 0, a.k2 = 2, .*, \.\.\.$"
    ):
        config.refuse_unread()
