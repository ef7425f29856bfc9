"""What a server compiles before its first request."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from ggpy.bench import planned
from ggpy.cache_types import CacheTypes
from ggpy.gguf import File


@pytest.fixture
def compiled(monkeypatch, tiny_path) -> Callable[[str], set[str]]:
    """The names of the kernels that are compiled for a model."""
    wishes: list = []
    monkeypatch.setattr(planned, "compile_ahead", lambda missing, *_: wishes.extend(missing))
    monkeypatch.setattr(planned, "is_compiled", lambda **_: False)

    def names(architecture: str) -> set[str]:
        device = planned.device_of("sm_90a")
        device.target = "sm_90a"
        with File(tiny_path(architecture)) as file:
            planned.compile_steps(file, device, 64, CacheTypes(), lambda text: None)
        return {name for wish in wishes for name in wish["expressions"]}

    return names


def test_kernels_of_a_long_context_among_short_ones_are_compiled_ahead(compiled) -> None:
    """The first long context must not stop the others' answers for a compilation."""
    pattern = re.compile(r"decode_attention<(\d+), (\w+), (\w+), (.*)>")
    found = {match.groups() for name in compiled("llama") if (match := pattern.match(name))}
    short = {(row, shared, more) for row, shared, odd, more in found if odd == "false"}
    deep = {(row, shared, more) for row, shared, odd, more in found if odd == "true"}
    assert short and short == deep


def test_kernels_of_recurrent_states_are_compiled_ahead(compiled) -> None:
    names = {name.partition("<")[0] for name in compiled("qwen35")}
    assert names > {"delta_decode", "delta_conv", "delta_scan", "delta_norm"}


def test_all_that_was_compiled_is_loaded(monkeypatch, tiny_path) -> None:
    """Loading a kernel for the first time may wait for all that runs."""
    wishes: list = []
    monkeypatch.setattr(planned, "compile_ahead", lambda missing, *_: wishes.extend(missing))
    monkeypatch.setattr(planned, "is_compiled", lambda **_: False)
    device = planned.device_of("sm_90a")
    device.target = "sm_90a"
    with File(tiny_path("llama")) as file:
        planned.compile_steps(file, device, 4, CacheTypes(), lambda text: None)
    assert len(wishes) > 20 and device.wishes == wishes
    assert "argmax" in {name for _, names, _ in device.asked for name in names}
