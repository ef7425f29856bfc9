"""Whole chains against llama.cpp: the tokens that each draw could give, after all draws before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ggpy
from ggpy.sampling import Sampler, SamplingParams

PROMPT = "hello world, hello world"
N = 12
TINY = Path(__file__).resolve().parents[2] / "models" / "tiny" / "llama.gguf"
CHAINS: list[dict[str, Any]] = [
    {"mirostat": 1, "mirostat_tau": 3.0, "mirostat_eta": 0.5, "presence_penalty": 5.0},
    {"mirostat": 2, "mirostat_tau": 3.0, "mirostat_eta": 0.5, "top_k": 2},
    {"mirostat": 1, "temperature": 1.5, "mirostat_tau": 6.0},
    {"adaptive_target": 0.3, "adaptive_decay": 0.5, "samplers": ["min_p", "temp", "adaptive_p"]},
    {"adaptive_target": 0.1, "samplers": "akt"},
    {"samplers": ["temperature", "top_p", "top_k"], "temperature": 0.6, "top_k": 12},
    {"samplers": ["top_k", "min_p", "top_p"], "top_k": 12, "min_p": 0.1, "top_p": 0.8},
    {"samplers": ["top_k", "penalties", "temp", "top_p"], "repeat_penalty": 1.8, "top_p": 0.8},
    {"samplers": "tek", "repeat_penalty": 1.8, "frequency_penalty": 0.5, "top_k": 9},
    {"samplers": "tdt", "dry_multiplier": 3.0, "dry_allowed_length": 1},
    {"samplers": "kp", "top_k": 30, "top_p": 0.1, "min_keep": 7},
    {"samplers": "km", "top_k": 30, "min_p": 0.9, "min_keep": 7},
    {"samplers": "ky", "top_k": 30, "typical_p": 0.1, "min_keep": 9},
    {"samplers": "xk", "xtc_probability": 1.0, "xtc_threshold": 0.01, "top_k": 5},
    {"samplers": "xk", "xtc_probability": 1.0, "xtc_threshold": 0.01, "top_k": 5, "min_keep": 452},
]


@pytest.fixture(scope="module")
def llama_cpp(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """llama.cpp and our model, with the same weights in float32."""
    pytest.importorskip("xllamacpp", reason="the oracle wheel is not installed")
    from oracle import Oracle, in_float32

    path = in_float32(TINY, tmp_path_factory.mktemp("oracle") / "f32.gguf")
    with ggpy.load(path, device="numpy", n_ctx=256) as model:
        yield Oracle(path), model


@pytest.mark.parametrize("options", CHAINS, ids=str)
def test_probabilities_of_draws_equal_llama_cpps(
    llama_cpp: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from ggpy.serve.api.options import sampling_params
    from ggpy.serve.fields import Fields

    oracle, model = llama_cpp
    odd = [id for id in range(model.tokenizer.n_vocab) if not model.tokenizer.piece(id).isascii()]
    bias = [[id, False] for id in [*odd, *model.tokenizer.end_ids]]
    body = {"temperature": 0.3, "seed": 5, "logit_bias": bias, **options}
    prompt = oracle.tokenize(PROMPT)
    tokens, theirs = oracle.draws(prompt, N, **body)
    logits = model.logits([*prompt, *tokens])[len(prompt) - 1 :]
    sampler = Sampler(sampling_params(Fields(body), model.tokenizer, SamplingParams()), 453, prompt)
    for token, expected, row in zip(tokens, theirs, logits[:-1], strict=True):
        ids, p = sampler.probabilities(row)
        ours = dict(zip(ids.tolist(), p.tolist(), strict=True))
        different = {id: (ours.get(id, 0), expected.get(id, 0)) for id in ours | expected}
        assert all(abs(a - b) < 2e-3 for a, b in different.values())
        place = ids.tolist().index(token)
        middle = float(np.sum(p[:place]) + p[place] / 2)
        monkeypatch.setattr("ggpy.sampling.sampler.uniform", lambda *_, u=middle: u)
        assert sampler.sample(row) == token
        sampler.accept(token)


@pytest.mark.parametrize("seed", range(8))
def test_infill_leaves_what_llama_cpps_leaves(llama_cpp: Any, seed: int) -> None:
    """Of a few texts that begin alike, and an end that is more or less probable than they."""
    from ggpy.serve.api.options import sampling_params
    from ggpy.serve.fields import Fields

    oracle, model = llama_cpp
    tokens, rng = model.tokenizer, np.random.default_rng(seed)
    alike = [id for id in range(453) if tokens.piece(id).startswith((b" w", b" t", b"th", b"he"))]
    bias = [[id, rng.uniform(11, 13)] for id in rng.choice(alike, 6, replace=False).tolist()]
    bias.append([tokens.end_of_turn_id, [-99.0, 3.0, 9.0, 14.0][seed % 4]])
    body = {"samplers": ["kit", "tki"][seed // 4], "top_k": 12, "temperature": 0.7}
    body |= {"seed": seed, "logit_bias": bias if seed else []}
    prompt = oracle.tokenize(PROMPT)
    (expected,) = oracle.draws(prompt, 1, **body)[1]
    params = sampling_params(Fields(body), tokens, SamplingParams())
    ids, p = Sampler(params, 453, prompt, None, tokens).probabilities(model.logits(prompt)[-1])
    ours = dict(zip(ids.tolist(), p.tolist(), strict=True))
    assert all(abs(ours.get(id, 0) - expected.get(id, 0)) < 2e-3 for id in ours | expected)
