"""What a loader owes: every tensor and setting is checked before any weight is handed over."""

from __future__ import annotations

import math

import numpy as np
import plain_layers
import pytest

from ggpy import arch
from ggpy.arch import hunyuan_dense
from ggpy.arch.architecture import (
    LAYER_NORM_BIAS,
    NORM_BIAS,
    OUTPUT,
    Architecture,
    Context,
    LayerSettings,
    ModelSettings,
)
from ggpy.arch.config import Config, Dimensions, LayerSizes, UnsupportedModel
from ggpy.arch.layers.attention import OUTPUT_BIAS, AttentionSettings
from ggpy.arch.layers.dense import DenseSettings
from ggpy.arch.loader import build
from ggpy.arch.rope import build_rope, read_rope
from ggpy.backends.interface import Role
from ggpy.backends.numpy.backend import Reference
from ggpy.bench.runs import NoText
from ggpy.gguf import File, GGUFError
from ggpy.runtime.engine import Engine
from tools import make_tiny


class Untouched(Reference):
    """Fails when it is given a weight."""

    def weight(self, tensor, role, scale=None, activations="f16"):
        raise AssertionError(f"{tensor.name} was handed over")


def load(path, n_ctx=64):
    with File(path) as file:
        return arch.load(file, Untouched(1), n_ctx)


def zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


REFUSED_SETTINGS = {
    # key, value -> what the message must say
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
    ("attention.value_length", 8): r"heads of 16 for keys and 8 for values .*value_length",
    ("attention.head_count_kv", (2, 1)): r"head_count_kv = \[2, 1\] differs from layer to layer",
    ("feed_forward_length", (96, 48)): r"feed_forward_length = \[96, 48\] differs from layer",
    ("residual_scale", 0.5): "residual_scale = 0.5 is not supported",
    ("embedding_scale", 2.0): "embedding_scale = 2.0 is not supported",
}
BAD_SETTINGS = {
    ("expert_count", 8): "llama needs tensor 'blk.0.ffn_gate_inp.weight' and 7 more",
    ("expert_count", 5000): "expert_count = 5000: expected between 0 and 4096",
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
    ("attention.head_count", 3): r"3 query heads cannot share 2 .*head_count_kv",
    ("attention.head_count", 0): "head_count = 0",
    ("attention.head_count_kv", 1): r"'blk.0.attn_k.weight' has shape",
    ("attention.layer_norm_rms_epsilon", -1.0): "rms_epsilon = -1.0",
    ("attention.layer_norm_rms_epsilon", math.nan): "rms_epsilon = nan",
    ("attention.layer_norm_rms_epsilon", None): "layer_norm_rms_epsilon is missing",
    ("context_length", 0): "context_length = 0",
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
        "vocab_size": 454,
        "attention.head_count_kv": [2, 2],
    }
    with File(make_tiny.write(tmp_path / "t.gguf", "llama", harmless)) as file:
        assert arch.load(file, Reference(1), 64).sizes.layer.n_head_kv == 2


BAD_TENSORS = {
    "missing": ("blk.1.ffn_up.weight", None, "llama needs tensor 'blk.1.ffn_up.weight': fetch"),
    "shape": (
        "blk.1.attn_q.weight",
        zeros(64, 32),
        r"has shape \(64, 32\), the settings say \(64, 64\)",
    ),
    "1-d": ("blk.0.attn_q.weight", zeros(64), r"has shape \(64,\)"),
    "unknown": ("blk.0.ffn_up.bias", zeros(96), "no use for tensor 'blk.0.ffn_up.bias'"),
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


@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        ("phi3", "blk.0.attn_qkv.weight"),
        ("qwen3next", "blk.0.ssm_ba.weight"),
        ("gpt-oss", "blk.1.post_attention_norm.weight"),
    ],
)
def test_a_missing_tensor_is_called_as_in_files(architecture, name, tmp_path):
    with pytest.raises(GGUFError, match=f"{architecture} needs tensor '{name}': fetch"):
        load(make_tiny.write(tmp_path / "t.gguf", architecture, tensors={name: None}))


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
    expected = "architecture 'mamba' is not supported; supported are: .*cohere2, command-r, "
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
            shapes.append([decoder.layers[1].mixer.wv.array, decoder.layers[1].ffn.w_up.array])
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
        layers = arch.load(file, Reference(1), 64).layers
    assert [layer.mixer.spec.window for layer in layers] == windows


