"""`ggpy make_tiny [FOLDER]` (for developers): write a tiny random model for every architecture.

    ggpy make_tiny models/tiny

A model has two random layers, or four where the fourth differs, and a tokenizer that works; its
text is noise. Tests run these models where a real one would be too slow or is not to be had. They
have every peculiarity of their architectures: biases, windows, soft caps, fused tensors, partial
rotation, LongRoPE factors.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ggpy.cli.parser import Parser
from ggpy.util.outcome import ended
from ggpy.util.output_file import write_whole

if TYPE_CHECKING:  # the program's --help needs neither
    import gguf
    import numpy as np

FOLDER = Path(__file__).resolve().parent.parent / "models" / "tiny"
WORDS = (
    *("the", "of", "and", "to", "in", "is", "it", "hello", "world", "one", "two", "three"),
    *("user", "assistant", "system", "model"),
)
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6  # token types


@dataclass(frozen=True)
class Tiny:
    """What one architecture's file has; sizes by the letters of ggpy/backends/interface.py."""

    tokenizer: str = "spm"
    D: int = 64
    H: int = 4
    G: int = 2
    E: int = 16
    F: int = 96
    n_layer: int = 2
    settings: Mapping[str, Any] = field(default_factory=dict)
    layer: tuple[str, ...] = ()  # tensors beyond those of llama
    without: tuple[str, ...] = ()  # those of llama that it has not
    tied: bool = True
    fused: tuple[str, ...] = ()
    rope_factors: bool = False
    norm_whole: bool = False  # of q and k
    declared: tuple[str, ...] = ()  # its architecture knows all tensors; some that it may leave out
    experts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # in place of ffn_*.weight
    n_dense: int = 0  # layers before those with experts
    period: int = 1  # the last of so many layers has experts
    types: Mapping[str, str] = field(default_factory=dict)  # of tensors with this in their names
    dense: int = 0  # rows between the two matrices of an embedding
    # Of layers with a gated delta net, all but every full_attention_interval-th: Hk, Hv, S, taps
    delta: tuple[int, int, int, int] | None = None
    gates_together: bool = False  # of such a net: beta and alpha are one tensor


