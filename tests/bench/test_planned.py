"""What a server compiles before its first request."""

from __future__ import annotations

import re

from ggpy.bench import planned
from ggpy.cache_types import CacheTypes
from ggpy.gguf import File


def test_kernels_of_a_long_context_among_short_ones_are_compiled_ahead(
    monkeypatch, tiny_path
) -> None:
    """The first long context must not stop the others' answers for a compilation."""
    wishes: list = []
    monkeypatch.setattr(planned, "compile_ahead", lambda missing, *_: wishes.extend(missing))
    monkeypatch.setattr(planned, "is_compiled", lambda **_: False)
    device = planned.device_of("sm_90a")
    device.target = "sm_90a"
    with File(tiny_path("llama")) as file:
        planned.compile_steps(file, device, 64, CacheTypes(), lambda text: None)
    names = {name for wish in wishes for name in wish["expressions"]}
    pattern = re.compile(r"decode_attention<(\d+), (\w+), (\w+), (.*)>")
    found = {match.groups() for name in names if (match := pattern.match(name))}
    short = {(row, shared, more) for row, shared, odd, more in found if odd == "false"}
    deep = {(row, shared, more) for row, shared, odd, more in found if odd == "true"}
    assert short and short == deep
