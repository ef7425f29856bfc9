"""Launches cuda/sampling/argmax.cu: the most probable token of each row."""

from __future__ import annotations

from ...device.base import Buffer, Device, Ptr

THREADS = 256
AT_ONCE = 4  # logits of a thread
BLOCKS = 256  # of all rows, about


class Argmax:
    """Owns the counters that the blocks of a row meet at; for up to max_rows rows."""

    def __init__(self, device: Device, max_rows: int) -> None:
        self._kernel = device.kernel("sampling/argmax.cu", "argmax")
        self._best = device.zeros(8 * max_rows, "argmax")
        self._arrived = device.zeros(4 * max_rows, "argmax counters")
        self.max_rows = max_rows

    def launch(
        self,
        logits: Buffer | Ptr,
        n_rows: int,
        n_vocab: int,
        ids: Buffer | Ptr,
        results: Buffer | Ptr,
    ) -> None:
        """Enqueue int32 ids[n_rows] = argmax(logits[n_rows, n_vocab]), the lowest index among
        equals; results[n_rows], which may be page-locked memory of the host, are the same, but -1
        where that logit is NaN or infinite.
        """
        if n_rows > self.max_rows:
            raise ValueError(f"{n_rows} rows, there is room for {self.max_rows}")
        args = (logits, n_vocab, self._best, self._arrived, ids, results)
        blocks = min(-(-n_vocab // (THREADS * AT_ONCE)), max(8, BLOCKS // n_rows))
        self._kernel.launch((blocks, n_rows), THREADS, args, pdl=True)
