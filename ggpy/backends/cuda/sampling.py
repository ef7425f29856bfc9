"""Draws tokens from logits on a GPU: chooses which rows kernels draw and which numpy draws, and
launches the kernels.

| row | drawn by |
|---|---|
| greedy, no adjustment, as all rows of the step | the argmax kernel, with masks or without |
| every active link has a kernel, and the row fits | the sample kernels, bitwise equal to numpy |
| any other | numpy, after a copy of the row's logits to the host |

Masks are filled while the step's logits are computed, straight into page-locked memory.

The argmax kernel ends a decode step if all rows of the previous step were greedy. Each sequence's
chain decides for its own row. Nothing here depends on how logits are computed, or on a single link.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from ...device.base import Buffer
from ...kernels.sampling.argmax import Argmax
from ...kernels.sampling.sample import MAX_TOP_K, ROW, Sample, best_bytes
from ...sampling import ADJUSTMENTS, FILTERS, Sampler, n_words
from ...sampling.mask import fill_together
from .arrays import Array, Memory, Sampled
from .steps.upload import IN_FLIGHT, PLACES

MAX_ROWS = 1024  # sampled rows of a step
STAGED = 4 << 20  # bytes of logits that are copied to the host at a time
MAX_RECENT = 4096  # tokens of the history that a kernel's row may refer to

KERNEL_LINKS = [link for link in (*ADJUSTMENTS, *FILTERS) if link.has_kernel]


def n_candidates(sampler: Sampler) -> int:
    """Returns how many candidates the kernels keep for a sampler; 0 if numpy draws its tokens."""
    if not sampler.chain.has_kernels or not 0 <= _look_back(sampler) <= MAX_RECENT:
        return 0
    if sampler.chain.greedy:
        return 1
    top_k = sampler.params.top_k
    k = min(top_k if top_k > 0 else sampler.n_vocab, sampler.n_vocab)
    return k if k <= MAX_TOP_K else 0


def _look_back(sampler: Sampler) -> int:
    """Returns how many last tokens of the history the chain reads; -1 is all."""
    counts = [link.look_back(sampler.params) for link in sampler.chain.adjustments]
    return -1 if -1 in counts else max(counts, default=0)


class SamplerRow:
    """The parameters of one sampler for the kernels that do not change; made once per sampler."""

    def __init__(self, sampler: Sampler) -> None:
        self.n_kept = n_candidates(sampler)
        self.look_back = _look_back(sampler) if self.n_kept else 0
        chain = sampler.chain
        self.argmax = self.n_kept > 0 and chain.greedy and not chain.adjustments  # without a mask
        self.row = np.zeros(1, ROW)
        self.edits: list[tuple[str, NDArray[np.int32]]] = []  # arrays that stand beside the row
        if self.n_kept:
            self._describe(sampler)

    def _describe(self, sampler: Sampler) -> None:
        row = self.row[0]
        row["seed"], row["top_k"], row["mask"] = sampler.seed, self.n_kept, -1
        for link in KERNEL_LINKS:
            for name, value in link.row(sampler.params).items():
                if isinstance(value, np.ndarray):
                    row[f"n_{name}"] = len(value)
                    self.edits.append((name, value.ravel()))
                else:
                    row[name] = value


_ROWS: WeakKeyDictionary[Sampler, SamplerRow] = WeakKeyDictionary()


def _row_of(sampler: Sampler) -> SamplerRow:
    found = _ROWS.get(sampler)
    if found is None:
        found = _ROWS[sampler] = SamplerRow(sampler)
    return found


class SamplingPlan:
    """Which kernels, or numpy, draw the rows of these samplers, and the kernel parameters that no
    step changes.
    """

    def __init__(self, samplers: Sequence[Sampler]) -> None:
        self.samplers = list(samplers)
        rows = [_row_of(s) for s in samplers]
        self._with_masks = [s for s in samplers if s.mask is not None]
        self._in_force = [s.masked for s in self._with_masks]
        self.argmax = all([row.argmax for row in rows])
        self.argmax_only = self.argmax and not any(self._in_force)  # without a mask
        self.width = max([row.n_kept for row in rows], default=0)
        self.host_rows = [i for i, row in enumerate(rows) if not row.n_kept]
        self.device_samplers = [s for s, row in zip(samplers, rows, strict=True) if row.n_kept]
        self.rows = np.concatenate([row.row for row in rows]) if rows else np.zeros(0, ROW)
        # row -> tokens of the history, where there are any
        self.look_back = {i: row.look_back for i, row in enumerate(rows) if row.look_back}
        self.masked = {
            i: n_words(s.n_vocab)
            for i, (s, row) in enumerate(zip(samplers, rows, strict=True))
            if row.n_kept and s.masked
        }
        self.edits = self._edits(rows)
        n_last = sum(self.look_back.values()) + sum(self.masked.values())
        self.n_ints = self.rows.nbytes // 4 + len(self.edits) + n_last  # at most

    def is_for(self, samplers: Sequence[Sampler]) -> bool:
        """Whether this is the plan of these samplers, with the masks that are in force now."""
        in_force = [s.masked for s in self._with_masks]
        return samplers == self.samplers and in_force == self._in_force

    def _edits(self, rows: Sequence[SamplerRow]) -> NDArray[np.int32]:
        """The arrays beside the rows, one after the other; the rows say where each begins."""
        parts, end = [np.zeros(0, np.int32)], 0
        for i, row in enumerate(rows):
            for name, values in row.edits:
                self.rows[i][name] = end
                parts.append(values)
                end += len(values)
        return np.concatenate(parts)

    def write(self, dst: NDArray[np.int32]) -> int:
        """Writes rows and edits (biases, the histories' last tokens, masks); returns how many
        integers.
        """
        rows, n = self.rows, self.rows.nbytes // 4
        rows["n_drawn"] = [s.n_drawn for s in self.samplers]
        end = len(self.edits)
        dst[n : n + end] = self.edits
        for i, n_tokens in self.look_back.items():
            tokens = self.samplers[i].recent(n_tokens)
            rows[i]["recent"], rows[i]["n_recent"] = end, len(tokens)
            dst[n + end : n + end + len(tokens)] = tokens
            end += len(tokens)
        if self.masked:
            end = self._write_masks(dst[n:], end)
        dst[:n] = rows.view(np.int32)
        return n + end

    def _write_masks(self, edits: NDArray[np.int32], end: int) -> int:
        """Writes the masks at edits[end:], a row for each; returns where they end."""
        masks = self._filled(edits[end:])
        for place, i in enumerate(self.masked):
            self.rows[i]["mask"] = end + place * masks.shape[1]
        return end + masks.size

    def _filled(self, dst: NDArray[np.int32]) -> NDArray[np.int32]:
        """The masks of all rows that have one, written at the beginning of dst."""
        samplers = [self.samplers[i] for i in self.masked]
        size = next(iter(self.masked.values()))
        masks = dst[: size * len(samplers)].reshape(-1, size)
        errors = fill_together([s.mask for s in samplers if s.mask is not None], masks)
        for sampler, error in zip(samplers, errors, strict=True):
            sampler.error = error or sampler.error
        return masks

    def write_for_argmax(self, dst: NDArray[np.int32]) -> None:
        """Writes the number of each row's mask, -1 where it has none, then the masks."""
        n = len(self.samplers)
        dst[:n] = -1
        dst[list(self.masked)] = range(len(self.masked))
        self._filled(dst[n:])


@dataclass
class _Slot:
    """Page-locked host memory of a step in flight, and the result that still refers to it."""

    ids: NDArray[np.int32]
    results: Memory  # the same memory on the device: kernels write ids there, cheaper than a copy
    parameters: NDArray[np.int32]
    on_device: Memory  # the same memory as parameters
    done: Any  # event after which ids are valid
    pending: Sampled | None = None

    def free(self) -> None:
        """Waits for the step that used this memory."""
        if self.pending:
            self.pending.keep()
            self.pending = None

    def hand_out(self, n_rows: int) -> Sampled:
        """Returns the ids that the work enqueued so far writes."""
        self.pending = Sampled(self.ids[:n_rows], self.done.record())
        return self.pending


class Sampling:
    """Draws tokens, and stores them in `ids`, where the next step reads them."""

    def __init__(self, device: Any) -> None:
        self.device = device
        self.ids = device.zeros(4 * MAX_ROWS, "sampled ids")
        self._argmax = Argmax(device, MAX_ROWS)
        self._sample: Sample | None = None
        self._plan = SamplingPlan([])
        self._last: Sampled | None = None
        self._n_steps = 0
        self._slots = [self._slot() for _ in range(IN_FLIGHT)]
        self._decode_slots = [self._slot() for _ in range(PLACES)]  # fixed addresses, for graphs
        self._argmax_slot: _Slot | None = None  # of the current step, if argmax ends it
        self._parameters: Buffer | None = None
        self._staged: NDArray[np.float32] | None = None  # logits[*, V] on the host
        self._best: Buffer | None = None  # candidates of every segment of every row

    def expects_argmax(self, n_rows: int) -> bool:
        """Whether a step with n_rows rows will probably take the argmax of all: the previous step
        had as many rows, and all were greedy.
        """
        return self._plan.argmax_only and len(self._plan.samplers) == n_rows > 0

    def begin(self, place: int | None) -> None:
        """Begin a step. place: for a decode step that `find_best` will end, the index of the memory
        that holds its integers; None for other steps.
        """
        self._argmax_slot = None if place is None else self._decode_slots[place]
        if self._argmax_slot:
            self._argmax_slot.free()

    def find_best(self, logits: Array) -> None:
        """Enqueues the argmax of the step's logits[R, V]."""
        assert self._argmax_slot is not None
        self._launch_argmax(logits, self._argmax_slot)

    def draw(self, logits: Array, samplers: Sequence[Sampler]) -> Sampled:
        """Returns ids[R] of the last step's logits[R, V], row r drawn by samplers[r].

        The samplers' n_drawn goes up. ValueError for more than MAX_ROWS rows.
        """
        if not self._plan.is_for(samplers):
            self._plan = SamplingPlan(samplers)
            if len(samplers) > MAX_ROWS:
                raise ValueError(f"{len(samplers)} sequences at once: at most {MAX_ROWS} work")
        plan = self._plan
        launched = self._argmax_slot if plan.argmax_only else None
        slot = launched or self._next_slot()
        if plan.argmax_only:
            if not launched:
                self._launch_argmax(logits, slot)
        elif plan.argmax:
            self._launch_masked_argmax(logits, plan, slot)
        elif plan.width:
            self._launch_sample(logits, plan, slot)
        if plan.host_rows:
            self._draw_on_host(logits, plan, slot.ids[: len(samplers)])
        for sampler in plan.device_samplers:
            sampler.n_drawn += 1
        self._last = slot.hand_out(len(samplers))
        return self._last

    def _next_slot(self) -> _Slot:
        slot = self._slots[self._n_steps % IN_FLIGHT]
        self._n_steps += 1
        slot.free()
        return slot

    def _launch_argmax(self, logits: Array, slot: _Slot) -> None:
        n_rows, n_vocab = logits.shape
        self._argmax.launch(logits.data, n_rows, n_vocab, self.ids, slot.results)

    def _launch_masked_argmax(self, logits: Array, plan: SamplingPlan, slot: _Slot) -> None:
        """Enqueues the argmax of allowed tokens. The kernel reads masks from host memory: copying
        them would take longer than the kernel.
        """
        n_rows, n_vocab = logits.shape
        self._make_room(slot, plan)
        plan.write_for_argmax(slot.parameters)
        outs = self.ids, slot.results
        self._argmax.launch_masked(logits.data, n_rows, n_vocab, *outs, slot.on_device)

    def _make_room(self, slot: _Slot, plan: SamplingPlan) -> None:
        if slot.parameters.size < plan.n_ints:
            slot.parameters, slot.on_device = self._mapped(2 * plan.n_ints)

    def _launch_sample(self, logits: Array, plan: SamplingPlan, slot: _Slot) -> None:
        """Enqueues the sample kernels, which skip rows that the host draws."""
        n_rows, n_vocab = logits.shape
        self._make_room(slot, plan)
        n = plan.write(slot.parameters)
        self._parameters = self._grown(self._parameters, 8 * plan.n_ints, "sampling parameters")
        size = best_bytes(n_rows, n_vocab, plan.width)
        self._best = self._grown(self._best, size, "candidates")
        self.device.upload(self._parameters, slot.parameters[:n])
        self._sample = self._sample or Sample(self.device)
        edits = self._parameters.at(plan.rows.nbytes)
        self._sample.launch(
            logits.data,
            n_rows,
            n_vocab,
            self._parameters,
            edits,
            plan.width,
            self._best,
            self.ids,
            slot.results,
        )

    def _draw_on_host(self, logits: Array, plan: SamplingPlan, ids: NDArray[np.int32]) -> None:
        """Draws the host's rows into ids, and uploads all ids to where the next step reads them.

        The first download waits for all enqueued work, so ids of the step before can be read.
        """
        last_ids = self._last.ids if self._last else ids
        for i, row in self._rows_on_host(logits, plan.host_rows):
            plan.samplers[i].settle(last_ids)
            ids[i] = plan.samplers[i].try_sample(row)
        self.device.upload(self.ids, np.maximum(ids, 0))

    def _rows_on_host(
        self, logits: Array, rows: Sequence[int]
    ) -> Iterator[tuple[int, NDArray[np.float32]]]:
        """(r, logits[V]) of these rows, in page-locked memory that is used again."""
        n_vocab = logits.shape[-1]
        if self._staged is None:
            n = max(1, STAGED // (4 * n_vocab))
            self._staged = self._pinned(n * n_vocab).view(np.float32).reshape(n, n_vocab)
        for start in range(0, len(rows), len(self._staged)):
            group = rows[start : start + len(self._staged)]
            for row, dst in zip(group, self._staged, strict=False):
                self.device.download_into(dst, logits.data, 4 * row * logits.row)
            self.device.synchronize()
            yield from zip(group, self._staged, strict=False)

    def _grown(self, buffer: Buffer | None, nbytes: int, name: str) -> Buffer:
        if buffer is None or buffer.nbytes < nbytes:
            self.device.synchronize()  # kernels in flight may use the old one
            buffer = self.device.alloc(nbytes, name)
        return buffer

    def _slot(self) -> _Slot:
        ids, results = self._mapped(MAX_ROWS)
        return _Slot(ids, results, *self._mapped(MAX_ROWS), self.device.event())

    def _mapped(self, n: int) -> tuple[NDArray[np.int32], Memory]:
        """n integers, and their address on the device."""
        memory, address = self.device.mapped(4 * n)
        return memory.view(np.int32), address

    def _pinned(self, n: int) -> NDArray[np.int32]:
        memory: NDArray[np.int32] = self.device.pinned(4 * n).view(np.int32)
        return memory
