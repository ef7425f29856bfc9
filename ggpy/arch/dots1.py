"""dots1: dots.llm1: qwen3 with experts after a few dense layers, chosen by sigmoids with a bias of
the choice, and shared experts.
"""

from __future__ import annotations

from . import hugging_face as hf
from .architecture import OUTPUT, Architecture
from .glm4moe import read_layers, router
from .layers import attention, dense, moe
from .layers.attention import QK_NORM
from .qwen2 import layers_with_windows


def settings(s: hf.CheckpointSettings) -> hf.Metadata:
    """The settings of a file. Published ones call the method of the choice the scoring function."""
    s.only("hidden_act", "silu", "swish")
    s.only("moe_layer_freq", 1)
    for key in ("scoring_func", "topk_method"):
        s.only(key, "sigmoid", "noaux_tc")
    _refuse_windows(s)
    return {
        **{**hf.sizes(s), **hf.rope(s), **hf.experts(s), **router(s, 1, normalise=False)},
        **(hf.head_sizes(s) if s.has("head_dim") else {}),
        moe.SHARED_COUNT: ("u32", s.integer("n_shared_experts", low=0)),
        moe.N_DENSE: ("u32", s.integer("first_k_dense_replace", low=0)),
    }


def _refuse_windows(s: hf.CheckpointSettings) -> None:
    """A file cannot say which layers have a window."""
    s.only("use_sliding_window", False)
    n = layers_with_windows(s, s.integer("num_hidden_layers"))
    if hf.window_of(s) and n:
        raise s.refuse("sliding_window", f"{n} layers would have a window")


ARCHITECTURE = Architecture(
    "dots1",
    read_layers,
    layer={**attention.TENSORS, **QK_NORM, **dense.TENSORS},
    expert_layer={**attention.TENSORS, **QK_NORM, **moe.TENSORS, **moe.SHARED},
    optional=OUTPUT,
    optional_layer=moe.CHOICE_BIAS,
    understands=moe.UNDERSTOOD | {moe.SHARED_COUNT, moe.N_DENSE},
    hugging_face=hf.HuggingFace(
        classes={
            "Dots1ForCausalLM": {
                **{"num_key_value_heads": 32, "first_k_dense_replace": 0},
                **{"routed_scaling_factor": 1.0, "sliding_window": 4096},
                **{"max_position_embeddings": 2048, "vocab_size": 152064},
                "max_window_layers": 62,
            }
        },
        settings=settings,
        layer={
            **{**hf.LAYER, **hf.EXPERTS, **hf.SHARED, **hf.QK_NORM},
            "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
        },
    ),
)
