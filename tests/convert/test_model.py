"""Converted checkpoints: the logits of transformers, llama.cpp's metadata and bytes, its texts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import KINDS, LLAMA3, config_of, to_gguf, weights_of, write, write_weights

import ggpy
from ggpy.gguf import File

from .checks import NMSE, PROMPT, check_greedy_text, last_logits

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
LOGITS = np.load(GOLDEN / "checkpoints.npz")
THEIRS = json.loads((GOLDEN / "checkpoints.json").read_text(encoding="utf-8"))["files"]
Converted = Callable[[str], Path]

# Where we write more or else than llama.cpp's converter does, and why.
UNKNOWN = "tokenizer.ggml.unknown_token_id"  # sentencepiece knows it, even if no file says it
ADDS = {f"tokenizer.ggml.add_{name}_token" for name in ("bos", "eos", "sep")}  # always said
OURS = {  # of those that are not here, ADDS
    "llama-linear": {UNKNOWN},
    "mistral": {UNKNOWN, "llama.attention.sliding_window"},  # the window that Mistral has
    "gemma": {UNKNOWN, "tokenizer.ggml.eot_token_id"},  # 107, whatever that token is
    **{name: {UNKNOWN} for name in ("gemma2", "gemma3", "phi3", "ernie4_5")},
    "olmo3": {*ADDS, "olmo2.rope.scaling.yarn_attn_factor"},  # what it is in any case
    **{name: {*ADDS, "tokenizer.ggml.padding_token_id"} for name in ("qwen3vl", "muse-glimmer")},
}
# Tokens are listed up to the rows of the embedding table: a shorter list would not load.
LONGER = {"mistral": {f"tokenizer.ggml.{x}" for x in ("tokens", "scores", "token_type")}}


def described(path: Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, str]]:
    """(scalars, lengths of arrays, digests of tensors), as in the golden file."""
    from hashlib import sha256

    with File(path) as file:
        scalars, arrays = {}, {}
        for key, value in file.metadata.items():
            if isinstance(value, str) or not hasattr(value, "__len__"):
                scalars[key] = [file.types[key], value]
            else:
                arrays[key] = [file.types[key], len(value)]
        digests = {
            name: sha256(np.ascontiguousarray(t.data)).hexdigest()[:16]
            for name, t in file.tensors.items()
        }
    return scalars, arrays, digests


@pytest.mark.parametrize("key", [key for key in LOGITS.files if key.endswith("/logits")])
def test_logits_are_those_of_transformers(key: str, converted: Converted) -> None:
    name, length, _ = key.split("/")
    # LongRoPE has factors for short contexts and for long ones.
    n_ctx = 32 if name == "phi3" and int(length) <= 32 else 256
    got, wanted = last_logits(converted(name), LOGITS, key, n_ctx)
    assert np.square(got - wanted).sum() / np.square(wanted).sum() <= NMSE


@pytest.mark.parametrize("name", KINDS)
def test_tensors_and_metadata_are_those_of_llama_cpp(name: str, converted: Converted) -> None:
    scalars, arrays, digests = described(converted(name))
    theirs = THEIRS[name]
    assert digests == theirs["tensors"]
    for ours, wanted, but in (
        (scalars, theirs["metadata"], OURS.get(name, ADDS)),
        (arrays, theirs["arrays"], LONGER.get(name, set())),
    ):
        differing = {k for k in ours.keys() | wanted.keys() if ours.get(k) != wanted.get(k)}
        # Merges, and with them the number of tokens, are the library's that trained them.
        assert differing - {"tokenizer.ggml.merges"} <= but


@pytest.mark.parametrize("name", KINDS)
def test_llama_cpp_continues_a_text_alike(name: str, converted: Converted) -> None:
    # llama.cpp has no windows for Mistral and Phi-3: there the text stays inside the first one.
    if name in ("exaone4-window", "command-r-plus"):
        pytest.skip("llama.cpp knows windows, or norms of heads, of models with 64 layers only")
    ids, n = {"mistral": ([5, 300], 6)}.get(name, (PROMPT, 9))
    check_greedy_text(converted(name), ids, n)


def test_several_files_are_one_model(tmp_path: Path, converted: Converted) -> None:
    folder = write(tmp_path / "llama", "llama")
    for part in folder.glob("model*"):
        part.unlink()
    write_weights(folder, weights_of("llama"), "bfloat16")
    assert to_gguf(folder, tmp_path / "out.gguf").read_bytes() == converted("llama").read_bytes()


@pytest.mark.parametrize(
    ("name", "kind", "inside"),
    [
        ("gemma3", "Gemma3ForConditionalGeneration", ("", "language_model.")),
        ("mistral3", "Mistral3ForConditionalGeneration", ("model.", "model.language_model.")),
    ],
)
def test_a_text_model_beside_others_is_taken_out(
    name: str, kind: str, inside: tuple[str, str], tmp_path: Path, converted: Converted
) -> None:
    """Models with an image encoder: names and settings of the text model lie a level deeper."""
    folder = write(tmp_path / name, name)
    text = {k: v for k, v in config_of(KINDS[name]).items() if k != "architectures"}
    top = {"architectures": [kind], "model_type": name}
    top |= {"text_config": text, "vision_config": {"hidden_size": 8}, "mm_tokens_per_image": 256}
    (folder / "config.json").write_text(json.dumps(top))
    old, new = inside
    weights = {new + key.removeprefix(old) if key.startswith(old) else key: array
               for key, array in weights_of(name).items()}  # fmt: skip
    weights |= {f"{x}.w.weight": np.ones((2, 2), np.float32)
                for x in ("vision_tower", "multi_modal_projector")}  # fmt: skip
    write_weights(folder, weights, "bfloat16")
    ours = described(to_gguf(folder, tmp_path / "out.gguf"))
    assert ours[1:] == described(converted(name))[1:]


def test_the_table_is_the_output_of_a_model_that_says_nothing_and_has_none(tmp_path: Path) -> None:
    folder = write(tmp_path / "mistral3", "mistral3", tie_word_embeddings=None)
    weights = weights_of("mistral3")
    write_weights(folder, weights, "bfloat16")
    names = described(to_gguf(folder, tmp_path / "both.gguf"))[2]
    assert "output.weight" in names
    write_weights(folder, {k: v for k, v in weights.items() if k != "lm_head.weight"}, "bfloat16")
    tied = described(to_gguf(folder, tmp_path / "tied.gguf"))[2]
    assert tied == {name: digest for name, digest in names.items() if name != "output.weight"}


def test_a_tied_model_needs_no_copy_of_its_table(tmp_path: Path, converted: Converted) -> None:
    folder = write(tmp_path / "qwen3", "qwen3")
    weights = weights_of("qwen3")
    copy = {"lm_head.weight": weights["model.embed_tokens.weight"]}
    unused = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
    write_weights(folder, {**weights, **copy, **unused}, "bfloat16")
    assert to_gguf(folder, tmp_path / "out.gguf").read_bytes() == converted("qwen3").read_bytes()


@pytest.mark.parametrize("scales", ["blocks", "one"])
def test_weights_in_8_bit_floats(scales: str, tmp_path: Path) -> None:
    """The file of weights times scales is the file of their products."""
    folder = write(tmp_path / "llama", "llama-linear", torch_dtype=None)
    plain, stored = weights_of("llama-linear"), {}
    rng = np.random.default_rng(1)
    for name in [name for name in plain if "proj" in name]:
        rows, columns = plain[name].shape
        codes = rng.integers(0, 256, (rows, columns), np.uint8)
        codes[codes & 127 == 127] = 0x38  # not NaN
        block = (48, 40) if scales == "blocks" else (rows, columns)
        n = tuple(-(-size // b) for size, b in zip((rows, columns), block, strict=True))
        scale = rng.random(n, np.float32)
        stored[name], stored[f"{name}_scale_inv"] = codes, scale
        wide = np.kron(scale, np.ones(block, np.float32))[:rows, :columns]
        plain[name] = float8(codes) * wide
    wanted = folder.with_name("plain")
    write(wanted, "llama-linear", torch_dtype=None)
    write_weights(wanted, plain, "float32")
    quantization = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    quantization["weight_block_size"] = [48, 40] if scales == "blocks" else None
    _mixed_weights(folder, {**plain, **stored})
    config = {**json.loads((folder / "config.json").read_text()), "name": None}
    config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config))
    ours = described(to_gguf(folder, tmp_path / "a.gguf"))
    assert ours[2] == described(to_gguf(wanted, tmp_path / "b.gguf"))[2]


def float8(codes: np.ndarray) -> np.ndarray:
    """ml_dtypes' reading of E4M3."""
    import ml_dtypes

    return codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)