SANDWICH = ("post_attention_norm.weight", "post_ffw_norm.weight")
QK_NORM = ("attn_q_norm.weight", "attn_k_norm.weight")
BIAS = ("attn_q.bias", "attn_k.bias", "attn_v.bias")
BEFORE = ("attn_norm.weight", "ffn_norm.weight")
OUTPUT_BIAS, SINKS, GATE = "attn_output.bias", "attn_sinks.weight", "attn_gate.weight"
DENSE = ("ffn_gate.weight", "ffn_up.weight", "ffn_down.weight")
X, J, FX = 8, 2, 32  # experts, those that a token chooses, and their width
COUNTS = {"expert_count": X, "expert_used_count": J, "expert_feed_forward_length": FX}
EXPERTS = {
    "ffn_gate_inp.weight": (X, 64),
    "ffn_gate_exps.weight": (X, FX, 64),
    "ffn_up_exps.weight": (X, FX, 64),
    "ffn_down_exps.weight": (X, 64, FX),
}
SHARED = {
    "ffn_gate_inp_shexp.weight": (64,),
    "ffn_gate_shexp.weight": (FX, 64),
    "ffn_up_shexp.weight": (FX, 64),
    "ffn_down_shexp.weight": (64, FX),
}
CHOICE_BIAS = {"exp_probs_b.bias": (X,)}
UNGATED = {name: shape for name, shape in SHARED.items() if "inp" not in name}
SIGMOIDS = {
    **{"expert_shared_count": 1, "leading_dense_block_count": 1, "expert_gating_func": 2},
    **{"expert_weights_norm": True, "expert_weights_scale": 1.5},
}
EXPERT_BIAS = {
    "ffn_gate_inp.bias": (X,),
    "ffn_gate_exps.bias": (X, FX),
    "ffn_up_exps.bias": (X, FX),
    "ffn_down_exps.bias": (X, 64),
}
MODELS = {
    "llama": Tiny(tied=False),
    "qwen2": Tiny("bpe", layer=BIAS, tied=False, settings={"rope.freq_base": 1e6}),
    "qwen3": Tiny("bpe", E=32, layer=QK_NORM, settings={"rope.freq_base": 1e6}),
    "gemma": Tiny(E=32, G=1),
    "gemma2": Tiny(
        "spm",
        E=32,
        layer=SANDWICH,
        settings={
            "attention.sliding_window": 8,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3": Tiny(
        "spm",
        E=32,
        G=1,
        layer=SANDWICH + QK_NORM,
        settings={
            "attention.sliding_window": 8,
            "attention.sliding_window_pattern": 2,
            "rope.freq_base": 1e6,
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 4.0,
        },
    ),
    "gemma-embedding": Tiny(
        "spm",
        E=32,
        G=1,
        layer=SANDWICH + QK_NORM,
        dense=96,
        settings={
            **{"attention.sliding_window": 9, "attention.sliding_window_pattern": 2},
            **{"rope.freq_base": 1e6, "pooling_type": 1},
            **{f"dense_2_feat_{x}": n for x, n in (("in", 64), ("out", 96))},
            **{f"dense_3_feat_{x}": n for x, n in (("in", 96), ("out", 64))},
        },
    ),
    "phi3": Tiny(
        tied=False,
        fused=("attn_qkv.weight", "ffn_up.weight"),
        rope_factors=True,
        settings={
            "context_length": 512,
            "rope.dimension_count": 12,
            "rope.scaling.original_context_length": 256,
            "rope.scaling.attn_factor": 1.19,
            "attention.sliding_window": 0,
        },
    ),
    "qwen3moe": Tiny(
        "bpe", E=32, layer=QK_NORM, experts=EXPERTS, settings={**COUNTS, "rope.freq_base": 1e6}
    ),
    "qwen2moe": Tiny(
        "bpe",
        layer=BIAS,
        tied=False,
        experts={**EXPERTS, **SHARED},
        settings={**COUNTS, "expert_shared_feed_forward_length": FX, "rope.freq_base": 1e6},
    ),
    "gpt-oss": Tiny(
        "bpe",
        layer=(*BIAS, OUTPUT_BIAS, SINKS, SANDWICH[0]),
        without=("ffn_norm.weight",),  # it has another name
        tied=False,
        experts={**EXPERTS, **EXPERT_BIAS},
        types={"_exps.weight": "MXFP4"},
        settings={
            **{**COUNTS, "attention.sliding_window": 8, "rope.freq_base": 1.5e5},
            **{"rope.scaling.type": "yarn", "rope.scaling.factor": 32.0},
            "rope.scaling.original_context_length": 64,
        },
    ),
    "glm4moe": Tiny(
        "bpe",
        E=32,
        layer=(*BIAS, *QK_NORM, SANDWICH[0]),
        without=("ffn_norm.weight",),
        tied=False,
        experts={**EXPERTS, **CHOICE_BIAS, **UNGATED},
        n_dense=1,
        settings={
            **{**COUNTS, "expert_shared_count": 1, "leading_dense_block_count": 1},
            **{"expert_gating_func": 2, "expert_weights_norm": True, "rope.freq_base": 1e6},
            **{"expert_weights_scale": 1.5, "rope.dimension_count": 16},
        },
    ),
    "bailingmoe2": Tiny(
        "bpe",
        layer=QK_NORM,
        fused=("attn_qkv.weight",),
        tied=False,
        experts={**EXPERTS, **CHOICE_BIAS, **UNGATED},
        n_dense=1,
        settings={
            **{**COUNTS, **SIGMOIDS, "expert_shared_feed_forward_length": FX},
            **{"expert_group_count": 4, "expert_group_used_count": 2},
            **{"rope.dimension_count": 8, "rope.freq_base": 6e5},
        },
    ),
    "dots1": Tiny(
        "bpe",
        G=4,
        E=32,
        layer=QK_NORM,
        tied=False,
        experts={**EXPERTS, **CHOICE_BIAS, **UNGATED},
        n_dense=1,
        settings={**COUNTS, **SIGMOIDS, "rope.freq_base": 1e7},
    ),
    "exaone-moe": Tiny(
        "bpe",
        F=32,
        n_layer=4,
        layer=QK_NORM,
        tied=False,
        experts={**EXPERTS, **CHOICE_BIAS, **UNGATED},
        n_dense=1,
        settings={
            **{**COUNTS, **SIGMOIDS, "expert_shared_feed_forward_length": FX},
            **{"attention.sliding_window": 8, "rope.scaling.type": "none"},
            "rope.freq_base": 1e6,
        },
    ),
    "ernie4_5-moe": Tiny(
        E=32,
        experts={**EXPERTS, **CHOICE_BIAS, **UNGATED},
        n_dense=1,
        settings={
            **{**COUNTS, "expert_shared_count": 1, "leading_dense_block_count": 1},
            **{"expert_shared_feed_forward_length": FX, "interleave_moe_layer_step": 1},
            "rope.freq_base": 5e5,
        },
    ),
    "hunyuan-moe": Tiny(
        "bpe",
        E=32,
        F=FX,
        layer=QK_NORM,
        experts={**EXPERTS, **UNGATED},
        settings={
            **{**COUNTS, "expert_shared_count": 1, "expert_shared_feed_forward_length": FX},
            "rope.freq_base": 1.1e7,
        },
    ),
    "llama4": Tiny(
        "bpe",
        F=32,
        n_layer=4,
        experts={**EXPERTS, **UNGATED},
        period=2,
        settings={**COUNTS, "expert_used_count": 1, "interleave_moe_layer_step": 2},
    ),
    "minimax-m2": Tiny(
        "bpe",
        E=32,
        F=FX,
        layer=QK_NORM,
        norm_whole=True,
        tied=False,
        experts={**EXPERTS, **CHOICE_BIAS},
        settings={
            **{**COUNTS, "expert_gating_func": 2, "rope.dimension_count": 16},
            "rope.freq_base": 5e6,
        },
    ),
    "smollm3": Tiny("bpe", F=32, n_layer=4, settings={"rope.freq_base": 5e6}),
    "granite": Tiny(
        "bpe",
        settings={
            **{"attention.scale": 0.2, "embedding_scale": 12.0, "logit_scale": 8.0},
            **{"residual_scale": 0.22, "attention.layer_norm_rms_epsilon": 1e-3},
        },
    ),
    "olmo2": Tiny(
        "bpe",
        F=32,
        n_layer=4,
        layer=SANDWICH + QK_NORM,
        without=BEFORE,
        norm_whole=True,
        tied=False,
        settings={
            **{"attention.sliding_window": 8, "rope.freq_base": 5e5, "rope.scaling.type": "yarn"},
            **{"rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64},
        },
    ),
    "seed_oss": Tiny(
        "bpe",
        E=32,
        layer=(*BIAS, SANDWICH[0]),
        without=("ffn_norm.weight",),
        settings={"rope.freq_base": 1e7},
    ),
    "ernie4_5": Tiny(E=32, settings={"rope.freq_base": 5e5}),
    "hunyuan-dense": Tiny("bpe", E=32, layer=QK_NORM, settings={"rope.scaling.alpha": 1000.0}),
    "mistral3": Tiny(
        "bpe",
        E=32,
        settings={
            **{"rope.scaling.type": "yarn", "rope.scaling.factor": 16.0, "rope.freq_base": 1e6},
            **{"rope.scaling.yarn_log_multiplier": 1.0, "attention.temperature_scale": 0.5},
            "rope.scaling.original_context_length": 16,
        },
    ),
    "exaone4": Tiny("bpe", layer=SANDWICH + QK_NORM, without=BEFORE),
    "glm4": Tiny(
        "bpe",
        layer=SANDWICH + BIAS,
        fused=("ffn_up.weight",),
        settings={"rope.dimension_count": 8},
    ),
    "cohere2": Tiny(
        "bpe",
        F=32,
        n_layer=4,
        without=("ffn_norm.weight",),
        settings={
            **{"attention.layer_norm_rms_epsilon": None, "attention.layer_norm_epsilon": 1e-5},
            **{"attention.sliding_window": 8, "logit_scale": 0.25, "rope.freq_base": 5e4},
        },
    ),
    "command-r": Tiny(
        "bpe",
        without=("ffn_norm.weight",),
        settings={
            **{"attention.layer_norm_rms_epsilon": None, "attention.layer_norm_epsilon": 1e-5},
            **{"logit_scale": 0.5, "rope.freq_base": 8e6},
        },
    ),
    "muse-glimmer": Tiny(
        "bpe",
        F=32,
        n_layer=4,
        layer=(*SANDWICH, *QK_NORM, GATE),
        tied=False,
        settings={
            **{"attention.sliding_window": 8, "logit_scale": 0.25, "rope.freq_base": 5e5},
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma4": Tiny(
        "spm",
        n_layer=4,
        declared=(
            *(f"blk.{i}.layer_output_scale.weight" for i in range(3)),
            "blk.2.attn_k.weight",  # of a layer that has the keys of another
        ),
        settings={
            **{"attention.key_length": 32, "attention.value_length": 32},
            **{"attention.key_length_swa": 16, "attention.value_length_swa": 16},
            **{"attention.head_count_kv": [2, 1, 2, 1], "feed_forward_length": [32, 32, 64, 64]},
            **{"attention.sliding_window": 8, "attention.shared_kv_layers": 2},
            **{"attention.sliding_window_pattern": [True, False] * 2, "rope.freq_base": 1e6},
            **{"rope.dimension_count": 32, "rope.dimension_count_swa": 16},
            **{"embedding_length_per_layer_input": 32, "final_logit_softcapping": 3.0},
        },
    ),
    "qwen3vl": Tiny(
        "bpe",
        E=32,
        layer=QK_NORM,
        settings={
            **{"rope.dimension_sections": [6, 5, 5, 0], "n_deepstack_layers": 1},
            "rope.freq_base": 5e6,
        },
    ),
    "qwen2vl": Tiny(
        "bpe",
        layer=BIAS,
        settings={"rope.dimension_sections": [2, 3, 3, 0], "rope.freq_base": 1e6},
    ),
    "olmoe": Tiny(
        "bpe",
        G=4,
        F=FX,
        layer=QK_NORM,
        norm_whole=True,
        tied=False,
        experts=EXPERTS,
        settings={**COUNTS, "expert_feed_forward_length": None},
    ),
    "granitemoe": Tiny(
        "bpe",
        F=FX,
        experts={**EXPERTS, **UNGATED},
        settings={
            **{**COUNTS, "expert_feed_forward_length": None},
            **{"expert_shared_feed_forward_length": FX, "logit_scale": 6.0},
            **{"attention.scale": 0.2, "embedding_scale": 12.0, "residual_scale": 0.22},
            **{"attention.layer_norm_rms_epsilon": 1e-3, "rope.freq_base": 1.5e6},
        },
    ),
    "qwen3vlmoe": Tiny(
        "bpe",
        G=1,
        E=32,
        layer=QK_NORM,
        tied=False,
        experts=EXPERTS,
        settings={
            **{**COUNTS, "rope.dimension_sections": [6, 5, 5, 0], "n_deepstack_layers": 1},
            "rope.freq_base": 5e6,
        },
    ),
}


HYBRID = Tiny(
    "bpe",
    E=32,
    n_layer=4,
    layer=(*QK_NORM, SANDWICH[0]),
    without=("ffn_norm.weight",),
    delta=(2, 4, 16, 4),
    settings={
        **{"ssm.conv_kernel": 4, "ssm.state_size": 16, "ssm.group_count": 2},
        **{"ssm.time_step_rank": 4, "ssm.inner_size": 64, "full_attention_interval": 4},
        **{"rope.dimension_count": 16, "rope.freq_base": 1e7},
        "attention.layer_norm_rms_epsilon": 1e-6,
    },
)
SECTIONS = {"rope.dimension_sections": [3, 3, 2, 0]}
SHARED_COUNTS = {**COUNTS, "expert_shared_feed_forward_length": FX}
MODELS["qwen35"] = replace(HYBRID, settings={**HYBRID.settings, **SECTIONS})
MODELS["qwen35moe"] = replace(
    HYBRID,
    experts={**EXPERTS, **SHARED},
    settings={**HYBRID.settings, **SECTIONS, **SHARED_COUNTS, "feed_forward_length": None},
)
MODELS["qwen3next"] = replace(
    HYBRID,
    experts={**EXPERTS, **SHARED},
    gates_together=True,
    settings={**HYBRID.settings, **SHARED_COUNTS},
)


def write(
    path: Path,
    architecture: str,
    settings: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray | None] | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> Path:
    """Write one; `settings`, `metadata` and `tensors` replace, add, or remove (None)."""
    import gguf

    model = MODELS[architecture]
    tokens = tokenizer(model.tokenizer)
    values = {f"{architecture}.{k}": v for k, v in {**_settings(model), **(settings or {})}.items()}
    values = {"general.name": "tiny random model", **values, **tokens, **(metadata or {})}
    writer = gguf.GGUFWriter(None, architecture)
    for key, value in values.items():
        if value is not None:
            _add(writer, key, value)
    arrays = tensors_of(model, len(tokens["tokenizer.ggml.tokens"]))
    for name, array in {**arrays, **(tensors or {})}.items():
        if array is not None:
            kind = gguf.GGMLQuantizationType[_kind(model, name, array)]
            writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
    with tempfile.TemporaryDirectory() as folder:  # that writer's file grows under its own name
        made = Path(folder, "made")
        writer.write_header_to_file(made)
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        write_whole(path, made.read_bytes())
    return path


def _settings(m: Tiny) -> dict[str, Any]:
    return {
        "context_length": 256,
        "embedding_length": m.D,
        "block_count": m.n_layer,
        "feed_forward_length": m.F,
        "attention.head_count": m.H,
        "attention.head_count_kv": m.G,
        "attention.key_length": m.E,
        "attention.value_length": m.E,
        "attention.layer_norm_rms_epsilon": 1e-5,
        **m.settings,
    }


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    import gguf

    if isinstance(value, list):
        writer.add_array(key, value)
    else:
        kind = {bool: "BOOL", int: "UINT32", float: "FLOAT32", str: "STRING"}[type(value)]
        writer.add_key_value(key, value, gguf.GGUFValueType[kind])


def _kind(m: Tiny, name: str, array: np.ndarray) -> str:
    """The format of a tensor."""
    always = ("bias", "ffn_gate_inp.weight", "_norm.weight", "conv1d.weight")
    if array.ndim == 1 or name.endswith(always):
        return "F32"
    for part, kind in m.types.items():
        if part in name:
            return kind
    if "attn_k" in name:
        return "F16"
    return "Q4_0" if "ffn_down" in name else "Q8_0"


def tensors_of(m: Tiny, n_vocab: int) -> dict[str, np.ndarray]:
    """The weights of a model, the same every time."""
    import numpy as np

    rng = np.random.default_rng(1234)

    def matrix(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) * 1.5 / np.sqrt(shape[-1])).astype(np.float32)

    def vector(n: int, mean: float = 1.0) -> np.ndarray:
        return (mean + 0.2 * rng.standard_normal(n)).astype(np.float32)

    out = {"token_embd.weight": matrix(n_vocab, m.D), "output_norm.weight": vector(m.D)}
    if not m.tied:
        out["output.weight"] = matrix(n_vocab, m.D)
    if m.rope_factors:
        out["rope_factors_long.weight"] = np.linspace(2, 6, 6, dtype=np.float32)
        out["rope_factors_short.weight"] = np.linspace(1, 1.5, 6, dtype=np.float32)
    if m.dense:
        out["dense_2.weight"], out["dense_3.weight"] = matrix(m.dense, m.D), matrix(m.D, m.dense)
    if m.declared:
        shapes = _declared_shapes(m, n_vocab)
        return {name: _declared(name, shape, matrix, vector) for name, shape in shapes.items()}
    for i in range(m.n_layer):
        for name, shape in _shapes_of(m, i).items():
            mean = {"ssm_a": -1.0}.get(name, 0.0 if name.endswith("bias") else 1.0)
            out[f"blk.{i}.{name}"] = vector(*shape, mean) if len(shape) == 1 else matrix(*shape)
    return out


def _declared_shapes(m: Tiny, n_vocab: int) -> dict[str, tuple[int, ...]]:
    """What the architecture of a model with these settings asks for, by name."""
    import numpy as np

    from ggpy.arch import architectures
    from ggpy.arch.config import Config

    (name,) = (name for name, model in MODELS.items() if model is m)
    values = {k: np.array(v) if isinstance(v, list) else v for k, v in _settings(m).items()}
    config = Config({f"{name}.{key}": value for key, value in values.items()}, name)
    needed, allowed = architectures()[name].stored(
        architectures()[name].dimensions(config, n_vocab), m.tied
    )
    return {**needed, **{name: allowed[name] for name in m.declared}}


def _declared(
    name: str, shape: tuple[int, ...], matrix: Callable[..., Any], vector: Callable[..., Any]
) -> np.ndarray:
    """One of these tensors; rope's factors turn a quarter of the pairs."""
    import numpy as np

    if name == "rope_freqs.weight":
        factors = np.full(shape, 1e30, np.float32)
        factors[: shape[0] // 4] = 1
        return factors
    array: np.ndarray = vector(*shape) if len(shape) == 1 else matrix(*shape)
    return array


def _shapes_of(m: Tiny, layer: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of one layer's tensors."""
    found = _layer_shapes(m, layer)
    if m.delta is None:
        return found
    if (layer + 1) % m.settings["full_attention_interval"] == 0:
        return {**found, "attn_q.weight": (2 * m.H * m.E, m.D)}  # each head's gate behind it
    n_k, n_v, size, taps = m.delta
    channels, values = (2 * n_k + n_v) * size, n_v * size
    rest = {k: x for k, x in found.items() if not k.startswith("attn_") or k == "attn_norm.weight"}
    gates = {"ssm_beta.weight": (n_v, m.D), "ssm_alpha.weight": (n_v, m.D)}
    return {
        **rest,
        **{"attn_qkv.weight": (channels, m.D), "attn_gate.weight": (values, m.D)},
        **({"ssm_ba.weight": (2 * n_v, m.D)} if m.gates_together else gates),
        "ssm_a": (n_v,),
        **{
            "ssm_conv1d.weight": (channels, taps),
            "ssm_dt.bias": (n_v,),
            "ssm_norm.weight": (size,),
        },
        "ssm_out.weight": (m.D, values),
    }


def experts_of(architecture: str) -> dict[str, np.ndarray | None]:
    """What makes a dense model a mixture of experts: tensors to add, and to leave out (None)."""
    m = MODELS[architecture]
    made = tensors_of(replace(m, experts=EXPERTS), 0)
    dense = {name: None for name in tensors_of(m, 0) if name not in made}
    return {**dense, **{name: array for name, array in made.items() if ".ffn_" in name}}


def _layer_shapes(m: Tiny, i: int) -> dict[str, tuple[int, ...]]:
    q, kv = m.H * m.E, m.G * m.E
    qkv = {"attn_q.weight": (q, m.D), "attn_k.weight": (kv, m.D), "attn_v.weight": (kv, m.D)}
    gate_up = {"ffn_gate.weight": (m.F, m.D), "ffn_up.weight": (m.F, m.D)}
    if "attn_qkv.weight" in m.fused:
        qkv = {"attn_qkv.weight": (q + 2 * kv, m.D)}
    if "ffn_up.weight" in m.fused:
        gate_up = {"ffn_up.weight": (2 * m.F, m.D)}
    sizes = {"attn_q.bias": q, "attn_k.bias": kv, "attn_v.bias": kv, **dict.fromkeys(SANDWICH, m.D)}
    sizes |= dict(zip(QK_NORM, (q, kv) if m.norm_whole else (m.E, m.E), strict=True))
    sizes |= {OUTPUT_BIAS: m.D, SINKS: m.H}
    shapes = {**{name: (n,) for name, n in sizes.items()}, GATE: (q, m.D)}
    found = {
        "attn_norm.weight": (m.D,),
        "ffn_norm.weight": (m.D,),
        **qkv,
        **gate_up,
        "attn_output.weight": (m.D, q),
        "ffn_down.weight": (m.D, m.F),
        **{name: shapes[name] for name in m.layer},
    }
    experts = dict(m.experts) if i >= m.n_dense and (i + 1) % m.period == 0 else {}
    without = {*m.without, *(DENSE if experts else ())}
    return {name: x for name, x in found.items() if name not in without} | experts


def tokenizer(kind: str) -> dict[str, Any]:
    """Metadata of a tokenizer that knows all bytes, some letters and WORDS."""
    return _spm() if kind == "spm" else _bpe()


def _prefixes(space: str) -> list[tuple[str, str]]:
    """Merges (left, right) that build each word from its start, after a space and without."""
    words = [start + word for word in WORDS for start in (space, "")]
    merges = [(w[:n], w[n]) for w in words for n in range(1, len(w))]
    return list(dict.fromkeys(merges))


def _spm() -> dict[str, Any]:
    letters = [chr(c) for c in range(ord("!"), 127)] + ["\u2581"]
    pieces = list(dict.fromkeys([a + b for a, b in _prefixes("\u2581")] + letters))
    tokens = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    types = [UNKNOWN, CONTROL, CONTROL, CONTROL, CONTROL]
    tokens += [f"<0x{b:02X}>" for b in range(256)] + pieces
    types += [BYTE] * 256 + [NORMAL] * len(pieces)
    scores = [0.0] * (len(tokens) - len(pieces)) + [-float(i) for i in range(len(pieces))]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.eot_token_id": 4,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def _bpe() -> dict[str, Any]:
    alphabet = _byte_alphabet()
    merges = _prefixes(alphabet[ord(" ")])
    merged = list(dict.fromkeys(a + b for a, b in merges))
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens = [*alphabet, *merged, *special]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [NORMAL] * (len(tokens) - 3) + [CONTROL] * 3,
        "tokenizer.ggml.merges": [f"{a} {b}" for a, b in merges],
        "tokenizer.ggml.bos_token_id": len(tokens) - 3,
        "tokenizer.ggml.eos_token_id": len(tokens) - 1,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def _byte_alphabet() -> list[str]:
    """The printable character that stands for each byte in byte-level BPE (GPT-2)."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(b) if b in printable else chr(next(others)) for b in range(256)]


def main(argv: list[str] | None = None) -> int:
    """Run the program; its exit status."""
    options = parser().parse_args(argv)
    return ended(lambda: make(options.folder), program="ggpy make_tiny")


def parser() -> Parser:
    found = Parser("make_tiny", "Write a tiny random model for every architecture.")
    found.add_argument(
        "folder", metavar="FOLDER", nargs="?", type=Path, default=FOLDER,
        help="folder of the .gguf files (models/tiny of this installation)",
    )  # fmt: skip
    return found


def make(folder: Path) -> int:
    """Write all of them; OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    for architecture in MODELS:
        path = write(folder / f"{architecture}.gguf", architecture)
        print(f"{path}: {path.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