def test_gemma3_refuses_a_pattern_that_does_not_cover_the_layers(tmp_path):
    path = make_tiny.write(
        tmp_path / "t.gguf", "gemma3", {"attention.sliding_window_pattern": [True]}
    )
    with pytest.raises(UnsupportedModel, match="one bool for each of 2 layers"):
        load(path)


class Recording(Reference):
    """Remembers what its weights are for, and what it was going to be asked."""

    def __init__(self):
        super().__init__(1)
        self.roles: dict[str, Role] = {}

    def plan_memory(self, demand):
        self.demand = demand
        return super().plan_memory(demand)

    def weight(self, tensor, role, scale=None, activations="f16"):
        self.roles[tensor.name] = role
        return super().weight(tensor, role, scale, activations)


def test_the_table_is_looked_up_only_where_there_is_an_output(tiny_path):
    for architecture, tied in (("llama", False), ("qwen3", True)):
        ops = Recording()
        with File(tiny_path(architecture)) as file:
            decoder = arch.load(file, ops, 64)
        looked_up = [name for name, role in ops.roles.items() if role.lookup]
        assert looked_up == ([] if tied else ["token_embd.weight"])
        assert (decoder.head.weight is decoder.table) == tied


def test_a_backend_is_told_what_each_weight_is_for(tiny_path):
    ops = Recording()
    with File(tiny_path("qwen2")) as file:
        arch.load(file, ops, 200, n_batch=70, n_seq=3)
    axes = {name.removeprefix("blk.1."): role.axes for name, role in ops.roles.items()}
    assert {"token_embd.weight": "V D", "output.weight": "V D"}.items() <= axes.items()
    assert {"attn_q.weight": "HE D", "attn_k.weight": "GE D"}.items() <= axes.items()
    assert {"attn_v.weight": "GEv D", "attn_output.weight": "D HEv"}.items() <= axes.items()
    assert {"attn_v.bias": "GEv", "ffn_norm.weight": "D"}.items() <= axes.items()
    assert {"ffn_up.weight": "F D", "ffn_down.weight": "D F"}.items() <= axes.items()
    demand = ops.demand
    assert {t.name: role for t, role in demand.weights} == ops.roles
    assert (demand.n_seq, demand.n_batch, demand.least_batch) == (3, 70, 70)
    assert (demand.n_embd, demand.n_ff, demand.n_vocab) == (64, 96, 356)
    assert [group.n_pages for group in demand.cache(70).groups] == [3 * 4]


def test_layers_with_one_state_are_a_group(tiny_path):
    with File(tiny_path("gemma3")) as file:
        decoder = arch.load(file, Reference(1), 1000, n_seq=2)
    mixers = [layer.mixer for layer in decoder.layers]
    assert [(m.group, m.slot, m.spec.window) for m in mixers] == [(0, 0, 8), (1, 0, 0)]
    window, whole = decoder.cache_shape(2, 1000, 100).groups
    assert (window.layers, whole.layers) == ((0,), (1,))
    assert (window.n_pages, whole.n_pages) == (2 * 3, 2 * 16)
    assert decoder.layers[0].next is decoder.layers[1] and decoder.layers[1].next is None


# What an architecture opts in to


def several_sizes(c: Context) -> ModelSettings:
    layers = [
        LayerSettings(
            AttentionSettings(s.key_size**-0.5, build_rope(read_rope(c.config, c.sizes, "neox"))),
            DenseSettings("silu", c.config.real("residual_scale", 1.0)),
        )
        for s in c.sizes.layers
    ]
    return ModelSettings(layers, logit_scale=c.config.real("logit_scale", 1.0))


