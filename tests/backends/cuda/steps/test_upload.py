"""A step's integers on their way: what waits for what, on a device that only knows that."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from ggpy.backends.cuda.steps import upload
from ggpy.backends.cuda.steps.upload import IN_FLIGHT, PLACES, SMALLEST, StepUpload
from ggpy.backends.interface import Step
from ggpy.device import Buffer
from ggpy.kernels.attention.rope_kv import Heads


class Stream:
    """What was enqueued last, and so all that comes before what is enqueued next."""

    def __init__(self) -> None:
        self.before: frozenset[object] = frozenset()

    def enqueue(self) -> object:
        operation = object()
        self.before |= {operation}
        return operation

    def wait(self, event: Event) -> None:
        self.before |= event.before


class Event:
    def __init__(self, device: Device) -> None:
        self.device = device
        self.before: frozenset[object] = frozenset()

    def record(self, stream: Stream | None = None) -> Event:
        self.before = (stream or self.device.stream).before
        return self

    def synchronize(self) -> None:
        self.device.done |= self.before


class Device:
    """Streams, whose operations run at any time that their order allows."""

    def __init__(self) -> None:
        self.stream = Stream()
        self.done: frozenset[object] = frozenset()
        self.copies: dict[int, object] = {}  # the last one from a host address
        self.kernels: dict[int, object] = {}  # the last ones that read a place
        self.copied: tuple[int, object] | None = None
        self.allocated = self.moved = 0

    def alloc(self, nbytes: int, name: str = "") -> Buffer:
        self.allocated += 1
        return Buffer(self.allocated << 40, nbytes, name, lambda *_: None)

    def pinned(self, nbytes: int) -> np.ndarray:
        return np.zeros(nbytes, np.uint8)

    def event(self) -> Event:
        return Event(self)

    def new_stream(self) -> Stream:
        return Stream()

    def upload(self, to: Buffer, array: np.ndarray, *, stream: Stream) -> None:
        """Nobody may still read what is there; nor may a copy from the array be under way, whose
        numbers have been written by now.
        """
        host, place = array.ctypes.data, to.address
        assert self.copies.get(host) in (None, *self.done), "the host's memory is in use"
        assert self.kernels.get(place) in (None, *stream.before), "kernels still read the place"
        self.copied_after = stream.before
        self.copies[host] = copy = stream.enqueue()
        self.copied = place, copy

    def run(self) -> int:
        """A step's kernels, which read what was copied; the place of that."""
        assert self.copied is not None
        place, copy = self.copied
        assert copy in self.stream.before, "kernels do not wait for the copy"
        self.kernels[place] = self.stream.enqueue()
        return place


HEADS = Heads(n_head=4, n_head_kv=2, head_size=64, page_size=64)
SPARE = 99  # the page of tokens that pad a step


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.fixture
def steps(device: Device) -> StepUpload:
    def moving() -> None:
        device.moved += 1

    decode = SimpleNamespace(
        resident_splits=lambda n: None,
        launched_splits=lambda n, most: 100 * n + most,
        decode_tiles=2,
        device=SimpleNamespace(sm_count=4),
    )
    kernels = SimpleNamespace(heads=HEADS, decode=decode, prefill_tokens=None)
    return StepUpload(device, [kernels], [0], [(SPARE,)], moving, 64)


def single(n: int = 2, pages: int = 1, position: int = 5) -> Step:
    """A token of each of n sequences."""
    every = np.arange(n, dtype=np.int32)
    tables = np.zeros((n, pages), np.int32)
    return Step(every, np.full(n, position, np.int32), every, (tables,), every)


def prompt(n: int = 3) -> Step:
    """n tokens of one sequence."""
    every = np.arange(n, dtype=np.int32)
    zeros = np.zeros(n, np.int32)
    return Step(every, every, zeros, (np.zeros((1, 1), np.int32),), every[-1:])


def test_nothing_is_overwritten_that_is_in_use(device: Device, steps: StepUpload) -> None:
    """Whatever follows what, and however far ahead of the device; no step waits for its end."""
    kinds = np.random.default_rng(0).integers(0, 4, 200)
    for kind in kinds:
        steps.rehearsing = kind == 3
        steps.upload(prompt() if kind == 0 else single())
        device.run()
        assert device.stream.before - device.done, "the host has waited for all kernels"


def test_frequent_decode_steps_take_places_in_turn(device: Device, steps: StepUpload) -> None:
    steps.rehearsing = True
    places, found = [], []
    for _ in range(6):
        found.append(steps.upload(single()))
        places.append(device.run())
    assert [b.place for b in found] == [0, 1] * 3 and places[:2] * 3 == places
    assert len(set(places)) == PLACES and found[0] is found[2]
    assert found[0].shape == found[1].shape and found[0].ids.ptr != found[1].ids.ptr


def test_a_decode_step_is_frequent_after_many(device, steps, monkeypatch) -> None:
    """Those before take one place. Steps that end with the argmax are counted apart."""
    often = 20
    monkeypatch.setattr(upload, "OFTEN", often)
    for argmax in (False, True):
        found = []
        for _ in range(often + 1):
            found.append(steps.upload(single(), argmax=argmax))
            device.run()
        assert [b.often for b in found] == [False] * (often - 1) + [True] * 2
        assert {b.place for b in found[:-2]} == {0} and found[-1].place != found[-2].place
    steps.rehearsing = True
    assert steps.upload(single(3)).often
    steps.rehearsing = False
    assert steps.upload(single(3)).often


def test_a_place_is_filled_while_the_step_before_runs(device: Device, steps: StepUpload) -> None:
    """Unless both are of prompts, which have one place."""
    steps.rehearsing = True
    steps.upload(single())
    waits = []
    for step in (single(), prompt(), prompt(), single()):
        running = device.kernels[device.run()]
        steps.upload(step)
        waits.append(running in device.copied_after)
    assert waits == [False, False, True, False]


def test_pinned_memory_is_waited_for(device: Device, steps: StepUpload) -> None:
    for _ in range(IN_FLIGHT):
        steps.upload(single())
        device.run()
    assert not device.done
    steps.upload(single())
    assert device.done


def test_larger_steps_move_all_places(device: Device, steps: StepUpload) -> None:
    steps.upload(single())
    before = device.run()
    steps.upload(single(2, SMALLEST // 8))
    assert device.run() != before and device.moved == 2


def test_as_many_splits_as_the_kernel_says(device: Device, steps: StepUpload) -> None:
    """Which is told the tokens, and the splits of the longest context."""
    found = []
    for position in (5, 127, 128, 1023, 1024, 1920, 40000):
        found.append(steps.upload(single(1, 1 << 10, position)).tilings[0].n_split)
        device.run()
    assert found == [101, 101, 102, 108, 109, 116, 116]
