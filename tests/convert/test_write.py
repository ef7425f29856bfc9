"""Files as they are written: formats, order of rows, parts, and nothing half-done."""

from __future__ import annotations

import errno
import json
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import KINDS, to_gguf, weights_of, write, write_weights
from gemma4_checkpoints import GEMMA4_KINDS
from hybrid_checkpoints import HYBRID_KINDS
from moe_checkpoints import MOE_KINDS

from ggpy.convert import Checkpoint, ConversionPlan, Folder, mix_of, read_config, read_model
from ggpy.convert import plan as plan_of
from ggpy.convert import write as write_plan
from ggpy.convert.general import Counts, general_metadata
from ggpy.formats import by_name
from ggpy.gguf import File
from ggpy.gguf.writer import Writer
from ggpy.quantization import requantize
from ggpy.quantization.workers import Workers

Converted = Callable[[str], Path]


@contextmanager
def planned(
    folder: Path, out: Path, type: str, split: int = 0, **mix: Any
) -> Iterator[ConversionPlan]:
    """A plan with its checkpoint open."""
    inside = Folder(folder)
    config, architecture, kind = read_config(inside)
    with Checkpoint(inside) as checkpoint:
        model = read_model(inside, config, architecture, kind, checkpoint)
        yield plan_of(model, mix_of(model, type, **mix), out, split)


def run(plan: ConversionPlan) -> list[Any]:
    with Workers(1) as workers:
        return list(write_plan(plan, workers))


