"""qwen2: llama with biases on q, k and v, and rope of style "neox"."""

from __future__ import annotations

from . import hugging_face as hf
from . import llama
from .architecture import Architecture, Context, ModelSettings


def read(c: Context) -> ModelSettings:
    """llama's, with rope style "neox"."""
    return llama.read(c, "neox")


def settings(
    s: hf.CheckpointSettings, theta: float = 10000.0, known: tuple[str, ...] = ()
) -> hf.Metadata:
    """The settings of a file. Windows of some layers are refused: no released model uses them.
    theta, known: see hf.rope.
    """
    s.only("hidden_act", "silu", "swish")
    _refuse_windows(s)
    heads = hf.head_sizes(s) if s.has("head_dim") else {}
    return {**hf.sizes(s), **hf.rope(s, theta, known), **heads}


def _refuse_windows(s: hf.CheckpointSettings) -> None:
    """Refuse a window if it is switched on and some layers have it."""
    window = s.flag("use_sliding_window", False) and hf.window_of(s)
    n = layers_with_windows(s, 28)
    s.raw("sliding_window")  # read, even if it is off
    if window and n:
        raise s.refuse("use_sliding_window", f"{n} layers would have a window")


def layers_with_windows(s: hf.CheckpointSettings, first: int) -> int:
    """How many layers would have a window; by default, all from `first` on."""
    first = s.integer("max_window_layers", first, low=0)
    sliding = hf.sliding_layers(s)
    if sliding is None:
        sliding = [i >= first for i in range(s.integer("num_hidden_layers"))]
    return sum(sliding)


ARCHITECTURE = Architecture(
    "qwen2",
    read,
    hugging_face=hf.HuggingFace(
        classes={"Qwen2ForCausalLM": {"num_key_value_heads": 32}},
        settings=settings,
        layer={**hf.LAYER, **hf.QKV_BIAS},
    ),
)