def _mixed_weights(folder: Path, weights: dict[str, np.ndarray]) -> None:
    from checkpoints import stored
    from safetensors.numpy import save_file

    arrays = {
        name: stored(array, "float8_e4m3fn" if array.dtype == np.uint8 else "float32")
        for name, array in weights.items()
    }
    save_file(arrays, folder / "model.safetensors")


# What is refused


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("llama", {"magic": 3}, r"config\.json: not supported: magic = 3; .*--ignore-setting"),
        ("llama", {"hidden_act": "relu"}, r"hidden_act = 'relu' .*only silu"),
        ("llama", {"is_causal": False}, "is_causal = False is not supported"),
        ("llama", {"hidden_size": "wide"}, "hidden_size = 'wide': expected an integer"),
        ("llama", {"hidden_size": None}, "hidden_size is missing"),
        ("llama", {"num_attention_heads": 3}, "3 query heads cannot share 2"),
        ("llama", {"num_hidden_layers": 10**9}, "between 1 and 4096"),
        ("llama", {"sliding_window": 8}, "sliding_window = 8"),
        ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type = 'dyn"),
        ("llama", {"rope_scaling": {**LLAMA3, "wave": 1}}, r"rope_scaling\.wave = 1"),
        ("llama", {"rope_scaling": {"type": "linear"}}, r"rope_scaling\.factor is missing"),
        ("llama", {"rope_scaling": {**LLAMA3, "high_freq_factor": 0.5}}, "high_freq_factor = 0.5"),
        ("llama", {"rope_scaling": [1]}, "expected an object"),
        ("llama", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
                   "rope_scaling": None}, "partial_rotary_factor = 0.5"),
        ("llama", {"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM is not supported; su"),
        ("llama", {"architectures": []}, r"architectures = \[\]"),
        ("qwen3", {"rope_scaling": LLAMA3, "rope_parameters": None}, "rope_scaling = .*qwen3 have"),
        ("glm4", {"rope_scaling": LLAMA3}, "rope_scaling = .*files of glm4 have no factors"),
        ("llama", {"quantization_config": {"quant_method": "quip"}}, "quantised with 'quip'"),
        ("llama", {"vocab_size": 500}, "the shape .512, 64., config.json says .500, 64."),
        ("llama", {"num_hidden_layers": 3}, "no tensor for 'blk.2.attn_norm.weight', and 8 more"),
        ("llama", {"num_hidden_layers": 1}, "no use for tensor 'model.layers.1"),
        ("llama", {"intermediate_size": 97}, "config.json says .64, 97."),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
         "use_sliding_window = True is not supported: 1 layers"),
        ("qwen2", {"rope_scaling": {"type": "yarn", "factor": 4.0, "attention_factor": 1.0}},
         "attention_factor = 1.0"),
        ("gemma2", {"query_pre_attn_scalar": 24}, "query_pre_attn_scalar = 24"),
        ("gemma2", {"layer_types": ["full_attention"] * 2}, "layer_types = "),
        ("gemma2", {"tie_word_embeddings": False}, "tie_word_embeddings = False"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention = True"),
        ("gemma3", {"layer_types": ["chunked"] * 7}, "layer_types = "),
        ("gemma3", {"layer_types": ["full_attention"]}, "one type for each layer"),
        ("phi3", {"partial_rotary_factor": 0.5}, r"long_factor = .*: it has to have 4 numbers"),
    ],
)  # fmt: skip
def test_settings_that_cannot_be_kept_are_refused(
    name: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write(tmp_path / name, name)
    config = {**json.loads((tmp_path / name / "config.json").read_text()), **changes}
    plain = {key: value for key, value in config.items() if value is not None}
    (tmp_path / name / "config.json").write_text(json.dumps(plain))
    with pytest.raises(ValueError, match=message) as raised:
        to_gguf(tmp_path / name, tmp_path / "out.gguf")
    assert "\n" not in str(raised.value)
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("name", ["llama", "gemma3", "phi3", "exaone4-window", "hunyuan-dense"])
def test_whatever_a_config_says_ends_in_a_model_or_in_a_line(name: str, tmp_path: Path) -> None:
    from ggpy.convert import Checkpoint, Folder, read_config, read_model

    folder = write(tmp_path / name, name)
    config = json.loads((folder / "config.json").read_text())
    more = ("text_config", "quantization_config", "rope_parameters", "layer_types")
    odd = (None, True, -1, 0, 1e99, "x", [], {}, [[1]], 1 << 70, float("nan"))
    for key in (*config, *more):
        for value in odd:
            (folder / "config.json").write_text(json.dumps({**config, key: value}))
            try:
                inside = Folder(folder)
                changed, architecture, kind = read_config(inside)
                with Checkpoint(inside, changed.get("quantization_config")) as checkpoint:
                    read_model(inside, changed, architecture, kind, checkpoint)
            except ValueError as error:
                assert str(folder) in str(error) and "\n" not in str(error), (key, value)


def test_what_is_off_or_of_no_consequence_is_accepted(tmp_path: Path, converted: Converted) -> None:
    more = {"new_feature": False, "other": 0, "attention_dropout": 0.1, "auto_map": {"A": "b.C"}}
    folder = write(tmp_path / "llama", "llama", **more, torch_dtype="float16")
    ours = to_gguf(folder, tmp_path / "out.gguf")
    assert ours.read_bytes() == converted("llama").read_bytes()


def test_a_setting_is_ignored_on_demand(tmp_path: Path, converted: Converted) -> None:
    folder = write(tmp_path / "llama", "llama", magic=3)
    ours = to_gguf(folder, tmp_path / "out.gguf", ignored=["magic"])
    assert ours.read_bytes() == converted("llama").read_bytes()


def test_windows_of_other_layers_are_written(tmp_path: Path) -> None:
    types = [f"{'sliding' if i % 2 else 'full'}_attention" for i in range(7)]
    folder = write(tmp_path / "gemma3", "gemma3", layer_types=types)
    with File(to_gguf(folder, tmp_path / "out.gguf")) as file:
        pattern = file.metadata["gemma3.attention.sliding_window_pattern"]
    assert pattern.tolist() == [bool(i % 2) for i in range(7)]
    with ggpy.load(str(tmp_path / "out.gguf"), device="cpu", n_ctx=64) as model:
        assert np.isfinite(model.logits([5, 6, 7])).all()


def test_rope_in_the_form_of_transformers_5(tmp_path: Path, converted: Converted) -> None:
    """One object for each type of layer, instead of settings beside each other."""
    linear = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
    both = {
        "full_attention": linear,
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    gone = dict.fromkeys(("rope_theta", "rope_scaling", "rope_local_base_freq"))
    folder = write(tmp_path / "gemma3", "gemma3", rope_parameters=both, **gone)
    ours = to_gguf(folder, tmp_path / "out.gguf")
    assert ours.read_bytes() == converted("gemma3").read_bytes()


def test_no_code_of_a_folder_is_run(tmp_path: Path) -> None:
    """auto_map names a module; a pickle beside the weights would run when it is opened."""
    folder = write(tmp_path / "llama", "llama", auto_map={"AutoConfig": "evil.Config"})
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x02cposix\nsystem\n")
    to_gguf(folder, tmp_path / "out.gguf")
    assert not (tmp_path / "ran").exists()
    assert re.search("LlamaForCausalLM", (folder / "config.json").read_text())
