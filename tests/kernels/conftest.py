"""The devices that kernels are tested on: the emulator, and a GPU where there is one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from cases import KERNELS, emulator_cases
from devices import open_device

from ggpy.kernels.block_kernel import HEADER, compile_options, expression, supported_formats


class Batched:
    """A device that compiles the instances of all formats that the cases name in one go, as g++ takes long to start."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._kernels: dict[tuple[str, str], Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def kernel(self, source: str, name: str, **options: Any) -> Any:
        if HEADER not in options.get("headers", {}):
            return self._device.kernel(source, name, **options)
        if (source, name) not in self._kernels:
            names = list(dict.fromkeys([name, *self._instances(source)]))
            kernels = self._device.kernels(source, names, **compile_options(*supported_formats()))
            self._kernels.update({(source, n): k for n, k in zip(names, kernels, strict=True)})
        return self._kernels[source, name]

    def _instances(self, source: str) -> list[str]:
        name = source.removesuffix(".cu")
        cases = emulator_cases(name) if name in KERNELS else []
        return [expression(name, case.block, *case.arguments) for case in cases]


@pytest.fixture(scope="session")
def emulated() -> Iterator[Any]:
    """The emulator under the address and undefined-behaviour sanitizers."""
    with open_device("sanitizer") as device:
        yield Batched(device)


@pytest.fixture(scope="session")
def gpu() -> Any:
    """The first GPU."""
    return open_device("cuda")


@pytest.fixture(params=["emulated", "gpu"])
def device(request: pytest.FixtureRequest) -> Any:
    """Each device in turn."""
    return request.getfixturevalue(request.param)
