"""What is recorded, and what of it is kept."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from ggpy.backends.cuda.steps.graphs import MOST_SHAPES, OFTEN_KEPT, RARE_KEPT, Graphs


class Graph:
    """Counts its launches."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def launch(self) -> None:
        self.log.append("replayed")


class Device:
    """Notes what it is asked for."""

    def __init__(self) -> None:
        self.log: list[str] = []

    @contextmanager
    def capture(self) -> Iterator[Graph]:
        self.log.append("recorded")
        yield Graph(self.log)

    def synchronize(self) -> None:
        self.log.append("waited")


@pytest.fixture
def device() -> Device:
    return Device()


def steps(graphs: Graphs, device: Device, shape: Any, rare: bool, n: int) -> list[str]:
    """What happens in n steps of a shape; each gives the result of its own first launch."""
    device.log.clear()

    def launch() -> Any:
        device.log.append("launched")
        return shape

    for _ in range(n):
        assert graphs.run(shape, 0, rare, launch) == shape
    return device.log.copy()


RECORDED = ["recorded", "launched", "replayed"]


@pytest.mark.parametrize("rare", [False, True])
def test_recorded_at_the_second_step(device: Device, rare: bool) -> None:
    log = steps(Graphs(device), device, 1, rare, 4)
    assert log == ["launched", *RECORDED, *["replayed"] * 2]


@pytest.mark.parametrize(("rare", "kept"), [(True, RARE_KEPT), (False, OFTEN_KEPT)])
def test_few_are_kept(device: Device, rare: bool, kept: int) -> None:
    """The one that was used longest ago goes; those of the other kind stay."""
    graphs = Graphs(device)
    steps(graphs, device, "of the other kind", not rare, 2)
    for shape in range(kept):
        steps(graphs, device, shape, rare, 2)
    steps(graphs, device, 0, rare, 1)
    assert steps(graphs, device, "another", rare, 2) == ["launched", *RECORDED]
    assert steps(graphs, device, 1, rare, 1) == ["launched"]
    assert steps(graphs, device, 0, rare, 1) == ["replayed"]
    assert steps(graphs, device, "of the other kind", not rare, 1) == ["replayed"]
    assert len(graphs._graphs) == kept + 1


def test_nothing_is_kept_when_memory_moves(device: Device) -> None:
    graphs = Graphs(device)
    graphs.forget()
    assert device.log == [], "nothing is under way"
    for shape, rare in ((2, False), (3, True)):
        steps(graphs, device, shape, rare, 3)
    device.log.clear()
    graphs.forget()
    assert device.log == ["waited"]
    assert steps(graphs, device, 2, False, 1) == ["launched"]
    assert steps(graphs, device, 3, True, 1) == ["launched"]


def test_a_first_step_that_moves_memory_itself_is_recorded_at_the_second(device: Device) -> None:
    graphs = Graphs(device)
    for _ in range(2):
        graphs.run(1, 0, False, graphs.forget)
    assert device.log == ["recorded", "replayed"]


def test_shapes_that_come_once_do_not_add_up(device: Device) -> None:
    graphs = Graphs(device)
    for shape in range(2 * MOST_SHAPES + 10):
        steps(graphs, device, shape, True, 1)
    assert len(graphs._seen) <= MOST_SHAPES
