"""Every known model on every architecture, with 1 to 2048 tokens: what is launched fits the GPU.

No GPU is needed: a device that computes nothing compares each launch with what a CTA may have. The
static shared memory of kernels is bounded here, and tests/kernels compile them to see that it is.
Each structure that a launch copies has asserts of its layout in its kernel's source.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from counting_device import CountingDevice
from static_shared import most_static

from ggpy import arch
from ggpy.backends.cuda.backend import Cuda
from ggpy.backends.cuda.weights import Uploader
from ggpy.backends.interface import PAGE_SIZE, PagedKV, Step
from ggpy.cache_types import USUAL, CacheTypes
from ggpy.device.base import capability, three
from ggpy.evaluate import synthetic
from ggpy.evaluate.synthetic import Synthetic
from ggpy.util.simulated import SHARED_BYTES

GPUS = {**SHARED_BYTES, "sm_90a": 227 << 10, "sm_100": 227 << 10, "sm_120": 99 << 10}
SMS = {"sm_75": 40, "sm_80": 108, "sm_86": 28, "sm_89": 128, "sm_120": 170}  # else 132
TOKENS = (1, 2, 4, 8, 9, 16, 32, 64, 192, 2048)  # of a sequence
SEQUENCES = (1, 2, 4, 8, 16, 64)  # that decode together
MOST_IDS = 32_001  # rows of the output change no shared memory
LAYERS = {
    "gemma3": 7,
    "gemma2": 3,
    "gemma4": 60,  # its settings have a list of all layers
    **dict.fromkeys(("qwen35", "qwen35moe", "qwen3next"), 4),
}  # of other kinds of attention; else 2
# Types and GPUs of the first shape of an architecture in FIRST, and of the other shapes.
TYPES, USUAL_TYPE = ("Q8_0", "Q4_K_M", "F16", "W8A8"), ("Q4_K_M",)
FIRST = ("llama", "gemma3", "phi3", "qwen3moe", "gpt-oss", "qwen35")
FEW_GPUS = ("sm_75", "sm_80", "sm_89", "sm_90a")  # shared memory of each size


class FittingDevice(CountingDevice):
    """A GPU of an architecture; AssertionError for a launch that it could not make."""

    def __init__(self, architecture: str) -> None:
        super().__init__()
        self.arch, self.shared_bytes = architecture, GPUS[architecture]
        self.sm_count = SMS.get(architecture, 132)
        self.launched: set[str] = set()

    def kernel(self, source: str, name: str, extra_source: str = "", **_: Any) -> Any:
        assert "wgmma" not in source or self.arch == "sm_90a", f"{self.arch} has no wgmma"

        def launch(
            grid: Any,
            threads: Any,
            args: Sequence[Any],
            smem: int = 0,
            cluster: int = 1,
            **_: Any,
        ) -> None:
            what = f"{name} on {self.arch}"
            self.launched.add(name)
            assert 0 < prod(three(threads)) <= 1024, f"{what}: {threads} threads"
            blocks = three(grid)
            assert min(blocks) > 0 and max(blocks[1:]) < 65536, f"{what}: grid {grid}"
            assert cluster == 1 or capability(self.arch) >= 90, f"{what}: a cluster"
            static = most_static(source, name)
            assert smem + static <= self.shared_bytes, (
                f"{what}: {smem} bytes of dynamic and {static} of static shared memory, of "
                f"{self.shared_bytes}"
            )
            for arg in args:
                if isinstance(arg, ctypes.Structure):
                    struct = type(arg).__name__
                    assert f"sizeof({struct}) ==" in extra_source, f"{what}: {struct} is unchecked"

        return SimpleNamespace(name=name, launch=launch)

    def kernels(self, source: str, names: Sequence[str], **options: Any) -> list[Any]:
        return [self.kernel(source, name, **options) for name in names]

    def tensor_map(self, *_: Any) -> bytes:
        return bytes(128)


def shallow(name: str) -> synthetic.ModelShape:
    """The shape with as few layers as show all kinds of layers."""
    shape = synthetic.shapes()[name]
    n = min(shape.settings["block_count"], LAYERS.get(shape.architecture, 2))
    vocabulary = min(shape.n_vocab, MOST_IDS)
    return replace(shape, n_vocab=vocabulary, settings={**shape.settings, "block_count": n})


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A function from "SHAPE:TYPE" to a file of few layers, none of whose weights are made, or
    copied.
    """
    monkeypatch.setattr(Uploader, "_copy", lambda *_: setattr(_[0], "_next", _[0]._next + 1))
    made = {name: shallow(name) for name in synthetic.shapes()}
    monkeypatch.setattr(synthetic, "shapes", lambda: made)
    yield partial(Synthetic, empty=True)