def permuted(weights: np.ndarray, n_head: int) -> np.ndarray:
    """llama.cpp's formula for rows of q and k."""
    shape = (n_head, 2, weights.shape[0] // n_head // 2, *weights.shape[1:])
    return weights.reshape(shape).swapaxes(1, 2).reshape(weights.shape)


def test_weights_arrive_where_they_belong(converted: Converted) -> None:
    theirs = weights_of("llama")
    with File(converted("llama")) as file:
        ours = {name: tensor.dequantize() for name, tensor in file.tensors.items()}
    layer = "model.layers.1."
    assert np.array_equal(ours["token_embd.weight"], theirs["model.embed_tokens.weight"])
    assert np.array_equal(ours["blk.1.attn_v.weight"], theirs[f"{layer}self_attn.v_proj.weight"])
    for name, n_head in (("q", 4), ("k", 2)):
        wanted = permuted(theirs[f"{layer}self_attn.{name}_proj.weight"], n_head)
        assert np.array_equal(ours[f"blk.1.attn_{name}.weight"], wanted)


def test_gemmas_norms_have_their_one(converted: Converted) -> None:
    with File(converted("gemma2")) as file:
        ours = file.tensors["blk.0.ffn_norm.weight"].dequantize()
    assert np.array_equal(
        ours, weights_of("gemma2")["model.layers.0.pre_feedforward_layernorm.weight"] + 1
    )


@pytest.mark.parametrize(
    ("type", "file_type", "matrices", "table"),
    [("f32", 0, "F32", "F32"), ("f16", 1, "F16", "F16"), ("bf16", 32, "BF16", "BF16"),
     ("q8_0", 7, "Q8_0", "Q8_0"), ("q4_0", 2, "Q4_0", "Q8_0")],
)  # fmt: skip
def test_types(
    type: str, file_type: int, matrices: str, table: str, tmp_path: Path, checkpoint: Converted
) -> None:
    out = to_gguf(checkpoint("llama"), tmp_path / "out.gguf", type)
    theirs = weights_of("llama")
    with File(out) as file:
        assert file.metadata["general.file_type"] == file_type
        assert file.metadata["general.quantization_version"] == 2
        kinds = {name: tensor.format.name for name, tensor in file.tensors.items()}
        assert kinds["blk.0.ffn_up.weight"] == matrices and kinds["output.weight"] == table
        assert kinds["blk.0.attn_norm.weight"] == kinds["rope_freqs.weight"] == "F32"
        ours = file.tensors["blk.0.ffn_up.weight"]
        wanted = by_name(matrices).quantize(theirs["model.layers.0.mlp.up_proj.weight"])
        assert np.array_equal(ours.data, wanted)


@pytest.mark.parametrize("type", ["q4_0", "q5_1", "q8_0", "q4_k_m"])
def test_the_same_as_converting_first_and_quantising_then(
    type: str, tmp_path: Path, checkpoint: Converted, converted: Converted
) -> None:
    out = to_gguf(checkpoint("qwen3"), tmp_path / "a.gguf", type)
    with File(converted("qwen3")) as file, Workers(1) as workers:
        for _ in requantize.write(
            requantize.plan(file, requantize.mix_for(file, type)), tmp_path / "b.gguf", workers
        ):
            pass
    with File(out) as ours, File(tmp_path / "b.gguf") as theirs:
        assert list(ours.tensors) == list(theirs.tensors)
        assert ours.metadata["general.file_type"] == theirs.metadata["general.file_type"]
        for name, tensor in ours.tensors.items():
            assert tensor.format is theirs.tensors[name].format
            assert np.array_equal(tensor.data, theirs.tensors[name].data)


def test_types_of_single_tensors(tmp_path: Path, checkpoint: Converted) -> None:
    chosen = [("ffn_(up|gate)", by_name("Q5_1"))]
    options = {"tensor_types": chosen, "token_embd_type": by_name("F16")}
    with planned(checkpoint("llama"), tmp_path / "out.gguf", "q8_0", **options) as plan:
        kinds = {choice.source.name: choice.format.name for choice in plan.choices}
    assert kinds["blk.1.ffn_gate.weight"] == "Q5_1" and kinds["blk.1.ffn_down.weight"] == "Q8_0"
    assert kinds["token_embd.weight"] == "F16"


def test_a_tied_models_table_is_its_output(tmp_path: Path, checkpoint: Converted) -> None:
    with planned(checkpoint("gemma2"), tmp_path / "out.gguf", "q4_0") as plan:
        kinds = {choice.source.name: choice.format.name for choice in plan.choices}
    assert kinds["token_embd.weight"] == "Q8_0"  # Q6_K, but for rows of 64


def test_types_that_need_an_importance_matrix_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(KINDS, "wide", replace(KINDS["llama-linear"], config={"hidden_size": 256}))
    folder = write(tmp_path / "wide", "wide")
    with pytest.raises(ValueError, match="in Q2_K needs an importance matrix"):
        to_gguf(folder, tmp_path / "out.gguf", "q2_k_s")
    to_gguf(folder, tmp_path / "out.gguf", "q2_k")


def test_errors_are_measured(tmp_path: Path, checkpoint: Converted) -> None:
    with planned(checkpoint("llama"), tmp_path / "out.gguf", "q4_0") as plan:
        steps = run(plan)
        names = [choice.source.name for choice in plan.choices]
    errors = {names[step.index]: step.error for step in steps if step.error is not None}
    theirs = weights_of("llama")["model.layers.0.mlp.up_proj.weight"]
    q4_0 = by_name("Q4_0")
    wanted = np.sqrt(np.mean((q4_0.dequantize(q4_0.quantize(theirs)) - theirs) ** 2))
    assert errors["blk.0.ffn_up.weight"] == pytest.approx(wanted, rel=1e-5)
    assert errors["output_norm.weight"] == 0  # bfloat16 fits into F32


def test_parts(tmp_path: Path, checkpoint: Converted, converted: Converted) -> None:
    with planned(checkpoint("llama"), tmp_path / "out.gguf", "f32", 150_000) as plan:
        run(plan)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert len(names) > 2
    assert names == [f"out-{i + 1:05}-of-{len(names):05}.gguf" for i in range(len(names))]
    with File(tmp_path / names[0]) as ours, File(converted("llama")) as whole:
        assert list(ours.tensors) == list(whole.tensors)
        assert all(np.array_equal(t.data, whole.tensors[n].data) for n, t in ours.tensors.items())
        assert whole.metadata.keys() <= ours.metadata.keys()


def peak_of(folder: Path, n_vocab: int) -> int:
    """Bytes that are allocated at most while a checkpoint with a table of n_vocab is written."""
    write(folder, "qwen3", vocab_size=n_vocab)
    table = {"model.embed_tokens.weight": np.zeros((n_vocab, 64), np.float32)}
    write_weights(folder, {**weights_of("qwen3"), **table}, "bfloat16")
    with planned(folder, folder / "out.gguf", "q8_0") as plan:
        for part in plan.parts:
            part.metadata.clear()  # what tokens take is not asked here
        tracemalloc.start()
        run(plan)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return peak


def test_memory_does_not_grow_with_tensors(tmp_path: Path) -> None:
    once, twice = peak_of(tmp_path / "a", 1 << 17), peak_of(tmp_path / "b", 1 << 18)
    assert twice < 1.05 * once


# Nothing half-done


def full_disk(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """The writer's file takes `after` pieces and no more."""
    write_piece = Writer.write
    pieces = iter(range(after))

    def failing(self: Writer, data: Any) -> None:
        if next(pieces, None) is None:
            raise OSError(errno.ENOSPC, "No space left on device")
        write_piece(self, data)

    monkeypatch.setattr(Writer, "write", failing)


@pytest.mark.parametrize("after", [0, 10])
@pytest.mark.parametrize("split", [0, 100_000])
def test_a_full_disk_leaves_nothing(
    after: int, split: int, tmp_path: Path, checkpoint: Converted, monkeypatch: pytest.MonkeyPatch
) -> None:
    full_disk(monkeypatch, after)
    with (
        planned(checkpoint("llama"), tmp_path / "out.gguf", "f16", split) as plan,
        pytest.raises(OSError, match="No space left"),
    ):
        run(plan)
    assert not list(tmp_path.iterdir())


def test_an_interrupt_leaves_what_was_there(tmp_path: Path, checkpoint: Converted) -> None:
    (tmp_path / "out.gguf").write_bytes(b"old")
    with (
        planned(checkpoint("llama"), tmp_path / "out.gguf", "f16") as plan,
        pytest.raises(KeyboardInterrupt),
        Workers(1) as workers,
    ):
        for step in write_plan(plan, workers):
            if step.index == 5:
                raise KeyboardInterrupt
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"old"]


@pytest.mark.parametrize("type", ["f32", "bf16", "q8_0"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nan_is_refused_by_name_and_row(value: float, type: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "in", "qwen3")
    weights = weights_of("qwen3")
    weights["model.layers.1.mlp.down_proj.weight"][7, 3] = value
    write_weights(folder, weights, "bfloat16")
    with pytest.raises(ValueError, match=r"tensor 'blk\.1\.ffn_down\.weight': row 7 holds NaN or"):
        to_gguf(folder, tmp_path / "out.gguf", type)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


# What a file says about itself


def general(folder: Path, n_params: int = 1_235_000_000) -> dict[str, Any]:
    found = general_metadata(Folder(folder), {}, "llama", Counts(n_params, n_params), None)
    return {key.removeprefix("general."): value for key, (_, value) in found.items()}


def test_names_come_from_the_folder_and_the_card(tmp_path: Path) -> None:
    folder = tmp_path / "Llama-3.2-1B-Instruct"
    folder.mkdir()
    found = general(folder)
    assert found["name"] == "Llama 3.2 1B Instruct" and found["size_label"] == "1B"
    (folder / "README.md").write_text(
        "---\nlicense: llama3.2\nlanguage: [en, de]\ntags: [x]\nbase_model: meta/Llama-3.2-1B\n"
        "date: 2024-01-01\nextra: {a: 1}\n---\n# A model\n"
    )
    found = general(folder)
    assert found["license"] == "llama3.2" and found["languages"] == ["en", "de"]
    assert found["base_model.0.name"] == "Llama 3.2 1B"


@pytest.mark.parametrize(
    "card",
    ["---\n{[}\n---\n", "---\ntags: " + "[" * 200 + "]" * 200 + "\n---\n",
     "---\nlicense: [1]\n---\n",
     "---\na: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]\ntags: *c\n---\n", "\xff", "---\n",
     "---\nlicense: " + "x" * 9999 + "\n---\n", "---\n!!python/object:os.system {}\n---\n"],
)  # fmt: skip
def test_cards_that_are_odd_are_left_out(card: str, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_bytes(card.encode("latin-1"))
    found = general(tmp_path)
    assert "license" not in found and "tags" not in found


def test_sampling_of_the_authors(tmp_path: Path) -> None:
    settings = {"temperature": 0.6, "top_k": 20, "top_p": True, "repetition_penalty": "high"}
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    found = general(tmp_path)
    assert {k: v for k, v in found.items() if "sampling" in k} == {
        "sampling.temp": 0.6,
        "sampling.top_k": 20,
    }


def test_every_architecture_has_a_checkpoint() -> None:
    from ggpy.arch import architectures

    all_kinds = {**KINDS, **MOE_KINDS, **HYBRID_KINDS, **GEMMA4_KINDS}
    known = {kind.architecture for kind in all_kinds.values()} | {"gemma-embedding"}  # embedders
    assert known == {name for name, found in architectures().items() if found.hugging_face}
