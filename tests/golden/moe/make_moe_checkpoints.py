"""Write tests/golden/moe/checkpoints.npz and .json: make_checkpoints.py, of experts.

    S=tests/support PYTHONPATH=.:$S:$S/moe:tests/golden \\
        python tests/golden/moe/make_moe_checkpoints.py LLAMA_CPP [KIND ...]

makes all, or those of some kinds, and wants what make_checkpoints.py does, with transformers 5
(whose experts are in one tensor). It has no class for Ling 2.0, which is computed as a GLM-4.5 of
the same weights: they differ in names, and in q, k and v as one matrix.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from checkpoints import config_of, write_weights
from make_checkpoints import make, use_llama_cpp
from moe_checkpoints import MOE_KINDS, moe_weights_of, write_moe

GOLDEN = Path(__file__).resolve().parent


GLM = {  # names of parts
    **{"word_embeddings": "embed_tokens", "attention.dense": "self_attn.o_proj"},
    **{f"attention.{x}_layernorm": f"self_attn.{x[0]}_norm" for x in ("query", "key")},
    **{"mlp.gate.expert_bias": "mlp.gate.e_score_correction_bias"},
}


def as_glm(folder: Path, name: str) -> Path:
    """Ling 2.0 as GLM-4.5; other checkpoints as they are."""
    if name != "bailingmoe2":
        return folder
    config = config_of(MOE_KINDS[name])
    counts = {f"n_{x}_experts": config[f"num_{y}"] for x, y in
              (("routed", "experts"), ("shared", "shared_experts"))}  # fmt: skip
    twin = {"architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", **counts}
    out = folder / "glm"
    out.mkdir()
    (out / "config.json").write_text(json.dumps({**config, **twin}))
    size, n_head, n_head_kv = (
        config[x] for x in ("head_dim", "num_attention_heads", "num_key_value_heads")
    )
    weights: dict[str, np.ndarray] = {}
    for key, array in moe_weights_of(name).items():
        for theirs, glm in GLM.items():
            key = key.replace(theirs, glm)
        if "query_key_value" in key:
            parts = np.split(array, [n_head * size, (n_head + n_head_kv) * size])
            at = key.replace("attention.query_key_value", "self_attn.{}_proj")
            weights |= {at.format(x): part for x, part in zip("qkv", parts, strict=True)}
        else:
            weights[key] = array
    write_weights(out, weights, "bfloat16")
    return out


def main() -> None:
    wanted = use_llama_cpp(__doc__)
    from conversion import ModelBase
    from conversion.base import TextModel
    from conversion.hunyuan import HunYuanMoEModel

    ModelBase.no_mtp = True  # as --no-mtp
    TextModel._set_vocab_glm = TextModel._set_vocab_gpt2  # these vocabularies have no <|user|>
    HunYuanMoEModel.set_vocab = TextModel.set_vocab  # nor have they tiktoken's ranks
    make(GOLDEN, MOE_KINDS, write_moe, wanted, as_glm)


if __name__ == "__main__":
    main()
