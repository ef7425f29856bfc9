"""qwen35: Qwen3.5 and 3.6: gated delta nets in three of four layers, gated attention in the fourth.

Some files have blocks for multi-token prediction after the layers; they are not used.
"""

from __future__ import annotations

from . import hugging_face as hf
from . import hybrid
from .architecture import Architecture, Context, ModelSettings
from .layers import delta, dense
from .layers.dense import DenseSettings


def read(c: Context) -> ModelSettings:
    """Value head h belongs to key head h % Hk."""
    return hybrid.read(c, DenseSettings("silu"), tiled=True)


def settings(s: hf.CheckpointSettings) -> hf.Metadata:
    """The settings of a file; sections of rope are those of the checkpoint, or the usual ones."""
    return {**hf.sizes(s), **hybrid.settings(s), **hybrid.sections(s)}


DEFAULTS = {**hybrid.DEFAULTS, "vocab_size": 248320, "intermediate_size": 12288}
ARCHITECTURE = Architecture(
    "qwen35",
    read,
    layer={**hybrid.ATTENDS, **dense.TENSORS},
    recurrent_layer={**delta.TENSORS, **dense.TENSORS},
    fused=hybrid.FUSED_NORM,
    turns=hybrid.GATED_Q,
    optional_layer={},
    hugging_face=hf.HuggingFace(
        classes={f"Qwen3_5For{x}": DEFAULTS for x in hybrid.KINDS},
        settings=settings,
        layer={**hybrid.CHECKPOINT, **hybrid.SEPARATE, **hybrid.FFN},
        transforms=hybrid.reordered,
        norm_offset=1.0,
        inserted="language_model.",
        others=hybrid.OTHERS,
    ),
)
