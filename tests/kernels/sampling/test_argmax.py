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


def masks_of(x: np.ndarray, seed: int = 0) -> list[np.ndarray | None]:
    """allowed[V] of each row: few tokens, none, all but the best, the last one, many; or None."""
    n, n_vocab = x.shape
    rng = np.random.default_rng(seed)
    masks: list[np.ndarray | None] = [rng.random(n_vocab) < 0.01 for _ in range(n)]
    masks[1] = np.zeros(n_vocab, bool)
    masks[2] = np.arange(n_vocab) != np.argmax(x[2])
    masks[3] = np.arange(n_vocab) == n_vocab - 1
    masks[4] = masks[6] = None
    masks[7] = rng.random(n_vocab) < 0.9
    return masks


def check_masked(device, kernel: Argmax, x: np.ndarray, masks: list[np.ndarray | None]) -> None:
    n, n_vocab = x.shape
    words, numbers, n_masks = [], [], 0
    for mask in masks:
        numbers.append(-1 if mask is None else n_masks)
        if mask is not None:
            bits = np.packbits(mask, bitorder="little")
            words.append(np.resize(np.pad(bits, (0, -len(bits) % 4)), -(-n_vocab // 32) * 4))
            n_masks += 1
    image = np.concatenate([np.array(numbers, np.int32), *(w.view(np.int32) for w in words)])
    ids, results = Output(device, 4 * n), Output(device, 4 * n)
    inputs = upload(device, x.astype(np.float32)), upload(device, image)
    kernel.launch_masked(inputs[0], n, n_vocab, ids.buffer, results.buffer, inputs[1])
    for row, mask, id, result in zip(
        *(x, masks, ids.read(np.int32, (n,)), results.read(np.int32, (n,))), strict=True
    ):
        allowed = np.flatnonzero(np.ones(n_vocab) if mask is None else mask)
        best = allowed[np.argmax(row[allowed])] if len(allowed) else 0
        assert id == best
        assert result == (best if len(allowed) and np.isfinite(row[best]) else -1)


@pytest.mark.parametrize("n_vocab", [1, 33, 1024, 8191, 20000, 300_001])
def test_masks(machine, n_vocab):
    """The last vocabulary is longer than eight CTAs have masks for."""
    x, kernel = rows(n_vocab), Argmax(machine, 9)
    for seed in (0, 1):
        check_masked(machine, kernel, x, masks_of(x, seed))
    assert np.array_equal(argmax(machine, kernel, x), np.argmax(x, axis=1))


def test_nan_that_is_not_allowed(machine):
    x = rows(5000)
    x[:, 4321] = np.nan
    masks = [np.arange(5000) % 2 == 0] * 8 + [None]
    check_masked(machine, Argmax(machine, 9), x, masks)


def test_under_sanitizers(emulated):
    x = rows(300)
    assert np.array_equal(argmax(emulated, Argmax(emulated, 9), x), np.argmax(x, axis=1))
    check_masked(emulated, Argmax(emulated, 9), x, masks_of(x))