SEVERAL = Architecture(
    "llama",
    several_sizes,
    optional_layer={**OUTPUT_BIAS, **LAYER_NORM_BIAS},
    optional={**OUTPUT, **NORM_BIAS},
    understands=frozenset(
        {
            *("attention.head_count", "attention.head_count_kv", "feed_forward_length"),
            *("attention.value_length", "residual_scale", "logit_scale"),
        }
    ),
    layer_norm=True,
)
SEVERAL_SETTINGS = {
    "attention.head_count": [8, 4],
    "attention.head_count_kv": [4, 2],
    "feed_forward_length": [96, 32],
    "attention.value_length": 8,
    "attention.layer_norm_rms_epsilon": None,
    "attention.layer_norm_epsilon": 1e-3,
    "residual_scale": 0.5,
    "logit_scale": 0.25,
}


def several_tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    shapes = {"output_norm.bias": (64,)}
    for i, (h, g, f) in enumerate([(8, 4, 96), (4, 2, 32)]):
        parts = {"attn_q.weight": (h * 16, 64), "attn_k.weight": (g * 16, 64)}
        parts |= {"attn_v.weight": (g * 8, 64), "attn_output.weight": (64, h * 8)}
        parts |= {"ffn_gate.weight": (f, 64), "ffn_up.weight": (f, 64), "ffn_down.weight": (64, f)}
        parts |= {"attn_output.bias": (64,), "attn_norm.bias": (64,)}
        shapes |= {f"blk.{i}.{name}": shape for name, shape in parts.items()}
    return {k: (rng.standard_normal(x) / 8).astype(np.float32) for k, x in shapes.items()}


def test_an_architecture_may_understand_what_others_refuse(tmp_path):
    path = make_tiny.write(tmp_path / "t.gguf", "llama", SEVERAL_SETTINGS, several_tensors())
    with File(path) as file:
        with pytest.raises(UnsupportedModel, match=r"logit_scale = 0\.25 is not supported"):
            arch.load(file, Untouched(1), 64)
        ops = Reference(1)
        decoder = build(SEVERAL, file, ops, 64)
    first, last = decoder.sizes.layers
    assert first == LayerSizes(8, 4, 16, 8, 96) and last == LayerSizes(4, 2, 16, 8, 32)
    with pytest.raises(ValueError, match="layers of 2 sizes"):
        _ = decoder.sizes.layer
    norm = decoder.layers[1].ffn.norm
    assert norm.centred and norm.bias is None and norm.eps == pytest.approx(1e-3)
    assert decoder.head.norm.bias is not None and decoder.layers[0].mixer.bo is not None
    ids = [5, 9, 300, 7]
    expected = plain_layers.logits(decoder, ids)
    assert expected.std() > 0.05
    got = Engine(decoder, ops, NoText(), 64).logits(ids)
    np.testing.assert_allclose(got, expected, atol=1e-4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"attention.head_count": [4]}, r"head_count = \[4\]: expected 2 integers, one for each"),
        ({"feed_forward_length": [96, 0]}, r"feed_forward_length = \[96, 0\]: expected each betw"),
        ({"feed_forward_length": [9.5, 3.5]}, "expected 2 integers"),
        ({"attention.head_count_kv": [4, 3]}, "4 query heads cannot share 3 key/value heads"),
        ({"feed_forward_length": [96, 96]}, r"'blk.1.ffn_gate.weight' has shape \(32, 64\)"),
        (
            {"attention.value_length": 16},
            r"'blk.0.attn_v.weight' has shape \(32, 64\), .* \(64, 64",
        ),
        ({"attention.causal": False}, "attention.causal = False is not supported"),
        ({"expert_count": 4}, "expert_count = 4 is not supported"),
    ],
)
def test_it_is_checked_like_any_other(settings, message, tmp_path):
    settings = {**SEVERAL_SETTINGS, **settings}
    path = make_tiny.write(tmp_path / "t.gguf", "llama", settings, several_tensors())
    with File(path) as file, pytest.raises(GGUFError, match=message):
        build(SEVERAL, file, Untouched(1), 64)


