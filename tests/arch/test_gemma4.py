"""gemma4: states of layers that share keys, and files whose settings cannot be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plain_gemma4 import plain
from tiny_gemma4 import EXPERTS, write_tiny_gemma4

from ggpy import arch
from ggpy.arch.config import UnsupportedModel
from ggpy.backends.numpy.backend import Reference
from ggpy.gguf import File, GGUFError
from ggpy.runtime.engine import Engine
from tools import make_tiny

IDS = [1, 287, 296, 339, 263, 353, 279, 302, 40, 41, 300, 7, 291, 287, 330, 320, 11, 268, 299, 310]


def load(path: Path) -> arch.Decoder:
    with File(path) as file:
        return arch.load(file, Reference(1), 64)


def test_layers_that_share_keys_have_no_state(tiny_path) -> None:
    decoder = load(tiny_path("gemma4"))
    groups = decoder.cache_shape(1, 64, 64).groups
    assert [group.layers for group in groups] == [(0,), (1,)]
    assert [(g.spec.window, g.spec.key_size, g.spec.n_head_kv) for g in groups] == [
        *((8, 16, 2), (0, 32, 1))
    ]
    mixers = [layer.mixer for layer in decoder.layers]
    assert [(m.group, m.slot) for m in mixers] == [(0, 0), (1, 0), (0, 0), (1, 0)]
    assert [m.wk is None for m in mixers] == [False, False, True, True]
    assert [m.wv is None for m in mixers] == [False, True, True, True]
    assert [layer.scale != 1 for layer in decoder.layers] == [True, True, True, False]


def our_logits(path: Path, ids: list[int]) -> np.ndarray:
    class NoTokens:
        end_ids = suppressed_ids = frozenset()

    ops = Reference(1)
    with File(path) as file:
        return Engine(arch.load(file, ops, 64), ops, NoTokens(), 64).logits(ids)


@pytest.mark.parametrize("together", [False, True], ids=["apart", "gate and up together"])
def test_experts_beside_the_feed_forward(tmp_path: Path, monkeypatch: Any, together: bool) -> None:
    """The logits of the plain decoder, and of llama.cpp."""
    path = write_tiny_gemma4(tmp_path, monkeypatch, EXPERTS, together=together)
    ours = our_logits(path, IDS)
    np.testing.assert_allclose(ours, plain(path, 64).logits(IDS), atol=1e-4, rtol=1e-4)
    pytest.importorskip("xllamacpp", reason="the oracle wheel is not installed")
    from oracle import Oracle, in_float32

    oracle = Oracle(in_float32(path, tmp_path / "f32.gguf"), 64)
    (theirs,) = oracle.greedy(IDS, 1, n_probs=1000).logprobs
    last = ours[-1] - np.log(np.exp(ours[-1].astype(np.float64)).sum())
    np.testing.assert_allclose(last[list(theirs)], list(theirs.values()), atol=4e-3)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"attention.sliding_window_pattern": None}, "one bool for each of 4 layers"),
        ({"attention.sliding_window_pattern": 2}, "one bool for each of 4 layers"),
        ({"attention.sliding_window_pattern": [True, False]}, "one bool for each of 4 layers"),
        ({"attention.sliding_window": None}, "attention.sliding_window is missing"),
        ({"attention.shared_kv_layers": 4}, "shared_kv_layers = 4: expected between 0 and 3"),
        ({"attention.value_length_swa": 32}, "value_length_swa = 32 is not supported"),
        ({"attention.value_length": 16}, "heads of 32 for keys and 16 for values"),
        ({"attention.key_length_swa": None}, "attention.key_length_swa is missing"),
        ({"rope.dimension_count_swa": 15}, "rope.dimension_count_swa = 15 is odd"),
        ({"rope.dimension_count_swa": 18}, "rope.dimension_count_swa = 18: expected between"),
        ({"attention.head_count_kv": [2, 3, 2, 1]}, "4 query heads cannot share 3"),
        ({"feed_forward_length": [32, 32]}, "4 integers, one for each layer"),
        (
            {"embedding_length_per_layer_input": 16},
            "tensor 'per_layer_token_embd.weight' has shape",
        ),
        ({"expert_count": 8}, "needs tensor 'blk.0.ffn_gate_inp.weight'"),
        ({"altup.num_inputs": 4}, "altup.num_inputs = 4"),
    ],
)
def test_settings_that_cannot_be_are_refused(
    settings: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(GGUFError) as info:
        load(make_tiny.write(tmp_path / "t.gguf", "gemma4", settings))
    assert said in str(info.value)


def test_keys_of_no_layer_cannot_be_shared(tmp_path: Path) -> None:
    settings = {"attention.shared_kv_layers": 3}
    with pytest.raises(
        UnsupportedModel, match=r"no layer with no window has any: gemma4\.attention"
    ):
        load(make_tiny.write(tmp_path / "t.gguf", "gemma4", settings))


@pytest.mark.parametrize(
    ("name", "array", "said"),
    [
        ("rope_freqs.weight", None, "needs tensor 'rope_freqs.weight'"),
        ("blk.0.attn_v.weight", None, "needs tensor 'blk.0.attn_v.weight'"),
        ("blk.1.attn_k.weight", None, "needs tensor 'blk.1.attn_k.weight'"),
        ("blk.2.attn_k.weight", np.ones((32, 32), np.float32), "has shape (32, 32)"),
        ("per_layer_proj_norm.weight", None, "needs tensor 'per_layer_proj_norm.weight'"),
        ("blk.1.layer_output_scale.weight", np.array([np.inf], np.float32), "not a finite number"),
        ("blk.0.layer_output_scale.weight", np.ones(64, np.float32), "has shape (64,)"),
    ],
)
def test_tensors_that_cannot_be_are_refused(
    name: str, array: np.ndarray | None, said: str, tmp_path: Path
) -> None:
    with pytest.raises(GGUFError) as info:
        load(make_tiny.write(tmp_path / "t.gguf", "gemma4", tensors={name: array}))
    assert said in str(info.value)
