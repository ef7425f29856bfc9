"""Greedy sampling: the lowest index among the largest logits, for rows of any content."""

import numpy as np
import pytest
from kernel_buffers import Output, upload

from ggpy.kernels.sampling.argmax import Argmax


def argmax(device, kernel: Argmax, logits: np.ndarray) -> np.ndarray:
    n, n_vocab = logits.shape
    ids, results = Output(device, 4 * n), Output(device, 4 * n)
    rows = upload(device, logits.astype(np.float32))
    kernel.launch(rows, n, n_vocab, ids.buffer, results.buffer)
    found = ids.read(np.int32, (n,))
    usable = np.isfinite(logits.max(axis=1))
    assert np.array_equal(results.read(np.int32, (n,)), np.where(usable, found, -1))
    return found


def rows(n_vocab: int) -> np.ndarray:
    """Rows: random, rising, falling, all equal, negative, with infinities, with ties far apart."""
    rng = np.random.default_rng(n_vocab)
    x = rng.standard_normal((9, n_vocab)).astype(np.float32)
    x[1], x[2] = np.arange(n_vocab), -np.arange(n_vocab)
    x[3] = -3.5
    x[4] = -np.abs(x[4]) - 1
    x[5] = -np.inf
    x[6, rng.integers(0, n_vocab, 3)] = np.inf
    x[7] = np.round(x[7])
    x[8, :] = 0.0
    x[8, ::2] = -0.0
    return x


@pytest.mark.parametrize("nan", [np.nan, -np.nan])
def test_nan_is_found_wherever_it_stands(machine, nan):
    x = rows(5000)
    x[:, 4321] = nan
    assert np.array_equal(argmax(machine, Argmax(machine, 9), x), [4321] * 9)


@pytest.mark.parametrize("n_vocab", [1, 31, 256, 8191, 20000])
def test_equals_numpy(machine, n_vocab):
    x = rows(n_vocab)
    assert np.array_equal(argmax(machine, Argmax(machine, 9), x), np.argmax(x, axis=1))


def test_again_and_again(machine):
    """The counters are zero after a launch, whatever its number of rows."""
    kernel = Argmax(machine, 9)
    for n_vocab in (453, 7, 9000):
        x = rows(n_vocab)
        for n in (9, 1, 4):
            assert np.array_equal(argmax(machine, kernel, x[:n]), np.argmax(x[:n], axis=1))


def test_order_of_blocks(emulator, monkeypatch):
    x = rows(20000)
    for order in (1, 2, 3):
        monkeypatch.setattr(emulator.unprepared, "order", order)
        assert np.array_equal(argmax(emulator, Argmax(emulator, 9), x), np.argmax(x, axis=1))


def test_rows_are_checked(emulator):
    with pytest.raises(ValueError, match="3 rows of logits: the maximum is 2"):
        Argmax(emulator, 2).launch(None, 3, 5, None, None)


def test_under_sanitizers(emulated):
    x = rows(300)
    assert np.array_equal(argmax(emulated, Argmax(emulated, 9), x), np.argmax(x, axis=1))
