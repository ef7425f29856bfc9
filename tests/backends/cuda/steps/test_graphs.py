"""What is recorded, and what of it is kept."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from ggpy.backends.cuda.steps.graphs import EAGER_STEPS, KEPT, MOST_SHAPES, Graphs


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


def steps(
    graphs: Graphs, device: Device, shape: Any, n: int, often: bool = True, place: int = 0
) -> list[str]:
    """What happens in n steps of a shape; each gives the result of its own first launch."""
    device.log.clear()

    def launch() -> Any:
        device.log.append("launched")
        return shape

    for _ in range(n):
        assert graphs.run(shape, place, often, launch) == shape
    return device.log.copy()


RECORDED = ["recorded", "launched", "replayed"]


def test_recorded_at_the_second_step(device: Device) -> None:
    log = steps(Graphs(device), device, 1, 4)
    assert log == ["launched", *RECORDED, *["replayed"] * 2]


def test_a_shape_that_is_not_frequent_is_recorded_later(device: Device) -> None:
    """Then for another place, too, without another step that is launched."""
    graphs = Graphs(device)
    log = steps(graphs, device, 1, EAGER_STEPS + 2, often=False)
    assert log == [*["launched"] * EAGER_STEPS, *RECORDED, "replayed"]
    assert steps(graphs, device, 1, 2, place=1) == [*RECORDED, "replayed"]


def test_few_are_kept(device: Device) -> None:
    """The one that was used longest ago goes."""
    graphs = Graphs(device)
    for shape in range(KEPT):
        steps(graphs, device, shape, 2)
    steps(graphs, device, 0, 1)
    assert steps(graphs, device, "another", 2) == ["launched", *RECORDED]
    assert steps(graphs, device, 1, 1) == ["launched"]
    assert steps(graphs, device, 0, 1) == ["replayed"]
    assert len(graphs._graphs) == KEPT


def test_nothing_is_kept_when_memory_moves(device: Device) -> None:
    graphs = Graphs(device)
    graphs.forget()
    assert device.log == [], "nothing is under way"
    for shape in (2, 3):
        steps(graphs, device, shape, 3)
    device.log.clear()
    graphs.forget()
    assert device.log == ["waited"]
    assert steps(graphs, device, 2, 1) == ["launched"]
    assert steps(graphs, device, 3, 1) == ["launched"]


def test_a_first_step_that_moves_memory_itself_is_recorded_at_the_second(device: Device) -> None:
    graphs = Graphs(device)
    for _ in range(2):
        graphs.run(1, 0, True, graphs.forget)
    assert device.log == ["recorded", "replayed"]


def test_shapes_that_come_once_do_not_add_up(device: Device) -> None:
    graphs = Graphs(device)
    for shape in range(2 * MOST_SHAPES + 10):
        steps(graphs, device, shape, 1)
    assert len(graphs._seen) <= MOST_SHAPES
