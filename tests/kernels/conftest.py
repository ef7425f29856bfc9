"""The devices that kernels are tested on: the emulator, and a GPU where there is one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from cases import KERNELS, Case, emulator_cases, gpu_cases
from devices import open_device

from ggpy.device.compile import compile_cubin
from ggpy.formats import Format
from ggpy.kernels.blocks.block_kernel import HEADER, compile_options, expression, supported_formats


class Batched:
    """A device that compiles what the cases need of a source when its first kernel is asked for."""

    def __init__(self, device: Any, cases: Callable[[str], list[Case]]) -> None:
        self._device, self._cases = device, cases
        self._kernels: dict[tuple[str, str], Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def kernel(self, source: str, name: str, **options: Any) -> Any:
        if HEADER not in options.get("headers", {}):
            return self._device.kernel(source, name, **options)
        kernel = source.rpartition("/")[2].removesuffix(".cu")
        if (source, name) not in self._kernels and kernel in KERNELS:
            self._compile(source, self._cases(kernel))
        if (source, name) not in self._kernels:
            self._kernels[source, name] = self._device.kernel(source, name, **options)
        return self._kernels[source, name]

    def _compile(self, source: str, cases: list[Case]) -> None:
        for formats in self._batches(cases):
            names = instances(cases, formats)
            kernels = self._device.kernels(source, names, **compile_options(*formats))
            self._kernels.update({(source, n): k for n, k in zip(names, kernels, strict=True)})

    def _batches(self, cases: list[Case]) -> list[list[Format]]:
        """All together: g++ takes longer to start than to compile a kernel."""
        return [supported_formats()]


class BatchedGpu(Batched):
    """One format at a time, as programs do, but on all cores."""

    def _batches(self, cases: list[Case]) -> list[list[Format]]:
        source = f"blocks/{cases[0].kernel}.cu"

        def compile(format: Format) -> list[Format]:
            names, options = instances(cases, [format]), compile_options(format)
            compile_cubin(source, self._device.target, expressions=names, **options)
            return [format]  # now in the cache

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            return list(pool.map(compile, supported_formats()))


def instances(cases: list[Case], formats: list[Format]) -> list[str]:
    """The C++ names of the kernels that the cases of these formats launch."""
    chosen = [case for case in cases if case.block in formats]
    names = [expression(c.kernel, c.block, *arguments) for c in chosen for arguments in c.arguments]
    return list(dict.fromkeys(names))


@pytest.fixture(scope="session")
def emulated() -> Iterator[Any]:
    """The emulator under the address and undefined-behaviour sanitizers."""
    with open_device("sanitizer") as device:
        yield Batched(device, emulator_cases)


@pytest.fixture(scope="session")
def gpu() -> Any:
    """The first GPU."""
    return BatchedGpu(open_device("cuda"), gpu_cases)


@pytest.fixture(params=["emulated", "gpu"])
def device(request: pytest.FixtureRequest) -> Any:
    """Each device in turn."""
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="session")
def hopper(gpu: Any) -> Any:
    """A GPU that has wgmma."""
    from ggpy.kernels.gemm.hopper import has_wgmma

    if not has_wgmma(gpu.arch):
        pytest.skip(f"{gpu.arch} has no wgmma")
    return gpu
