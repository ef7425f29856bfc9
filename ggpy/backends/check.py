"""Ops that stop at the first NaN or infinity: `--check` wraps a backend in them.

The logits, or hidden states, of each step are read and checked. If one is NaN or infinite, the step
is run again, op by op, to find the first such value. This works with any backend, and does not
depend on how it computes.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from .interface import Array, Ops, Probe, Step
from .trace import Record, Trace


class NotFinite(ArithmeticError):
    """A model computes NaN or infinity; the message says where that begins."""


class Checked(Trace):
    """A backend whose steps raise NotFinite unless all their results are finite."""

    def __init__(self, ops: Ops) -> None:
        super().__init__(ops)
        self._tracing = False

    def run(
        self, step: Step, forward: Callable[[Step], Array], probe: Probe | None = None
    ) -> Array:
        """Returns what forward(step) returns; NotFinite names the layer and the op."""
        output = self._ops.run(step, forward, probe)
        n_bad = _n_bad(self.read(output))
        if n_bad:
            what = "values of the hidden state" if step.hidden else "logits"
            raise NotFinite(
                f"{n_bad} {what} are NaN or infinite; {self._where(step, forward)}: "
                "the file is damaged, or this model needs more range than the device computes with"
            )
        return output

    def _where(self, step: Step, forward: Callable[[Step], Array]) -> str:
        """Run the step again, and say where its first NaN or infinity is."""
        self.records.clear()
        self._tracing = True
        try:
            super().run(step, forward)
        finally:
            self._tracing = False
        for record in self.records:
            if _n_bad(record.output):
                return f"the first are in {_place(record)}, {_token(record, step)}"
        return "run op by op it has none, so it is the fused or repeated form that fails"

    def _record(self, op: str, output: Array) -> Array:
        return super()._record(op, output) if self._tracing else output


def _n_bad(values: NDArray) -> int:
    return int(values.size - np.count_nonzero(np.isfinite(values)))


def _place(record: Record) -> str:
    return record.op if record.op in ("embed", "logits") else f"layer {record.layer}, {record.op}"


def _token(record: Record, step: Step) -> str:
    """The position of the token with the first bad row, and the number and the first of its bad
    values.
    """
    rows = record.output.reshape(len(record.output), -1)
    row = int(np.flatnonzero(~np.isfinite(rows).all(axis=1))[0])
    bad = rows[row][~np.isfinite(rows[row])]
    token = int(step.rows[row]) if record.op == "logits" else row
    return f"{len(bad)} of {rows.shape[1]} values at position {step.positions[token]} ({bad[0]})"
