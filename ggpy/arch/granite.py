"""granite: llama with four multipliers: of the embedding, of attention scores, of what attention
and feed-forward add to x, and of logits.
"""

from __future__ import annotations

from dataclasses import replace

from . import hugging_face as hf
from . import llama
from .architecture import OUTPUT, ROPE_FREQS, Architecture, Context, LayerSettings, ModelSettings
from .layers.dense import DenseSettings

# Keys of files and of config.json
MULTIPLIERS = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
LOWEST = 1e-6  # of a multiplier
# Of images, and of hybrids, which files of Granite 4 have even if all layers attend
UNUSED = (
    *("deepstack_mapping", "expert_shared_feed_forward_length", "ssm.conv_kernel"),
    *("ssm.state_size", "ssm.group_count", "ssm.inner_size", "ssm.time_step_rank"),
)


def read(c: Context) -> ModelSettings:
    """The residual stream is kept divided by residual_scale, so that nothing is scaled in layers.

    Norms take the scale out again, if their eps is divided by its square: x / r normalised with
    eps / r^2 is x normalised with eps.
    """
    embedding, residual, logits = (
        c.config.real(key, 1.0, LOWEST)
        for key in ("embedding_scale", "residual_scale", "logit_scale")
    )
    for key in UNUSED:
        c.config.raw(key)
    mixer = llama.attention(c)
    if c.config.raw("rope.scaling.finetuned") is False:  # how a file says that there is no rope
        mixer = replace(mixer, rope=None)
    return ModelSettings(
        [LayerSettings(mixer, DenseSettings("silu"))] * c.sizes.n_layer,
        embedding_scale=embedding / residual,
        eps=c.sizes.eps / residual**2,
        logit_scale=1 / logits,
    )


def settings(s: hf.CheckpointSettings) -> hf.Metadata:
    """attention_multiplier is 1, not 1 / sqrt(E), where config.json does not say."""
    found = llama.usual_settings(s)
    found |= {key: ("f32", s.real(name, 1.0, LOWEST)) for key, name in MULTIPLIERS.items()}
    return found


ARCHITECTURE = Architecture(
    "granite",
    read,
    optional={**OUTPUT, **ROPE_FREQS},
    optional_layer=llama.BIASES,
    understands=frozenset({"embedding_scale", "residual_scale", "logit_scale"}),
    hugging_face=hf.HuggingFace(
        classes={"GraniteForCausalLM": {"max_position_embeddings": 2048}},
        settings=settings,
        tensors=hf.rope_freqs,
        permuted=hf.PERMUTED,
    ),
)
