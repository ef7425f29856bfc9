"""The library as its users see it."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

import ggpy
from ggpy import hub
from ggpy.backends.numpy.backend import Reference
from ggpy.gguf import File
from ggpy.model import Model
from ggpy.sampling import SamplingParams
from ggpy.tokenizer import Tokenizer

ARCHITECTURES = ["gemma2", "gemma3", "llama", "phi3", "qwen2", "qwen3"]


@pytest.fixture(scope="module")
def model(tiny_path):
    with ggpy.load(tiny_path("llama"), device="cpu", n_ctx=64, n_threads=1) as model:
        yield model


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_tiny_model_talks(tiny_path, architecture):
    path = tiny_path(architecture)
    assert path.stat().st_size < 150_000
    with ggpy.load(path, device="cpu", n_threads=1) as model:
        text = "hello world, the model is one \u00e9"
        ids = model.tokenizer.encode(text, add_special=False)
        assert model.tokenizer.decode(ids) == text
        assert model.logits(ids).shape == (len(ids), model.tokenizer.n_vocab)
        assert len(list(model.generate(text, max_tokens=5, seed=1))) <= 5
        assert model.n_ctx == model.n_ctx_train == model.metadata[f"{architecture}.context_length"]


def test_generate_is_repeatable_and_takes_text_or_ids(model):
    ids = model.tokenizer.encode("hello world")
    texts = [
        "".join(p.text for p in model.generate(prompt, max_tokens=20, seed=5))
        for prompt in ("hello world", ids, np.array(ids))
    ]
    assert texts[0] == texts[1] == texts[2]
    assert texts[0] != "".join(p.text for p in model.generate(ids, max_tokens=20, seed=6))


def test_greedy_takes_the_best_logit(model):
    ids = model.tokenizer.encode("one two")
    for piece in model.generate(ids, max_tokens=6, temperature=0, logprobs=True):
        row = model.logits(ids)[-1]
        assert piece.id == row.argmax() and piece.logprob == pytest.approx(logprob(row), abs=1e-4)
        ids = [*ids, piece.id]


def logprob(row: np.ndarray) -> float:
    x = row.astype(np.float64)
    return float(x.max() - np.log(np.exp(x).sum()))


def test_special_tokens_of_a_text_are_parsed(model):
    ids = model.tokenizer.encode("<|im_start|>user\nhello<|im_end|>", parse_special=True)
    assert 3 in ids and 4 in ids
    ways = ("<|im_start|>user\nhello<|im_end|>", ids)
    texts = [[p.id for p in model.generate(w, max_tokens=5, temperature=0)] for w in ways]
    assert texts[0] == texts[1]


def test_parameters_by_name_or_together(model):
    by_name = [p.id for p in model.generate("one", max_tokens=9, seed=3, top_k=7, temperature=1.1)]
    params = SamplingParams(seed=3, top_k=7)
    together = [p.id for p in model.generate("one", max_tokens=9, params=params, temperature=1.1)]
    assert by_name == together
    with pytest.raises(TypeError, match="temprature"):
        next(model.generate("one", temprature=1))
    with pytest.raises(ValueError, match="top_p"):
        next(model.generate("one", top_p=3))


def test_stop_and_max_tokens(model):
    text = "".join(p.text for p in model.generate("one", max_tokens=12, temperature=0))
    stopped = "".join(p.text for p in model.generate("one", temperature=0, stop=text[3:6]))
    assert stopped == text[: text.index(text[3:6])]
    assert not list(model.generate("one", max_tokens=0))


def test_two_generators_at_once_and_one_left_alone(model):
    expected = [
        [p.id for p in model.generate(t, max_tokens=6, temperature=0)] for t in ("one", "two")
    ]
    first = model.generate("one", max_tokens=6, temperature=0)
    ids = [next(first).id]
    second = [p.id for p in model.generate("two", max_tokens=6, temperature=0)]
    ids += [p.id for p in first]
    assert [ids, second] == expected
    abandoned = model.generate("one", temperature=0)
    next(abandoned)
    abandoned.close()
    assert not model.engine.busy
    assert model.engine.pool.n_free == model.engine.pool.n_pages


def test_overflow_is_one_clear_line(model):
    with pytest.raises(ValueError, match="context is 64 tokens, the prompt has 90: raise -c"):
        next(model.generate([5] * 90))
    with pytest.raises(ValueError, match="n_ctx is 0"):
        ggpy.load("model.gguf", n_ctx=0)


def test_progress_counts_to_the_end(tiny_path):
    calls = []
    progress = lambda done, total: calls.append((done, total))  # noqa: E731
    with ggpy.load(tiny_path("qwen3"), device="cpu", n_threads=1, progress=progress):
        pass
    assert calls[-1][0] == calls[-1][1] and calls == sorted(calls) and len(calls) > 10


def test_weights_that_do_not_fit_stay_in_blocks_and_give_the_same(tiny_path):
    notes: list[str] = []
    with File(tiny_path("gemma2")) as file:
        tokenizer = Tokenizer.from_gguf(file)
        ops = [Reference(1), Reference(1, weight_memory=100_000, note=notes.append)]
        logits = [Model(file, tokenizer, x).logits(list(range(5, 25))) for x in ops]
    assert len(notes) == 1 and "in blocks" in notes[0]
    np.testing.assert_allclose(logits[0], logits[1], atol=1e-4)


def test_bad_files_leave_nothing_open(tmp_path):
    path = tmp_path / "bad.gguf"
    path.write_bytes(b"GGUF")
    with pytest.raises(ggpy.GGUFError):
        ggpy.load(path)
    path.unlink()


def test_formats_by_name_in_any_case():
    weights = np.linspace(-1, 1, 64, dtype=np.float32).reshape(2, 32)
    blocks = ggpy.quantize(weights, "Q8_0")
    assert blocks.dtype == np.uint8 and blocks.shape == (2, 34)
    np.testing.assert_allclose(ggpy.dequantize(blocks, "q8_0"), weights, atol=0.01)


def test_import_is_cheap_and_complete():
    code = (
        "import sys, ggpy; assert 'numpy' not in sys.modules; dir(ggpy);"
        "ggpy.gguf.File; ggpy.tokenizer.Tokenizer; ggpy.GGUFError; assert 'cuda' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        ggpy.nothing  # noqa: B018


def test_a_known_name_is_loaded_as_its_file(tiny_path, monkeypatch):
    asked = []

    def resolve(name):
        asked.append(name)
        return tiny_path("qwen3")

    monkeypatch.setattr(hub, "resolve", resolve)
    with ggpy.load("SmolLM2", device="cpu", n_ctx=32, n_threads=1) as model:
        assert model.metadata["general.architecture"] == "qwen3"
    with pytest.raises(ggpy.GGUFError):
        ggpy.load("no-model-of-this-name", device="cpu")
    assert asked == ["SmolLM2"]


def test_a_file_that_is_called_like_a_known_model_is_that_file(tiny_path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2").write_bytes(tiny_path("phi3").read_bytes())
    monkeypatch.setattr(hub, "resolve", lambda name: pytest.fail("it is there"))
    with ggpy.load("smollm2", device="cpu", n_ctx=32, n_threads=1) as model:
        assert model.metadata["general.architecture"] == "phi3"


def test_what_a_shell_shows(model):
    assert repr(model) == "<Model llama.gguf: llama, 64 tokens of context, cpu>"
    assert {"load", "Model", "SamplingParams", "__version__"} <= set(dir(ggpy))
    assert not {"Any", "TYPE_CHECKING", "import_module"} & set(dir(ggpy))
    assert ggpy.SamplingParams is SamplingParams and ggpy.__version__[0].isdigit()
