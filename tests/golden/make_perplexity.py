"""Write tests/golden/perplexity.json: what llama.cpp finds SmolLM2's perplexity of text.txt to be.

    python tests/golden/make_perplexity.py FILE.gguf

llama.cpp is the shared library in the wheel xllamacpp, called through its C interface: chunks of
512 tokens, each in an empty context, of which the log probabilities of the second half count, as in
llama-perplexity. Done twice: on the file as it is, where llama.cpp rounds activations to 8 bits,
and on its weights in float32. Tests compare with both, without llama.cpp.
"""

from __future__ import annotations

import ctypes as c
import hashlib
import json
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from ggpy.bench.xllamacpp import LlamaBatch, library

GOLDEN = Path(__file__).resolve().parent
N_CTX = 512

FUNCTIONS: tuple[tuple[Any, ...], ...] = (
    ("llama_vocab_get_add_bos", c.c_bool, c.c_void_p),
    ("llama_vocab_bos", c.c_int32, c.c_void_p),
    ("llama_get_logits_ith", c.POINTER(c.c_float), c.c_void_p, c.c_int32),
    (
        *("llama_tokenize", c.c_int32, c.c_void_p, c.c_char_p, c.c_int32),
        *(c.POINTER(c.c_int32), c.c_int32, c.c_bool, c.c_bool),
    ),
)


class Model:
    """A model in llama.cpp with one sequence of N_CTX tokens."""

    def __init__(self, path: Path) -> None:
        self.lib = lib = library(FUNCTIONS)
        model = lib.llama_model_load_from_file(str(path).encode(), lib.llama_model_default_params())
        assert model, path
        params = lib.llama_context_default_params()
        params.words[0] = params.words[1] = params.words[2] = N_CTX  # n_ctx, n_batch, n_ubatch
        self.context = lib.llama_init_from_model(model, params)
        assert self.context
        self.vocab = lib.llama_model_get_vocab(model)
        self.n_vocab = lib.llama_vocab_n_tokens(self.vocab)

    def tokenize(self, text: str) -> list[int]:
        data = text.encode()
        ids = (c.c_int32 * len(data))()
        n = self.lib.llama_tokenize(self.vocab, data, len(data), ids, len(data), True, False)
        return list(ids[:n])

    def nll(self, ids: list[int]) -> np.ndarray:
        """-ln p of the second half of one chunk."""
        n, first = len(ids), len(ids) // 2
        evaluated = list(ids)
        if self.lib.llama_vocab_get_add_bos(self.vocab):
            evaluated[0] = self.lib.llama_vocab_bos(self.vocab)
        zero = (c.c_int32 * 1)(0)
        pointer = c.cast(zero, c.POINTER(c.c_int32))
        batch = LlamaBatch(
            n,
            (c.c_int32 * n)(*evaluated),
            None,
            (c.c_int32 * n)(*range(n)),
            (c.c_int32 * n)(*[1] * n),
            (c.POINTER(c.c_int32) * n)(*[pointer] * n),
            (c.c_int8 * n)(*[i >= first for i in range(n)]),
        )
        self.lib.llama_memory_clear(self.lib.llama_get_memory(self.context), True)
        assert self.lib.llama_decode(self.context, batch) == 0
        found = []
        for i in range(first, n - 1):
            row = self.lib.llama_get_logits_ith(self.context, i)
            logits = np.ctypeslib.as_array(row, (self.n_vocab,)).astype(np.float64)
            logits -= logits.max()
            found.append(np.log(np.exp(logits).sum()) - logits[ids[i + 1]])
        return np.array(found)


def measured(path: Path) -> dict:
    model = Model(path)
    ids = model.tokenize((GOLDEN / "text.txt").read_text(encoding="utf-8").removesuffix("\n"))
    chunks = [ids[i : i + N_CTX] for i in range(0, len(ids) - N_CTX + 1, N_CTX)]
    nll = np.array([model.nll(chunk) for chunk in chunks])
    after = np.exp(np.cumsum(nll.sum(axis=1)) / (np.arange(1, len(nll) + 1) * nll.shape[1]))
    error = float(nll.std() / np.sqrt(nll.size - 1) * after[-1])
    return {"n_tokens": len(ids), "perplexity": after.round(5).tolist(), "error": round(error, 5)}


def main(path: Path) -> None:
    sys.path.insert(0, str(GOLDEN.parent))
    from oracle import in_float32

    with tempfile.TemporaryDirectory() as folder:
        in_f32 = measured(in_float32(path, Path(folder, "f32.gguf")))
    golden = {
        "model": path.name,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "text_sha256": hashlib.sha256((GOLDEN / "text.txt").read_bytes()).hexdigest(),
        "oracle": f"xllamacpp {version('xllamacpp')}, its llama.cpp through the C interface",
        "n_ctx": N_CTX,
        "float32": in_f32,
        "as_it_is": measured(path),
    }
    (GOLDEN / "perplexity.json").write_text(json.dumps(golden, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
