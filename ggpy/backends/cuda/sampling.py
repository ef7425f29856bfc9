"""Tokens from logits on a GPU: which sampler's chain runs where, and its parameters' way there.

Where all samplers want the highest logit there is one small kernel, which a step of single tokens
has at its end if the last one's samplers did; else the chain of the defaults (bias, penalties,
top-k, top-p, min-p, temperature) and XTC run in two, with the bits of numpy, and nobody waits for
it. What has no kernel goes through numpy: DRY, top-n-sigma, typical-p, dynamic temperature, any
parameter that is not classified below, and chains that keep more than MAX_TOP_K candidates or look
back at all of the context. That is decided for each sequence by itself. Nothing here knows how
logits are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from math import inf, log
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...device.base import Buffer
from ...kernels.sampling.argmax import Argmax
from ...kernels.sampling.sample import MAX_TOP_K, ROW, Sample, best_bytes
from ...sampling import Sampler, SamplingParams
from .arrays import Array, Memory, Sampled
from .step import IN_FLIGHT, PLACES

MAX_ROWS = 1024  # of a step that are sampled at most
MAX_RECENT = 4096  # tokens that a penalty on the GPU looks back


# Every parameter stands in one of these. One that stands in none has no kernel: rows in which it is
# not at its default go through numpy.
IN_KERNELS = frozenset(
    {
        *("seed", "temperature", "top_k", "top_p", "min_p", "xtc_probability", "xtc_threshold"),
        *("repeat_last_n", "repeat_penalty", "presence_penalty", "frequency_penalty"),
        "logit_bias",
    }
)
IN_NUMPY: dict[str, Callable[[SamplingParams], bool]] = {  # whether it does something
    "typical_p": lambda p: p.typical_p < 1,
    # Whatever else it drops, the best candidate stays.
    "top_n_sigma": lambda p: p.top_n_sigma > 0 and not p.greedy,
    "dynatemp_range": lambda p: p.dynatemp_range > 0,
    "dynatemp_exponent": lambda p: p.dynatemp_range > 0,
    "dry_multiplier": lambda p: p.uses_dry,
    "dry_base": lambda p: p.uses_dry,
    "dry_allowed_length": lambda p: p.uses_dry,
    "dry_penalty_last_n": lambda p: p.uses_dry,
    "dry_breakers": lambda p: p.uses_dry,
}


def unclassified(params: SamplingParams) -> list[Field]:
    """The parameters that neither IN_KERNELS nor IN_NUMPY names."""
    return [f for f in fields(params) if f.name not in IN_KERNELS and f.name not in IN_NUMPY]


def has_kernels(params: SamplingParams) -> bool:
    """Whether the kernels know all that these parameters ask for, but for how much of it."""
    if any(asked(params) for asked in IN_NUMPY.values()):
        return False
    return all(getattr(params, f.name) == _default(f) for f in unclassified(params))


def _default(f: Field) -> Any:
    return f.default if f.default_factory is MISSING else f.default_factory()


def n_candidates(sampler: Sampler) -> int:
    """How many candidates a kernel must keep for the sampler; 0 where its chain has no kernel."""
    p = sampler.params
    if not has_kernels(p) or (p.penalizes and not 0 < p.repeat_last_n <= MAX_RECENT):
        return 0
    if p.greedy:
        return 1
    k = min(p.top_k if p.top_k > 0 else sampler.n_vocab, sampler.n_vocab)
    return k if k <= MAX_TOP_K else 0


class Plan:
    """How rows with these samplers are sampled, and what of it stays the same in every step."""

    def __init__(self, samplers: Sequence[Sampler]) -> None:
        self.samplers = list(samplers)
        kept = [n_candidates(s) for s in samplers]
        plain = [k and s.greedy and not _adjusts(s) for s, k in zip(samplers, kept, strict=True)]
        self.best_only = all(plain)
        self.width = max(kept, default=0)
        self.by_hand = [i for i, k in enumerate(kept) if k == 0]
        self.on_device = [s for s, k in zip(samplers, kept, strict=True) if k]
        self.recent = [i for i, s in enumerate(samplers) if kept[i] and s.params.penalizes]
        self.rows = np.zeros(len(samplers), ROW)
        self.edits = np.zeros(0, np.int32)
        for row, sampler, k in zip(self.rows, samplers, kept, strict=True):
            if k:
                self._describe(row, sampler, k)
        n_recent = sum(samplers[i].params.repeat_last_n for i in self.recent)
        self.n_ints = self.rows.nbytes // 4 + len(self.edits) + n_recent  # at most

    def _describe(self, row: np.void, sampler: Sampler, k: int) -> None:
        p = sampler.params
        row["seed"], row["top_k"], row["top_p"] = sampler.seed, k, p.top_p
        row["min_p"] = log(p.min_p) if p.min_p > 0 else -inf
        # What is above 0 stays so as a float32.
        row["temperature"] = max(p.temperature, 1e-30) if p.temperature > 0 else p.temperature
        row["repeat"] = p.repeat_penalty
        row["xtc_probability"] = p.xtc_probability if p.uses_xtc else 0
        row["xtc_threshold"] = p.xtc_threshold
        row["frequency"], row["presence"] = p.frequency_penalty, p.presence_penalty
        row["bias"], row["n_bias"] = len(self.edits), len(p.logit_bias)
        pairs = np.empty((len(p.logit_bias), 2), np.int32)
        pairs[:, 0] = list(p.logit_bias)
        pairs[:, 1] = np.array(list(p.logit_bias.values()), np.float32).view(np.int32)
        self.edits = np.concatenate([self.edits, pairs.ravel()])

    def write(self, to: NDArray[np.int32]) -> int:
        """Rows, biases and the tokens that are penalised now; how many integers that are."""
        rows, n = self.rows, self.rows.nbytes // 4
        rows["n_drawn"] = [s.n_drawn for s in self.samplers]
        at = len(self.edits)
        to[n : n + at] = self.edits
        for i in self.recent:
            s = self.samplers[i]
            tokens = s.history[-s.params.repeat_last_n :]
            rows[i]["recent"], rows[i]["n_recent"] = at, len(tokens)
            to[n + at : n + at + len(tokens)] = tokens
            at += len(tokens)
        to[:n] = rows.view(np.int32)
        return n + at


def _adjusts(sampler: Sampler) -> bool:
    p = sampler.params
    return bool(p.logit_bias) or p.penalizes


@dataclass
class _Slot:
    """What one step in flight needs on the host, page-locked, and who may still read it."""

    ids: NDArray[np.int32]
    results: Memory  # where kernels write these ids, which costs less than a copy
    parameters: NDArray[np.int32]
    done: Any  # an event
    given: Sampled | None = None

    def free(self) -> None:
        """Wait for the step that used it."""
        if self.given:
            self.given.keep()
            self.given = None

    def give(self, n_rows: int) -> Sampled:
        """What was enqueued writes its ids."""
        self.given = Sampled(self.ids[:n_rows], self.done.record())
        return self.given


class Sampling:
    """Draws tokens; `ids` is where the next step finds them."""

    def __init__(self, device: Any) -> None:
        self.device = device
        self.ids = device.zeros(4 * MAX_ROWS, "sampled ids")
        self._argmax = Argmax(device, MAX_ROWS)
        self._sample: Sample | None = None
        self._plan = Plan([])
        self._last: Sampled | None = None
        self._n_steps = 0
        self._slots = [self._slot() for _ in range(IN_FLIGHT)]
        self._of_places = [self._slot() for _ in range(PLACES)]  # steps that end with the kernel
        self._best_of: _Slot | None = None  # the last step's, if it is such a one
        self._parameters: Buffer | None = None  # as large as it had to be
        self._best: Buffer | None = None  # of each segment of a row

    def begin(self, place: int | None, n_rows: int) -> bool:
        """Before a step of single tokens that go to the place: whether `find_best` should be its
        end, because probably the highest logits are wanted again. place: None of other steps.
        """
        plan = self._plan
        if place is None or not (plan.best_only and len(plan.samplers) == n_rows > 0):
            self._best_of = None
            return False
        self._best_of = self._of_places[place]
        self._best_of.free()
        return True

    def find_best(self, logits: Array) -> None:
        """Enqueue that of the step's logits[R, V]."""
        assert self._best_of is not None
        self._launch_argmax(logits, self._best_of)

    def draw(self, logits: Array, samplers: Sequence[Sampler]) -> Sampled:
        """The ids of the last step's logits[R, V], row r through samplers[r], whose n_drawn goes
        up.
        """
        if samplers != self._plan.samplers:
            self._plan = Plan(samplers)
            if len(samplers) > MAX_ROWS:
                raise ValueError(f"{len(samplers)} sequences at once: at most {MAX_ROWS} work")
        plan = self._plan
        found = self._best_of if plan.best_only else None
        slot = found or self._next_slot()
        if plan.best_only:
            if not found:
                self._launch_argmax(logits, slot)
        elif plan.width:
            self._launch(logits, plan, slot)
        if plan.by_hand:
            self._draw_by_hand(logits, plan, slot.ids[: len(samplers)])
        for sampler in plan.on_device:
            sampler.n_drawn += 1
        self._last = slot.give(len(samplers))
        return self._last

    def _next_slot(self) -> _Slot:
        slot = self._slots[self._n_steps % IN_FLIGHT]
        self._n_steps += 1
        slot.free()
        return slot

    def _launch_argmax(self, logits: Array, slot: _Slot) -> None:
        n_rows, n_vocab = logits.shape
        self._argmax.launch(logits.data, n_rows, n_vocab, self.ids, slot.results)

    def _launch(self, logits: Array, plan: Plan, slot: _Slot) -> None:
        """Enqueue the chain; rows that have another one are left alone."""
        n_rows, n_vocab = logits.shape
        if slot.parameters.size < plan.n_ints:
            slot.parameters = self._pinned(2 * plan.n_ints)
        n = plan.write(slot.parameters)
        self._parameters = self._room(self._parameters, 8 * plan.n_ints, "sampling parameters")
        size = best_bytes(n_rows, n_vocab, plan.width)
        self._best = self._room(self._best, size, "candidates")
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

    def _draw_by_hand(self, logits: Array, plan: Plan, ids: NDArray[np.int32]) -> None:
        """Rows whose chain has no kernel, into ids and to where the next step looks for them."""
        n_vocab = logits.shape[-1]
        before = self._last.ids if self._last else ids
        for i in plan.by_hand:  # what is downloaded first waits for all that was enqueued before
            row = self.device.download(logits.data, np.float32, n_vocab, 4 * i * logits.row)
            plan.samplers[i].settle(before)
            ids[i] = plan.samplers[i].try_sample(row)
        self.device.upload(self.ids, np.maximum(ids, 0))

    def _room(self, buffer: Buffer | None, nbytes: int, name: str) -> Buffer:
        if buffer is None or buffer.nbytes < nbytes:
            self.device.synchronize()  # nobody uses the old one any more
            buffer = self.device.alloc(nbytes, name)
        return buffer

    def _slot(self) -> _Slot:
        ids, results = self.device.mapped(4 * MAX_ROWS)
        parameters = self._pinned(MAX_ROWS)
        return _Slot(ids.view(np.int32), results, parameters, self.device.event())

    def _pinned(self, n: int) -> NDArray[np.int32]:
        memory: NDArray[np.int32] = self.device.pinned(4 * n).view(np.int32)
        return memory