def decode(n: int, position: int) -> Step:
    """A token of each of n sequences."""
    every = np.arange(n, dtype=np.int32)
    pages = position // PAGE_SIZE + 1
    tables = np.arange(n * pages, dtype=np.int32).reshape(n, pages)
    return Step(every % 7, np.full(n, position, np.int32), every, (tables, tables), every)


def prefill(n: int) -> Step:
    """n tokens of one sequence, of whose logits the last are wanted."""
    every = np.arange(n, dtype=np.int32)
    tables = np.arange(-(-n // PAGE_SIZE), dtype=np.int32)[None]
    return Step(every % 7, every, 0 * every, (tables, tables), every[-1:])


def steps() -> Iterator[Step]:
    yield from map(prefill, TOKENS)
    yield from (decode(n, 5) for n in SEQUENCES)
    yield from (decode(n, 4000) for n in SEQUENCES[::3])


def walk(file: Synthetic, device: FittingDevice, types: CacheTypes = USUAL, **options: Any) -> None:
    ops = Cuda(device, **options)
    decoder = arch.load(file, ops, 4096, n_seq=SEQUENCES[-1], cache_types=types)
    shape = decoder.cache_shape(SEQUENCES[-1], 4096, decoder.n_batch)
    ops.allocate_cache(shape)
    for step in steps():
        states = np.zeros((len(step.page_tables[0]), 2), np.int32)
        pairs = zip(step.page_tables, shape.groups, strict=False)
        tables = [t if isinstance(group.spec, PagedKV) else states for t, group in pairs]
        decoder.run(replace(step, page_tables=tuple(tables)))


def cases() -> Iterator[tuple[str, str]]:
    """Shapes and types: all types for the first shape of architectures in FIRST, one for others."""
    seen: set[str] = set()
    for name, shape in synthetic.shapes().items():
        is_first = shape.architecture in FIRST and shape.architecture not in seen
        kinds = TYPES if is_first else USUAL_TYPE
        yield from ((name, kind) for kind in kinds)
        seen.add(shape.architecture)


@pytest.mark.parametrize(("name", "kind"), list(cases()))
def test_every_launch_fits(models: Any, name: str, kind: str) -> None:
    with models(f"{name}:{kind}") as file:
        for architecture in GPUS if file.architecture in FIRST else FEW_GPUS:
            walk(file, FittingDevice(architecture))


@pytest.mark.parametrize(
    "options",
    [{"batch_invariant": True}, {"activations": "q8_1"}, {"types": CacheTypes("q8_0", "q8_0")}],
    ids=str,
)
@pytest.mark.parametrize("name", ["Llama-3.1-70B", "Gemma-3-4B", "Phi-4"])
def test_every_launch_fits_with_options(models: Any, name: str, options: dict[str, Any]) -> None:
    with models(f"{name}:Q4_K_M") as file:
        for architecture in GPUS:
            walk(file, FittingDevice(architecture), **options)


def test_the_device_sees_what_does_not_fit() -> None:
    device = FittingDevice("sm_86")
    kernel = device.kernel("attention/paged_attention.cu", "paged_attention<256, true>")
    room = (99 << 10) - most_static("attention/paged_attention.cu", "paged_attention<256, true>")
    kernel.launch((1, 1), 32, (), smem=room)
    for shape in ({"smem": room + 16}, {"cluster": 2}):
        with pytest.raises(AssertionError, match=r"paged_attention<256, true> on sm_86"):
            kernel.launch((2, 1), 32, (), **shape)
    with pytest.raises(AssertionError, match="no wgmma"):
        device.kernel("gemm/gemm_wgmma.cu", "gemm_wgmma<X>")


def test_prefill_takes_the_kernels_made_for_it(models: Any) -> None:
    """What the walk saw is what it is about: products of many tokens, attention of prompts."""
    for architecture, product, attention in (
        ("sm_75", "gemm_prefill", "prefill_attention"),
        ("sm_86", "gemm_prefill", "prefill_attention"),
        ("sm_90a", "gemm_wgmma", "prefill_attention_wgmma"),
    ):
        device = FittingDevice(architecture)
        with models("Llama-3.1-8B:Q8_0") as file:
            walk(file, device)
        launched = {re.split("<", name)[0] for name in device.launched}
        assert {product, attention, "gemm_decode"} <= launched
