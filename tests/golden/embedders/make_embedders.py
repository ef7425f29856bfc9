"""Write tests/golden/embedders/embedders.npz: what transformers computes with the checkpoints of
tests/support/embedders/embedder_checkpoints.py.

    S=tests/support PYTHONPATH=.:$S:$S/embedders python tests/golden/embedders/make_embedders.py

wants torch (the CPU's is enough), transformers and safetensors. For each embedder the file has ids
[N, T] and embeddings [N, D], of length 1, with the pooling and the dense matrices in numpy; for
each reranker ids [N, T] of prompts and the probabilities [N] of "yes" against "no".
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from zlib import crc32

import numpy as np
from checkpoints import N_VOCAB
from embedder_checkpoints import DENSE, NO, YES, gemma_embedder, qwen3_embedder, reranker

GOLDEN = Path(__file__).resolve().parent
N_PROMPTS, N_TOKENS = 3, 40  # several of gemma's windows


def ids_of(name: str) -> np.ndarray:
    """Random ids [N, T], others for each model."""
    rng = np.random.default_rng(crc32(name.encode()))
    return rng.integers(3, N_VOCAB, (N_PROMPTS, N_TOKENS)).astype(np.int32)


def computed(folder: Path, classes: str, ids: np.ndarray, output: str) -> np.ndarray:
    """An output [N, T, D] of a class of transformers."""
    import torch
    import transformers

    model = getattr(transformers, classes).from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.inference_mode():
        found = model.eval()(torch.tensor(ids.astype(np.int64)))
    return getattr(found, output).float().numpy()


def unit(x: np.ndarray) -> np.ndarray:
    return (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)


def qwen3(folder: Path, ids: np.ndarray) -> np.ndarray:
    """Vectors [N, D] of Qwen3-Embedding."""
    return unit(computed(qwen3_embedder(folder), "Qwen3Model", ids, "last_hidden_state")[:, -1])


def gemma(folder: Path, ids: np.ndarray) -> np.ndarray:
    """Vectors [N, D] of EmbeddingGemma."""
    states = computed(gemma_embedder(folder), "Gemma3TextModel", ids, "last_hidden_state")
    return unit(states.mean(axis=1) @ DENSE[0].T @ DENSE[1].T)


def relevance(folder: Path, ids: np.ndarray, tied: bool) -> np.ndarray:
    """Probabilities [N] of "yes"."""
    logits = computed(reranker(folder, tied), "Qwen3ForCausalLM", ids, "logits")[:, -1]
    against = logits[:, NO].astype(np.float64) - logits[:, YES]
    return (1 / (1 + np.exp(against))).astype(np.float32)


MADE: dict[str, tuple[str, Callable[[Path, np.ndarray], np.ndarray]]] = {
    "qwen3-embedding": ("vectors", qwen3),
    "embedding-gemma": ("vectors", gemma),
    "qwen3-reranker": ("yes", partial(relevance, tied=True)),
    "qwen3-reranker-untied": ("yes", partial(relevance, tied=False)),
}


def main() -> None:
    found = {}
    with tempfile.TemporaryDirectory() as work:
        for name, (output, compute) in MADE.items():
            ids = ids_of(name)
            found |= {f"{name}/ids": ids, f"{name}/{output}": compute(Path(work, name), ids)}
    np.savez_compressed(GOLDEN / "embedders.npz", **found)


if __name__ == "__main__":
    main()
