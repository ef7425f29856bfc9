"""qwen35: Qwen3.5 and 3.6: gated delta nets in three of four layers, gated attention in the fourth.

Rope has sections for the axes of images, which in a text all have the same position. Blocks that
predict further tokens stand behind the layers of some files; they are not used.
"""

from __future__ import annotations

from . import hugging_face as hf
from . import hybrid, llama
from .architecture import Architecture, Context, LayerSettings, ModelSettings
from .layers import attention, delta, dense
from .layers.attention import QK_NORM
from .layers.delta import DeltaSettings
from .layers.dense import DenseSettings

NORM = "ffn_norm.weight"


def read(c: Context) -> ModelSettings:
    """The sections of rope are read, and not used."""
    c.config.raw(hybrid.SECTIONS)
    attends, ffn = llama.attention(c, "neox"), DenseSettings("silu")
    mixers = [attends if x.recurrent is None else DeltaSettings(True) for x in c.sizes.layers]
    return ModelSettings([LayerSettings(mixer, ffn) for mixer in mixers])


def settings(s: hf.CheckpointSettings) -> hf.Metadata:
    """The sections are those of the checkpoint, or the usual ones."""
    return {**hf.sizes(s), **hybrid.settings(s), **hybrid.sections(s)}


ARCHITECTURE = Architecture(
    "qwen35",
    read,
    layer={**attention.TENSORS, **QK_NORM, **attention.GATE, **dense.TENSORS},
    recurrent_layer={**delta.TENSORS, **dense.TENSORS},
    fused={hybrid.STORED_NORM: (NORM,)},
    turns=hybrid.GATED_Q,
    behind=hybrid.NEXTN | frozenset(hf.LAYER) | frozenset(QK_NORM),
    understands=frozenset({"nextn_predict_layers"}),
    hugging_face=hf.HuggingFace(
        classes={name: hybrid.DEFAULTS for name in hybrid.QWEN35},
        settings=settings,
        layer={**hybrid.CHECKPOINT, **hybrid.SEPARATE, **hybrid.FFN},
        transforms=hybrid.reordered,
        norm_offset=1.0,
        inserted="language_model.",
        others=("model.visual.", "visual.", "mtp.", "model.mtp."),
    ),
)
