"""Steps are padded to few shapes, and what is computed for real tokens is the same."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ggpy.backends.cuda.steps.padding import coarse, filled, filled_with_copies, padded, rounded
from ggpy.backends.interface import Step
from ggpy.backends.states import NO_STATE

SPARE = ((99,), (55,))  # pages of the tokens that pad a step, of two groups


def mixed(lengths: list[int], base: int = 70) -> Step:
    """A step of sequences of these lengths, whose last tokens are rows."""
    n = len(lengths)
    positions = [np.arange(base, base + k, dtype=np.int32) for k in lengths]
    tables = np.arange(3 * n, dtype=np.int32).reshape(n, 3)
    return Step(
        ids=np.arange(sum(lengths), dtype=np.int32),
        positions=np.concatenate(positions),
        sequences=np.repeat(np.arange(n, dtype=np.int32), lengths),
        page_tables=(tables, tables + 1),
        rows=(np.cumsum(lengths) - 1).astype(np.int32),
    )


def sizes(step: Step) -> tuple[int, ...]:
    return len(step.ids), len(step.page_tables[0]), len(step.rows)


@pytest.mark.parametrize("n", [1, 7, 8, 9, 64, 65, 128, 129, 500, 2047, 2048])
def test_rounded_up_by_an_eighth_at_most(n: int) -> None:
    to = rounded(n)
    assert n <= to <= max(n + 7, n * 9 / 8) and rounded(to) == to


def test_what_was_there_stays_in_front() -> None:
    step = mixed([1, 1, 30])
    out = padded(step, SPARE, 512, 64)
    n, n_seq, n_rows = sizes(step)
    assert sizes(out) == (32, 8, 4)
    assert (out.ids[:n] == step.ids).all() and (out.positions[:n] == step.positions).all()
    assert (out.rows[:n_rows] == step.rows).all() and (out.rows[n_rows:] == step.rows[-1]).all()
    for table, before in zip(out.page_tables, step.page_tables, strict=True):
        assert (table[:n_seq] == before).all()


def test_mixed_with_a_prompt_of_more_tokens() -> None:
    """The tokens that pad it are at position 0 of one more sequence, in the spare pages."""
    out = padded(mixed([1, 1, 37]), SPARE, 512, 64)
    assert sizes(out) == (40, 8, 4)
    assert (out.sequences[39:] == 3).all() and (out.positions[39:] == 0).all()
    assert [page[-1] for page in (out.pages(0), out.pages(1))] == [99, 55]


def test_sequences_that_pad_begin_without_a_state_and_leave_one_that_is_spare() -> None:
    states = np.array([[4, 5], [NO_STATE, 2]], np.int32)
    for step, n_seq in ((mixed([1, 30]), 4), (mixed([1] * 18), 24)):
        n = len(step.page_tables[0])
        both = replace(step, page_tables=(step.page_tables[0], states[[0, 1] * (n // 2)]))
        table = padded(both, ((99,), (NO_STATE, 7)), 512, 64).page_tables[1]
        assert table.shape == (n_seq, 2) and (table[:n] == states[[0, 1] * (n // 2)]).all()
        assert (table[n:] == (NO_STATE, 7)).all()


def test_many_tokens_that_pad_a_step_belong_to_several_sequences() -> None:
    out = padded(mixed([1] * 9 + [505]), SPARE, 2048, 64)
    assert sizes(out) == (576, 24, 16) and (np.diff(out.sequences) >= 0).all()
    assert np.bincount(out.sequences)[10:].tolist() == [16, 15, 16, 15]


def test_a_prompt_alone_has_one_sequence_beside_it_at_most() -> None:
    step = mixed([64])
    assert padded(step, SPARE, 512, 64) is step
    assert sizes(padded(mixed([60]), SPARE, 512, 64)) == (64, 2, 1)


def test_few_shapes() -> None:
    """Of prompts of 60 to 70 tokens beside 57 to 64 that decode."""
    shapes = {
        sizes(padded(mixed([1] * n + [k]), SPARE, 512, 64))
        for n in range(57, 64)
        for k in range(60, 70)
    }
    assert shapes == {(120, 72, 64), (128, 72, 64), (144, 72, 64)}


@pytest.mark.parametrize("n", [1, 3, 16, 24, 64, 65])
def test_decode_steps_stay_that_are_small_or_have_such_a_size(n: int) -> None:
    step = mixed([1] * n)
    assert padded(step, SPARE, 512, 64) is step


def test_other_decode_steps_have_few_sizes() -> None:
    found = {sizes(padded(mixed([1] * n), SPARE, 512, 60)) for n in range(17, 61)}
    assert found == {(n, n, n) for n in (24, 32, 40, 48, 56, 60)}


def test_tokens_that_pad_a_decode_step_have_a_sequence_and_a_row_each() -> None:
    step = mixed([1] * 18)
    step = replace(step, sequences=step.sequences[::-1])
    out = padded(step, SPARE, 512, 64)
    assert (out.sequences == [*step.sequences, *range(18, 24)]).all()
    assert (out.rows == np.arange(24)).all() and (out.positions == [70] * 18 + [0] * 6).all()
    for table, before, page in zip(out.page_tables, step.page_tables, SPARE, strict=True):
        assert (table[:18] == before).all() and (table[18:, 0] == page).all()


def test_steps_whose_tokens_are_all_rows_stay() -> None:
    step = replace(mixed([3]), rows=np.arange(3, dtype=np.int32))
    assert padded(step, SPARE, 512, 64) is step


@pytest.mark.parametrize("lengths", [[2], [1, 2], [1] * 6 + [2], [1] * 15 + [2]])
def test_never_becomes_a_step_of_another_kind(lengths: list[int]) -> None:
    for most in (sum(lengths), 512):
        n, n_seq, n_rows = sizes(padded(mixed(lengths), SPARE, most, 64))
        assert n_seq < n and n_rows < n and n <= max(most, sum(lengths))


def test_few_numbers_of_sequences_rows_and_tiles() -> None:
    assert [coarse(n) for n in (1, 2, 3, 8, 9, 17, 33, 64, 65, 200)] == [
        *(1, 2, 4, 8, 16, 24, 48, 64, 96, 256)
    ]


def test_tiles_are_filled_with_tiles_without_a_split() -> None:
    tiles = np.array([[0, 1, 4, 0], [1, 16, 1, -1], [17, 3, 1, -1]], np.int32)
    out = filled(tiles)
    assert len(out) == 8 and (out[:3] == tiles).all() and not out[3:].any()
    assert filled(tiles[:0]) is not None and not len(filled(tiles[:0]))


def test_tiles_of_prompts_are_filled_with_the_cheapest() -> None:
    tiles = np.array([[0, 64, 1, -1], [64, 30, 1, -1], [94, 64, 1, -1]], np.int32)
    positions = np.array([*range(900, 964), *range(5, 35), *range(300, 364)], np.int32)
    out = filled_with_copies(tiles, positions)
    assert len(out) == 8 and (out[:3] == tiles).all() and (out[3:] == tiles[1]).all()
    assert not len(filled_with_copies(tiles[:0], positions))
