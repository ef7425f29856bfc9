"""Files of other converters than today's, and of llama.cpp's when it was younger."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from other_forms import FORMS, MIXTRAL

from ggpy import arch
from ggpy.arch.join import joined
from ggpy.formats import by_name
from ggpy.gguf import File, GGUFError, Tensor
from tools import make_tiny, show

from .test_forward import IDS, our_logits

Pair = tuple[Path, Path]


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Pair]:
    """Writes a form and the usual one with the same weights, in float32."""

    def write(name: str) -> Pair:
        form = FORMS[name]
        model = replace(make_tiny.MODELS[form.architecture], types={"": "F32"})
        monkeypatch.setitem(make_tiny.MODELS, form.architecture, model)
        usual = form.architecture, form.usual_settings, form.usual_tensors
        changed = form.architecture, form.settings, form.changed()
        return tuple(
            make_tiny.write(tmp_path / f"{i}.gguf", *x) for i, x in enumerate((changed, usual))
        )

    return write


@pytest.mark.parametrize("name", FORMS)
def test_it_has_the_logits_of_the_usual_form(name: str, written: Callable[[str], Pair]) -> None:
    path, usual = written(name)
    with File(path) as file:
        assert show.why_not(file) == ""
    np.testing.assert_allclose(our_logits(path, 64, IDS), our_logits(usual, 64, IDS), atol=1e-5)


def expert(x: int, rows: np.ndarray, kind: str = "F32") -> Tensor:
    return Tensor(f"blk.0.ffn_up.{x}.weight", (2, 8), by_name(kind), rows)


def test_experts_at_equal_distances_are_a_view() -> None:
    data = np.arange(5 * 2 * 32, dtype=np.uint8).reshape(5, 2, 32)
    whole = joined("w", [expert(x, data[2 * x]) for x in range(3)])
    assert np.shares_memory(whole.data, data) and whole.shape == (3, 2, 8)
    np.testing.assert_array_equal(whole.data, data[::2])
    mixed = joined("w", [expert(x, data[i]) for x, i in enumerate((0, 4, 1))])
    np.testing.assert_array_equal(mixed.data, data[[0, 4, 1]])


def test_experts_of_two_types_are_refused() -> None:
    parts = expert(0, np.zeros((2, 32), np.uint8)), expert(1, np.zeros((2, 16), np.uint8), "F16")
    with pytest.raises(GGUFError, match=r"'blk.0.ffn_up.1.weight' is F16 .* have to be alike"):
        joined("w", list(parts))


def test_an_expert_is_missing(tmp_path: Path) -> None:
    tensors = FORMS["experts apart"].changed() | {"blk.1.ffn_up.5.weight": None}
    path = make_tiny.write(tmp_path / "t.gguf", "llama", MIXTRAL, tensors)
    with File(path) as file, pytest.raises(GGUFError, match=r"needs tensor 'blk\.1\.ffn_up_exps"):
        arch.check(file)


@pytest.mark.parametrize(
    ("architecture", "message"), [("clip", "reads images or audio"), ("gptoss", "form of Ollama")]
)
def test_files_for_other_programs_are_refused(
    architecture: str, message: str, tiny_path, tmp_path: Path
) -> None:
    with File(tiny_path("llama")) as file:
        file.metadata["general.architecture"] = architecture
        with pytest.raises(GGUFError, match=f"'{architecture}': .*{message}"):
            arch.check(file)