def test_config_names_every_unread_setting_but_not_endlessly():
    metadata = {f"a.k{i}": i for i in range(6)} | {"b.other": 1}
    config = Config(metadata, "a", "file")
    assert config.integer("k1") == 1
    with pytest.raises(
        UnsupportedModel, match=r"file: not supported: a.k0 = 0, a.k2 = 2, .*, \.\.\.$"
    ):
        config.refuse_unread()


def test_queries_grow_only_in_contexts_longer_than_the_original(tmp_path):
    """So that a GPU can run shorter ones."""
    path = make_tiny.write(tmp_path / "t.gguf", "mistral3")
    for n_ctx, grows in ((16, False), (17, True)):
        with File(path) as file:
            decoder = arch.load(file, Reference(1), n_ctx)
        assert (decoder.layers[1].mixer.temperature is not None) == grows


def test_heads_of_two_cannot_have_a_stretched_base():
    sizes = Dimensions(64, 96, 2, 256, 1e-5, (LayerSizes(4, 2, 2, 2, 96),))
    config = Config({"hunyuan-dense.rope.scaling.alpha": 10.0}, "hunyuan-dense")
    with pytest.raises(GGUFError, match="heads of 2 cannot have"):
        hunyuan_dense.read(Context(config, sizes, {}, 64))


BAD_EXPERTS = {
    # architecture, settings -> what the message must say
    ("glm4moe", "leading_dense_block_count", 2): "none of 2 layers has experts: leading",
    (
        "glm4moe",
        "leading_dense_block_count",
        3,
    ): "leading_dense_block_count = 3: expected between 0 ",
    ("glm4moe", "leading_dense_block_count", 0): "glm4moe needs tensor 'blk.0.ffn_gate_inp.weight'",
    ("glm4moe", "expert_shared_count", 0): "no use for tensor 'blk.1.ffn_gate_shexp.weight' and 2 ",
    ("glm4moe", "expert_shared_count", 2): r"shexp.weight' has shape \(.*, the settings say \(.*64",
    (
        "glm4moe",
        "expert_gating_func",
        4,
    ): r"expert_gating_func = 4 is not supported \(only 0 or 1 or",
    ("glm4moe", "expert_weights_norm", 2): "expert_weights_norm = 2 is not supported",
    ("glm4moe", "expert_weights_scale", -1.0): "expert_weights_scale = -1.0: expected between 0",
    ("glm4moe", "nextn_predict_layers", 2): "block_count = 2: expected between 3 and 4096",
    ("glm4moe", "nextn_predict_layers", 1): "none of 1 layers has experts",
    ("bailingmoe2", "expert_shared_count", 2): r"count = 2 is not supported \(only 0 or 1 is",
    ("exaone-moe", "attention.sliding_window", 0): "sliding_window = 0: expected between 1 and",
    ("qwen3moe", "expert_used_count", 9): "expert_used_count = 9: expected between 1 and 8",
    ("qwen3moe", "expert_used_count", 0): "expert_used_count = 0: expected between 1 and 8",
    ("qwen3moe", "expert_used_count", (2, 1)): r"\[2, 1\] differs from layer to layer",
    ("qwen3moe", "expert_used_count", None): "expert_used_count is missing",
    ("qwen3moe", "expert_count", 4): r"'blk.0.ffn_gate_inp.weight' has shape \(8, 64\), .* \(4, 64",
    ("qwen3moe", "expert_feed_forward_length", 16): r"gate_exps.weight' has shape \(8, 32, 64\)",
    ("qwen3moe", "expert_feed_forward_length", (32, 16)): "'blk.1.ffn_gate_exps.weight' has shape",
    ("qwen3moe", "expert_feed_forward_length", (32,)): r"\[32\]: expected 2 integers",
    ("qwen3moe", "expert_group_count", 3): "expert_group_count = 3: 8 experts cannot be 3 groups",
    ("qwen3moe", "expert_group_count", 8): "8 experts cannot be 8 groups",
    ("qwen3moe", "expert_group_used_count", 2): "expert_group_used_count = 2: expected between 0 a",
    ("qwen3moe", "expert_gating_func", 2): r"expert_gating_func = 2 is not supported \(only 1 is",
    ("qwen3moe", "expert_weights_norm", False): "expert_weights_norm = False is not supported",
    ("qwen3moe", "expert_weights_scale", 2.5): "expert_weights_scale = 2.5 is not supported",
    ("qwen3moe", "expert_shared_count", 1): r"expert_shared_count = 1 is not supported",
    ("qwen3moe", "leading_dense_block_count", 1): "leading_dense_block_count = 1 is not supported",
    ("qwen3moe", "interleave_moe_layer_step", 2): "not supported: qwen3moe.interleave_moe_layer",
    ("gpt-oss", "attention.sliding_window", None): "attention.sliding_window is missing",
    ("gpt-oss", "attention.sliding_window_pattern", (True,)): "one bool for each of 2 layers",
}


