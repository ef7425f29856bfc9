"""Launches cuda/sampling/argmax.cu: greedy sampling, the token of the largest logit of each row."""

from __future__ import annotations

from ...device.base import Buffer, Device, Ptr

THREADS = 256
LOADS_IN_FLIGHT = 4  # logits that a thread has in flight
CTAS = 256  # target for all rows together


class Argmax:
    """Argmax of up to max_rows rows. Owns the counters that the CTAs of a row share."""

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
        """Enqueues int32 ids[n_rows] = argmax(logits[n_rows, n_vocab]); the lowest index wins among
        equal logits. results[n_rows] may lie in page-locked host memory; they equal ids, but are -1
        where the largest logit is NaN or infinite. ValueError if n_rows > max_rows.
        """
        if n_rows > self.max_rows:
            raise ValueError(f"{n_rows} rows of logits: the maximum is {self.max_rows}")
        args = (logits, n_vocab, self._best, self._arrived, ids, results)
        ctas = min(-(-n_vocab // (THREADS * LOADS_IN_FLIGHT)), max(8, CTAS // n_rows))
        self._kernel.launch((ctas, n_rows), THREADS, args, pdl=True)
