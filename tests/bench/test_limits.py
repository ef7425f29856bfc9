"""Bytes and operations of a step, against numbers counted by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy_ops import tensor
from random_decoder import DIFFERING, random_decoder

from ggpy import arch
from ggpy.backends.numpy.backend import Reference
from ggpy.bench.kernels.ceilings import Ceilings
from ggpy.bench.limits import LayerWork, Work, n_weights, work_of
from ggpy.cache_types import CacheTypes
from ggpy.gguf import File

F16 = CacheTypes("f16", "f16")
MEMORY = Ceilings(1.0, 1e30, "only memory counts")
MATRIX = Ceilings(1e30, 1.0, "only arithmetic counts")
WORK = Work(
    weight_bytes=1000,
    layer_flops=10,
    output_flops=7,
    layers=[LayerWork(kv_bytes=3, flops=2, window=window) for window in (0, 4)],
)


def test_types_of_keys_and_values(tiny_path: Callable[[str], Path]) -> None:
    with File(tiny_path("qwen3")) as file:
        decoder = arch.load(file, Reference(1), 64)
        work = work_of(file.tensors, decoder, CacheTypes("q8_0", "q4_0"))
    assert [layer.kv_bytes for layer in work.layers] == [2 * (34 + 18)] * 2


def test_keys_and_values_of_several_sizes() -> None:
    """Layers that differ, each by itself; values are of another size than keys."""
    decoder = random_decoder(Reference(1), variation=DIFFERING)
    work = work_of({"token_embd.weight": tensor(np.zeros((4, 32), np.float32))}, decoder, F16)
    assert [layer.kv_bytes for layer in work.layers] == [384, 192, 640, 384]
    assert [layer.flops for layer in work.layers] == [768, 1536, 640, 768]
    assert [layer.window for layer in work.layers] == [40, 0, 70, 40]


def test_generation_reads_weights_once_and_every_sequence_its_context() -> None:
    # Position 9 sees 10 positions in the first layer, 4 in the second.
    assert WORK.generation_seconds(9, 1, 1, MEMORY) == 1000 + 3 * (10 + 4)
    assert WORK.generation_seconds(9, 2, 5, MEMORY) == 2 * 1000 + 5 * 3 * (14 + 15)
    assert WORK.generation_seconds(1, 1, 1, MEMORY) == 1000 + 3 * (2 + 2)
    assert WORK.generation_seconds(9, 1, 5, MATRIX) == 5 * (10 + 7 + 2 * 14)


def test_prompts_are_read_in_chunks_and_give_one_row() -> None:
    # Positions 0 to 5 see 1 to 6, in the window 1, 2, 3, 4, 4, 4; then 6 and 7.
    assert WORK.prompt_seconds(0, 6, 6, MATRIX) == 6 * 10 + 7 + 2 * (21 + 18)
    assert WORK.prompt_seconds(0, 8, 6, MATRIX) == 8 * 10 + 7 + 2 * (36 + 26)
    # A chunk reads all before it; with the window, the 3 before its first token and its own.
    assert WORK.prompt_seconds(0, 8, 6, MEMORY) == 2 * 1000 + 3 * ((6 + 6) + (8 + 5))


def test_the_slower_of_both_counts() -> None:
    both = Ceilings(2.0, 0.1, "")
    step = np.array([9])
    assert WORK.step_seconds(step, 1, 1, both) == max((1000 + 42) / 2, (17 + 28) / 0.1)


def test_what_a_step_does_not_read_does_not_count(tiny_path: Callable[[str], Path]) -> None:
    """Tables of which a step takes rows, and tensors that the architecture has no use for."""
    apart = ("per_layer_token_embd.weight", "blk.2.attn_k.weight")
    with File(tiny_path("gemma4")) as file:
        decoder = arch.load(file, Reference(1), 64)
        work = work_of(arch.tensors(file), decoder, F16)
        read = [t for name, t in file.tensors.items() if name not in apart]
        assert len(read) == len(file.tensors) - len(apart)
    assert work.weight_bytes == sum(t.nbytes for t in read)
    matrices = n_weights(t for t in read if len(t.shape) == 2)
    assert work.layer_flops == 2 * matrices - work.output_flops


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "phi3"])
def test_work_of_a_model(architecture: str, tiny_path: Callable[[str], Path]) -> None:
    with File(tiny_path(architecture)) as file:
        decoder = arch.load(file, Reference(1), 64)
        work = work_of(file.tensors, decoder, CacheTypes("f16", "f16"))
        s, tied = decoder.sizes, "output.weight" not in file.tensors
        table = file.tensors["token_embd.weight"].nbytes
        total = sum(t.nbytes for t in file.tensors.values())
    heads = s.layer.key_size * (s.layer.n_head + s.layer.n_head_kv)
    per_layer = s.n_embd * 2 * heads + 3 * s.n_embd * s.layer.n_ff
    assert work.weight_bytes == total - (0 if tied else table)
    assert work.layer_flops == 2 * s.n_layer * per_layer
    assert work.output_flops == 2 * s.n_vocab * s.n_embd
    for found, layer in zip(work.layers, decoder.layers, strict=True):
        assert found.kv_bytes == 2 * s.layer.n_head_kv * s.layer.key_size * 2
        assert found.flops == 4 * s.layer.n_head * s.layer.key_size
        assert found.window == layer.mixer.spec.window
