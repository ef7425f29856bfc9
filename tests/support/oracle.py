"""llama.cpp as an oracle, by way of the wheel xllamacpp: greedy tokens, log probabilities.

Weights in float32 files are multiplied in float32 there; those in blocks with activations rounded
to 8 bits.
"""

from __future__ import annotations

import json
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import gguf
import xllamacpp


@dataclass(frozen=True)
class Continuation:
    """Generated ids with their text, and the log probabilities of the best ids of each step.

    logprobs has fewer entries where a character is made of several tokens.
    """

    ids: list[int]
    text: str
    logprobs: list[dict[int, float]]


class Oracle:
    """A loaded model. Its KV cache is float32 unless f32_cache is False.

    pooling: "mean", "last", "cls" or "rank"; it then answers `embeddings`, or `rerank`, alone.
    """

    def __init__(
        self, path: Path, n_ctx: int = 256, f32_cache: bool = True, pooling: str = ""
    ) -> None:
        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.n_ctx = n_ctx
        params.n_parallel = 1
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
        params.warmup = params.fit_params = False
        params.verbosity = 0
        if f32_cache:
            params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        if pooling:
            kinds, params.embedding = xllamacpp.llama_pooling_type, True
            params.pooling_type = getattr(kinds, f"LLAMA_POOLING_TYPE_{pooling.upper()}")
            params.n_batch = params.n_ubatch = n_ctx  # a text is one step there
        self._server = xllamacpp.Server(params)

    def greedy(self, ids: list[int], n: int, n_probs: int = 2) -> Continuation:
        """Up to n tokens after ids. Generation stops after an end token."""
        request = {"prompt": ids, "n_predict": n, "temperature": 0.0, "n_probs": n_probs}
        request |= {"top_k": 1, "cache_prompt": False, "return_tokens": True}
        answer = self._post("/completion", request)
        probabilities = answer.get("completion_probabilities", [])  # none for part of a character
        return Continuation(
            answer["tokens"],
            answer["content"],
            [{x["id"]: x["logprob"] for x in t["top_logprobs"]} for t in probabilities],
        )

    def draws(
        self, ids: list[int], n: int, **sampling: object
    ) -> tuple[list[int], list[dict[int, float]]]:
        """n ids drawn after ids, and for each the probabilities that its chain left.

        Every token must be a whole number of characters: see `logprobs`.
        """
        request = {"prompt": ids, "n_predict": n, "n_probs": 1000, "post_sampling_probs": True}
        request |= {"cache_prompt": False, "return_tokens": True}
        answer = self._post("/completion", {**request, **sampling})
        steps = answer["completion_probabilities"]
        found = [{x["id"]: x["prob"] for x in step["top_probs"]} for step in steps]
        assert len(found) == len(answer["tokens"]) == n, "characters of several tokens"
        return answer["tokens"], found

    def embeddings(self, prompts: list[list[int]]) -> list[list[float]]:
        """A vector of length 1 for each of several lists of ids."""
        found = self._post("/v1/embeddings", {"input": prompts})["data"]
        return [x["embedding"] for x in found]

    def rerank(self, query: str, documents: list[str]) -> list[float]:
        """The relevance of each document."""
        found = self._post("/v1/rerank", {"query": query, "documents": documents})["results"]
        return [x["relevance_score"] for x in sorted(found, key=lambda x: x["index"])]

    def tokenize(self, text: str) -> list[int]:
        """The ids of a text, with special tokens parsed and the model's BOS token in front."""
        request = {"content": text, "add_special": True, "parse_special": True}
        return self._post("/tokenize", request)["tokens"]

    def _post(self, path: str, body: dict) -> dict:
        request = urllib.request.Request(
            self._server.listening_address + path,
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as reply:
            return json.load(reply)


def in_float32(path: Path, to: Path) -> Path:
    """The same model with every tensor in float32."""
    reader = gguf.GGUFReader(path)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(to, architecture)
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            kind = field.types[0]
            writer.add_key_value(key, field.contents(), kind, sub_type=field.types[-1])
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, gguf.quants.dequantize(tensor.data, tensor.tensor_type))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return to
