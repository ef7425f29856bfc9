"""What layers with experts have besides: blocks behind them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ggpy import arch
from ggpy.backends.numpy.backend import Reference
from ggpy.gguf import File, GGUFError
from tools import make_tiny

from .test_forward import IDS, our_logits

NEXTN = {"block_count": 3, "nextn_predict_layers": 1}


def block_behind() -> dict[str, np.ndarray]:
    """What predicts the token after the next: a layer, with a head of its own."""
    m = make_tiny.MODELS["glm4moe"]
    tensors = make_tiny.tensors_of(m, 445)
    found = {k.replace("blk.1.", "blk.2."): x for k, x in tensors.items() if "blk.1." in k}
    head = {"eh_proj": (64, 128), "enorm": (64,), "hnorm": (64,), "shared_head_norm": (64,)}
    return found | {f"blk.2.nextn.{k}.weight": np.ones(x, np.float32) for k, x in head.items()}


def test_blocks_that_predict_further_tokens_change_nothing(tmp_path: Path) -> None:
    plain = make_tiny.write(tmp_path / "plain.gguf", "glm4moe")
    more = make_tiny.write(tmp_path / "more.gguf", "glm4moe", NEXTN, block_behind())
    with File(more) as file:
        sizes = arch.load(file, Reference(1), 64).sizes
    assert (sizes.n_layer, sizes.n_nextn) == (2, 1)
    np.testing.assert_array_equal(our_logits(plain, 64, IDS), our_logits(more, 64, IDS))


def test_other_tensors_behind_the_layers_are_refused(tmp_path: Path) -> None:
    tensors = {"blk.2.attn_sinks.weight": np.ones(4, np.float32)}
    path = make_tiny.write(tmp_path / "bad.gguf", "glm4moe", NEXTN, tensors)
    with File(path) as file, pytest.raises(GGUFError, match=r"for tensor 'blk.2.attn_sinks"):
        arch.check(file)
