"""Files of models with gated delta nets: blocks after the layers, and what is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plain_decoder import Plain

from ggpy import arch
from ggpy.backends.interface import Attention, GatedDeltaNet, PagedKV, Recurrent
from ggpy.backends.numpy.backend import Reference
from ggpy.formats import by_name
from ggpy.gguf import File, GGUFError
from tools import make_tiny, show

IDS = [1, 287, 296, 339, 263, 353, 279, 302, 40, 41, 300, 7]
TINY = make_tiny.MODELS["qwen35"]
Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a variant of the tiny model: settings, and tensors."""
    return lambda settings=None, tensors=None: make_tiny.write(
        tmp_path / "tiny.gguf", "qwen35", settings or {}, tensors or {}
    )


@pytest.fixture(scope="module")
def weights() -> dict[str, np.ndarray]:
    n = len(make_tiny.tokenizer(TINY.tokenizer)["tokenizer.ggml.tokens"])
    return make_tiny.tensors_of(TINY, n)


def logits(path: Path, ids: list[int] = IDS) -> np.ndarray:
    from ggpy.bench.runs import NoText
    from ggpy.runtime.engine import Engine

    ops = Reference(1)
    with File(path) as file:
        return Engine(arch.load(file, ops, 64), ops, NoText(), 64).logits(ids)


def behind(weights: dict[str, np.ndarray], layer: int = 4) -> dict[str, np.ndarray]:
    """A block that predicts further tokens, as files have it."""
    width = weights["output_norm.weight"].size
    block = {k.replace("blk.3.", ""): x for k, x in weights.items() if k.startswith("blk.3.")}
    block |= {
        f"nextn.{x}.weight": np.ones(width, np.float32)
        for x in ("enorm", "hnorm", "shared_head_norm")
    }
    block["nextn.eh_proj.weight"] = np.ones((width, 2 * width), np.float32)
    return {f"blk.{layer}.{name}": array for name, array in block.items()}


def test_layers_have_the_states_that_they_are_said_to_have(tiny_path) -> None:
    ops = Reference(1)
    with File(tiny_path("qwen35")) as file:
        decoder = arch.load(file, ops, 64)
    assert [type(layer.mixer) for layer in decoder.layers] == [GatedDeltaNet] * 3 + [Attention]
    keys, states = decoder.cache_shape(2, 64, 64).groups
    assert isinstance(keys.spec, PagedKV) and keys.layers == (3,)
    assert states.spec == Recurrent(2, 4, 16, 4) and states.layers == (0, 1, 2)
    assert states.spec.nbytes == 4 * (3 * 128 + 4 * 16 * 16)
    assert (states.n_pages, states.limit) == (8, 3), "of two sequences, and two spare ones"


def test_blocks_behind_the_layers_change_nothing(write: Write, weights, tiny_path) -> None:
    settings = {"block_count": 5, "nextn_predict_layers": 1}
    path = write(settings, behind(weights))
    np.testing.assert_array_equal(logits(path), logits(tiny_path("qwen35")))
    lists = {"attention.recurrent_layers": [True] * 3 + [False] * 2}
    path = write({**settings, **lists}, behind(weights))
    np.testing.assert_array_equal(logits(path), logits(tiny_path("qwen35")))


def test_one_key_head_for_all_values(write: Write, weights) -> None:
    """Here each of them is repeated; elsewhere they take turns."""
    changed = {}
    for i in range(3):
        kept = [*range(16), *range(32, 48), *range(64, 128)]
        for name in ("attn_qkv", "ssm_conv1d"):
            key = f"blk.{i}.{name}.weight"
            changed[key] = weights[key][kept]
    path = write({"ssm.group_count": 1}, changed)
    expected = Plain(path, 64).logits(IDS)
    np.testing.assert_allclose(logits(path), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ssm.state_size": 0}, r"ssm.state_size = 0: expected between 1 and 1024"),
        ({"ssm.state_size": None}, r"ssm.state_size is missing"),
        ({"ssm.state_size": 32}, r"ssm.inner_size = 64: 4 value heads of 32 .* are 128"),
        ({"ssm.group_count": 3}, r"time_step_rank = 4: value heads, which 3 key heads"),
        ({"ssm.group_count": 0}, r"ssm.group_count = 0"),
        ({"ssm.time_step_rank": 5000}, r"ssm.time_step_rank = 5000"),
        ({"ssm.conv_kernel": 1}, r"ssm.conv_kernel = 1: expected between 2 and 64"),
        ({"ssm.conv_kernel": 5}, r"ssm_conv1d.weight' has shape \(128, 4\), .* \(128, 5\)"),
        ({"ssm.dt_b_c_rms": True}, r"not supported: qwen35.ssm.dt_b_c_rms = True"),
        ({"full_attention_interval": 0}, r"full_attention_interval = 0"),
        ({"full_attention_interval": 2}, r"blk.1.attn_qkv.weight' has 128 rows, its parts .* 384"),
        ({"attention.recurrent_layers": [True] * 4}, r"none of 4 layers attends"),
        ({"attention.recurrent_layers": [True] * 3}, r"expected 4 bools, one for each layer"),
        ({"attention.recurrent_layers": [1, 1, 1, 0]}, r"expected 4 bools"),
        ({"nextn_predict_layers": 4}, r"block_count = 4: expected between 5"),
        ({"nextn_predict_layers": 1}, r"none of 3 layers attends"),
        ({"expert_count": 8}, r"expert_count = 8 is not supported"),
    ],
)
def test_settings_are_refused_by_name(settings: dict[str, Any], message: str, write: Write) -> None:
    with File(write(settings)) as file, pytest.raises(GGUFError, match=message):
        arch.check(file)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"blk.0.ssm_a": None}, r"needs tensor 'blk.0.ssm_a'"),
        (
            {"blk.3.attn_q.weight": (192, 64)},
            r"blk.3.attn_q.weight' has 192 rows, its parts .* 256",
        ),
        ({"blk.1.ssm_dt.bias": (5,)}, r"blk.1.ssm_dt.bias' has shape \(5,\), .* \(4,\)"),
        ({"blk.3.ssm_a": (4,)}, r"no use for tensor 'blk.3.ssm_a'"),
        ({"blk.4.nextn.enorm.weight": (64,)}, r"no use for tensor 'blk.4.nextn.enorm.weight'"),
    ],
)
def test_tensors_are_refused_by_name(tensors: dict[str, Any], message: str, write: Write) -> None:
    given = {k: None if x is None else np.ones(x, np.float32) for k, x in tensors.items()}
    with File(write({}, given)) as file, pytest.raises(GGUFError, match=message):
        arch.check(file)


def test_show_says_that_it_can_be_run(tiny_path, write: Write, capsys) -> None:
    assert show.main([str(tiny_path("qwen35"))]) == 0
    assert "can be run: yes" in capsys.readouterr().out
    assert show.main([str(write({"ssm.conv_kernel": 1}))]) == 0
    assert "can be run: no, qwen35.ssm.conv_kernel = 1" in capsys.readouterr().out


def test_taps_in_blocks_are_refused(write: Write, weights) -> None:
    """A format in which four of them cannot be is no matter: the file's reader refuses it."""
    path = write()
    with File(path) as file:
        tensor = file.tensors["blk.0.ssm_conv1d.weight"]
        codes = np.zeros(tensor.shape, np.int8).view(np.uint8)
        file.tensors[tensor.name] = replace(tensor, format=by_name("I8"), data=codes)
        with pytest.raises(GGUFError, match=r"ssm_conv1d.weight' is I8: only floats"):
            arch.load(file, Reference(1), 64)