@pytest.mark.parametrize("case, message", BAD_EXPERTS.items(), ids=str)
def test_settings_of_experts(case, message, tmp_path):
    architecture, key, value = case
    settings = {key: list(value) if isinstance(value, tuple) else value}
    with pytest.raises(GGUFError, match=message):
        load(make_tiny.write(tmp_path / "t.gguf", architecture, settings))


def test_experts_are_chosen_from_the_groups_that_are_looked_at(tmp_path):
    settings = {"expert_group_count": 4, "expert_group_used_count": 1, "expert_used_count": 3}
    path = make_tiny.write(tmp_path / "t.gguf", "qwen3moe", settings)
    with pytest.raises(GGUFError, match="expert_used_count = 3: expected between 1 and 2"):
        load(path)


def test_a_model_of_experts_has_some(tmp_path):
    path = make_tiny.write(
        tmp_path / "t.gguf", "qwen3moe", {"expert_count": 0, "expert_used_count": 0}
    )
    with pytest.raises(GGUFError, match=r"ffn_gate_inp.weight' has shape .* \(0, 64\)"):
        load(path)


BAD_EXPERT_TENSORS = {
    "missing": (
        "blk.0.ffn_down_exps.weight",
        None,
        "needs tensor 'blk.0.ffn_down_exps.weight': fetch",
    ),
    "two axes": ("blk.0.ffn_up_exps.weight", zeros(256, 64), r"has shape \(256, 64\)"),
    "dense": ("blk.0.ffn_up.weight", zeros(96, 64), "no use for tensor 'blk.0.ffn_up.weight'"),
    "bias": ("blk.0.ffn_up_exps.bias", zeros(8, 32), "no use for tensor 'blk.0.ffn_up_exps.bias'"),
    "an expert": ("blk.0.ffn_up.3.weight", zeros(32, 64), "no use for tensor 'blk.0.ffn_up.3"),
}


@pytest.mark.parametrize("case", BAD_EXPERT_TENSORS.values(), ids=BAD_EXPERT_TENSORS)
def test_tensors_of_experts(case, tmp_path):
    name, array, message = case
    with pytest.raises(GGUFError, match=message):
        load(make_tiny.write(tmp_path / "t.gguf", "qwen3moe", tensors={name: array}))


@pytest.mark.parametrize(
    ("settings", "tensors", "message"),
    [
        ({"dense_2_feat_in": 63}, {}, "dense_2_feat_in = 63, but the matrix is given .* of 64"),
        ({"dense_3_feat_out": 63}, {}, r"'dense_3.weight' has shape .64, 96., .* .63, 96."),
        ({}, {"dense_2.weight": None}, "give 'dense_2.weight' 96 rows, it is missing"),
        ({"attention.causal": True}, {}, "attention.causal = True is not supported .only False is"),
    ],
)
def test_what_makes_embeddings_fits_together(settings, tensors, message, tmp_path):
    path = make_tiny.write(tmp_path / "x.gguf", "gemma-embedding", settings, tensors)
    with pytest.raises(GGUFError, match=message):
        load(path)
