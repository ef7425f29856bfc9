"""Small checkpoints of embedders and rerankers: those of `checkpoints`, with what only these have.

Their results are in tests/golden/embedders (make_embedders.py).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from checkpoints import KINDS, N_VOCAB, TIE, stored, weights_of, write, write_weights

IDENTITY = "torch.nn.modules.linear.Identity"
RNG = np.random.default_rng(1)
DENSE = [RNG.standard_normal((96, 64)).astype("f4"), RNG.standard_normal((32, 96)).astype("f4")]
YES, NO = 490, 491


def qwen3_embedder(folder: Path) -> Path:
    """Qwen3-Embedding: the last token's state."""
    write(folder, "qwen3")
    _bare(folder, "qwen3")
    write_modules(folder, "lasttoken", [])
    end_with(folder, "<s>")
    return folder


def gemma_embedder(folder: Path) -> Path:
    """EmbeddingGemma: attention to both sides, the mean, two dense matrices."""
    changes = {"architectures": ["Gemma3TextModel"], "use_bidirectional_attention": True}
    write(folder, "gemma3", **changes)
    _bare(folder, "gemma3")
    write_modules(folder, "mean_tokens", DENSE)
    return folder


def reranker(folder: Path, tied: bool = True) -> Path:
    """Qwen3-Reranker, whose vocabulary has "yes" and "no"; untied: with an output matrix."""
    write(folder, "qwen3", **{TIE: tied})
    if not tied:
        write_weights(folder, {**weights_of("qwen3"), "lm_head.weight": head()}, "bfloat16")
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["vocab"] |= {"yes": YES, "no": NO}
    path.write_text(json.dumps(content))
    return folder


def head() -> np.ndarray:
    """An output matrix [V, D], in float32 with values that are exact in bfloat16."""
    values = np.random.default_rng(2).standard_normal((N_VOCAB, 64)) / 4
    return stored(values, "bfloat16").astype(np.float32)


def _bare(folder: Path, name: str) -> None:
    """Weights of a model that was saved without a head."""
    weights = {
        k.removeprefix("model."): v for k, v in weights_of(name).items() if "lm_head" not in k
    }
    write_weights(folder, weights, KINDS[name].dtype)


def write_modules(folder: Path, pooling: str, dense: list[np.ndarray]) -> None:
    """modules.json and the folders that it names."""
    steps: list[tuple[str, str, dict[str, Any]]] = [
        ("Transformer", "", {}),
        ("Pooling", "1_Pooling", {f"pooling_mode_{pooling}": True}),
    ]
    for i, w in enumerate(dense, 2):
        config = {"in_features": w.shape[1], "out_features": w.shape[0], "bias": False}
        steps.append(("Dense", f"{i}_Dense", {**config, "activation_function": IDENTITY}))
    for _, path, config in steps[1:]:
        (folder / path).mkdir()
        (folder / path / "config.json").write_text(json.dumps(config))
    for i, w in enumerate(dense, 2):
        write_weights(folder / f"{i}_Dense", {"linear.weight": w}, "float32")
    listed = [{"idx": i, "path": path, "type": f"sentence_transformers.models.{kind}"}
              for i, (kind, path, _) in enumerate(steps)]  # fmt: skip
    (folder / "modules.json").write_text(json.dumps(listed))


def end_with(folder: Path, text: str) -> None:
    """Put a token after each text, as the post-processor says."""
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    id = next(x["id"] for x in content["added_tokens"] if x["content"] == text)
    single = [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": text, "type_id": 0}}]
    pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
    special = {text: {"id": text, "ids": [id], "tokens": [text]}}
    content["post_processor"] = {
        **{"type": "TemplateProcessing", "single": single, "pair": pair},
        "special_tokens": special,
    }
    path.write_text(json.dumps(content))
