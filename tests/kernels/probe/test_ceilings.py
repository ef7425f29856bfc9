"""ceilings.cu: the kernels do all the work that the ceilings count."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from devices import KINDS, open_device
from kernel_buffers import Output

from ggpy.kernels.probe.ceilings import LOADS_IN_FLIGHT, MATRIX_THREADS, ProbeKernels


@pytest.fixture(params=KINDS)
def device(request: pytest.FixtureRequest) -> Iterator[Any]:
    found = open_device(request.param)
    yield found
    if hasattr(found, "close"):
        found.close()


@pytest.mark.parametrize("at_once", LOADS_IN_FLIGHT)
@pytest.mark.parametrize("n", [4, 4 * 192 * 8, 4 * (192 * 16 + 77)])
def test_every_word_is_read(device: Any, n: int, at_once: int) -> None:
    words = np.random.default_rng(n).integers(0, 1 << 32, n, np.uint32)
    data, result = device.alloc(words.nbytes, "data"), Output(device, 4 * 3 * 2)
    device.upload(data, words)
    ProbeKernels(device).read(data, words.nbytes, result.buffer, 3, 64, at_once)
    found = result.read(np.uint32, (6,))
    assert np.bitwise_xor.reduce(found) == np.bitwise_xor.reduce(words)


def test_every_iteration_multiplies(device: Any) -> None:
    """The accumulators grow by the same amount in each iteration."""
    kernels, n = ProbeKernels(device), 2 * MATRIX_THREADS
    sums = []
    for iterations in (1, 3):
        result = device.alloc(4 * n, "sums")
        kernels.multiply(result, 2, iterations)
        sums.append(device.download(result, np.float32, n))
    assert np.isfinite(sums[0]).all() and np.abs(sums[0]).mean() > 1
    np.testing.assert_allclose(sums[1], 3 * sums[0], rtol=1e-3, atol=1e-2)


def test_bad_sizes_are_refused(device: Any) -> None:
    with pytest.raises(ValueError, match="multiples of 16"):
        ProbeKernels(device).read(device.alloc(24), 24, device.alloc(4), 1, 32, 1)
