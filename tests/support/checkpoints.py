"""Small checkpoints in the layout of the Hugging Face hub, one for each difference between
architectures: random weights from a seed, a configuration, and a tokenizer trained at test time.

Only the expected results are stored: the logits of transformers, and the output of llama.cpp's
converter (tests/golden/make_checkpoints.py).
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
from small_vocab import TEXTS

N_VOCAB = 512
BASE = {
    "vocab_size": N_VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.02,
    "use_cache": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3 = {
    **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "original_max_position_embeddings": 64,
}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
PHI3_ROPE = {
    "type": "longrope",
    "long_factor": [2.0, 2.5, 3.0, 4.0, 5.0, 6.0],
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
}
GEMMA = {
    **{"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 8},
    **{"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False},
}
GEMMA3 = {
    **{**GEMMA, "num_hidden_layers": 7, "num_key_value_heads": 1, "rope_theta": 1e6},
    **{"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_local_base_freq": 10000.0},
}


@dataclass(frozen=True)
class Kind:
    """A checkpoint: its class, its settings of config.json beyond BASE, and its file format."""

    architecture: str  # of the GGUF file
    classes: str
    model_type: str
    config: Mapping[str, Any] = field(default_factory=dict)
    # or "spm", "bare spm" (no space before text), "pieces" ("spm" as a tokenizer.json)
    tokenizer: str = "bpe"
    pre: str = "llama-bpe"
    dtype: str = "bfloat16"
    tied: bool = False
    shards: int = 1


KINDS = {
    "llama": Kind("llama", "LlamaForCausalLM", "llama", {"rope_scaling": LLAMA3}, shards=3),
    "llama-linear": Kind(
        *("llama", "LlamaForCausalLM", "llama"),
        {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_theta": 5e5},
        *("spm", ""),
        dtype="float32",
    ),
    "mistral": Kind(
        *("llama", "MistralForCausalLM", "mistral"),
        {"head_dim": 24, "sliding_window": 8, "rope_theta": 1e6},
        *("pieces", ""),
        dtype="float16",
    ),
    "qwen2": Kind(
        *("qwen2", "Qwen2ForCausalLM", "qwen2"),
        {"rope_scaling": YARN, "rope_theta": 1e6, "use_sliding_window": False},
        pre="qwen2",
    ),
    "qwen3": Kind(
        *("qwen3", "Qwen3ForCausalLM", "qwen3"),
        {"head_dim": 32, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        pre="qwen2",
        tied=True,
    ),
    "gemma2": Kind(
        *("gemma2", "Gemma2ForCausalLM", "gemma2"),
        {**GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
        *("bare spm", ""),
        tied=True,
    ),
    "gemma3": Kind(
        *("gemma3", "Gemma3ForCausalLM", "gemma3_text"), GEMMA3, *("bare spm", ""), tied=True
    ),
    "phi3": Kind(
        *("phi3", "Phi3ForCausalLM", "phi3"),
        {
            **{"rope_scaling": PHI3_ROPE, "partial_rotary_factor": 0.75},
            **{"original_max_position_embeddings": 32, "sliding_window": 16},
        },
        *("spm", ""),
        dtype="float32",
    ),
}


def write(folder: Path, name: str, *, tokenizer: bool = True, **changes: Any) -> Path:
    """Write the checkpoint `name`. `changes` replace settings, or remove them (None)."""
    kind = KINDS[name]
    folder.mkdir(parents=True, exist_ok=True)
    config = {**config_of(kind), **changes}
    text = json.dumps({key: value for key, value in config.items() if value is not None})
    (folder / "config.json").write_text(text)
    write_weights(folder, weights_of(name), kind.dtype, kind.shards)
    if tokenizer:
        write_tokenizer(folder, kind.tokenizer, kind.pre)
    return folder


def config_of(kind: Kind) -> dict[str, Any]:
    found = {**BASE, "architectures": [kind.classes], "model_type": kind.model_type}
    found |= {"hidden_act": "silu"} if "gemma" not in kind.architecture else {}
    return {**found, "tie_word_embeddings": kind.tied, "torch_dtype": kind.dtype, **kind.config}


def to_gguf(folder: Path, out: Path, type: str = "f32", keep: bool = False, **options: Any) -> Path:
    """Convert a checkpoint; options as of `ggpy.convert.read_model`."""
    from ggpy.convert import Checkpoint, Folder, mix_of, plan, read_config, read_model, write
    from ggpy.quantization.workers import Workers

    inside = Folder(folder)
    config, architecture, kind = read_config(inside)
    quantization = config.get("quantization_config")
    with Checkpoint(inside, quantization) as checkpoint, Workers(1) as workers:
        model = read_model(inside, config, architecture, kind, checkpoint, **options)
        assert model.warnings == []
        for _ in write(plan(model, mix_of(model, type), out, keep=keep), workers):
            pass
    return out


# Weights


def weights_of(name: str) -> dict[str, np.ndarray]:
    """{name in transformers: weights}, in float32 with values that are exact in bfloat16."""
    kind = KINDS[name]
    rng = np.random.default_rng(crc32(name.encode()))
    return {key: _random(rng, key, shape, kind) for key, shape in shapes_of(kind).items()}


def _random(rng: np.random.Generator, name: str, shape: tuple[int, ...], kind: Kind) -> np.ndarray:
    values = rng.standard_normal(shape)
    if "norm" in name:
        mean = 0.0 if "gemma" in kind.architecture else 1.0
        values = mean + 0.2 * values
    elif name.endswith("bias"):
        values *= 0.3
    else:
        values *= 1.5 * shape[-1] ** -0.5
    bits = values.astype(np.float32).view(np.uint32) & 0xFFFF0000
    return bits.view(np.float32)


def shapes_of(kind: Kind) -> dict[str, tuple[int, ...]]:
    """{name in transformers: shape}."""
    config = config_of(kind)
    width, ffn, n_head = (
        config[key] for key in ("hidden_size", "intermediate_size", "num_attention_heads")
    )
    size = config.get("head_dim", width // n_head)
    q, kv = n_head * size, config["num_key_value_heads"] * size
    layer = {"input_layernorm": (width,), "post_attention_layernorm": (width,)}
    if kind.architecture == "phi3":
        layer |= {"self_attn.qkv_proj": (q + 2 * kv, width), "mlp.gate_up_proj": (2 * ffn, width)}
    else:
        layer |= {f"self_attn.{x}_proj": (n, width) for x, n in (("q", q), ("k", kv), ("v", kv))}
        layer |= {"mlp.gate_proj": (ffn, width), "mlp.up_proj": (ffn, width)}
    layer |= {"self_attn.o_proj": (width, q), "mlp.down_proj": (width, ffn)}
    if "gemma" in kind.architecture:
        layer |= {f"{x}_feedforward_layernorm": (width,) for x in ("pre", "post")}
    if kind.architecture in ("qwen3", "gemma3"):
        layer |= {f"self_attn.{x}_norm": (size,) for x in "qk"}
    found = {"model.embed_tokens.weight": (N_VOCAB, width), "model.norm.weight": (width,)}
    for i in range(config["num_hidden_layers"]):
        found |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
        if kind.architecture == "qwen2":
            at = f"model.layers.{i}.self_attn."
            found |= {f"{at}{x}_proj.bias": (n,) for x, n in (("q", q), ("k", kv), ("v", kv))}
    return found if kind.tied else {**found, "lm_head.weight": (N_VOCAB, width)}


def write_weights(
    folder: Path, weights: Mapping[str, np.ndarray], dtype: str, shards: int = 1
) -> None:
    """One safetensors file, or several with an index."""
    from safetensors.numpy import save_file

    arrays = {name: stored(array, dtype) for name, array in weights.items()}
    if shards == 1:
        save_file(arrays, folder / "model.safetensors", {"format": "pt"})
        return
    files = {name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors"
             for i, name in enumerate(arrays)}  # fmt: skip
    for file in sorted(set(files.values())):
        part = {name: array for name, array in arrays.items() if files[name] == file}
        save_file(part, folder / file, {"format": "pt"})
    index = {"metadata": {"total_size": 0}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def stored(array: np.ndarray, dtype: str) -> np.ndarray:
    """An array in a type that numpy may lack. 8-bit floats are passed as bytes."""
    import ml_dtypes

    types = {name: getattr(ml_dtypes, name) for name in ("bfloat16", "float8_e4m3fn")}
    if array.dtype == np.uint8:
        return array.view(types[dtype])
    return array.astype(types.get(dtype, dtype))


# Tokenizers

SPECIALS = ("<s>", "</s>", "<|im_end|>")
ADDED = "<tool>"  # user-defined
END = "<|endoftext|>"  # llama.cpp requires it in a Phi-3
TEMPLATE = "{% for m in messages %}{{ m['content'] }}<|im_end|>{% endfor %}"


def write_tokenizer(folder: Path, kind: str, pre: str) -> None:
    """The files of a tokenizer."""
    writers: dict[str, Callable[[], dict[str, bytes]]] = {
        "bpe": lambda: {"tokenizer.json": bpe(pre)},
        "spm": lambda: {"tokenizer.model": spm()},
        "bare spm": lambda: {"tokenizer.model": spm(False)},
        "pieces": lambda: {"tokenizer.json": pieces()},
    }
    for name, content in writers[kind]().items():
        (folder / name).write_bytes(content)
    config = {
        **{"bos_token": "<s>", "eos_token": {"__type": "AddedToken", "content": "</s>"}},
        **{"chat_template": TEMPLATE, "tokenizer_class": "PreTrainedTokenizerFast"},
    }
    if kind.endswith("spm"):
        user = {"content": ADDED, "special": False, "normalized": False}
        end = {"content": END, "special": True, "normalized": False}
        config["tokenizer_class"] = "LlamaTokenizer"
        config["added_tokens_decoder"] = {"500": user, "501": end}
        config |= {"add_bos_token": True, "add_eos_token": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    sampling = {"temperature": 0.6, "top_p": 0.9, "do_sample": True, "eos_token_id": [2]}
    (folder / "generation_config.json").write_text(json.dumps(sampling))


@cache
def spm(prefix: bool = True) -> bytes:
    """A sentencepiece model, trained on the ASCII part of TEXTS; other text becomes byte tokens."""
    from sentencepiece import SentencePieceTrainer

    model = io.BytesIO()
    lines = [line for text in TEXTS for line in text.split("\n")]
    lines = [line for line in lines if line.isascii() and line.isprintable() and line]
    SentencePieceTrainer.train(
        sentence_iterator=iter(lines * 2),
        model_writer=model,
        vocab_size=480,
        model_type="bpe",
        byte_fallback=True,
        character_coverage=1.0,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=prefix,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return model.getvalue()


@cache
def bpe(pre: str) -> bytes:
    """A tokenizer.json of byte-level BPE, trained on TEXTS."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from tokenizers.processors import TemplateProcessing

    from ggpy.convert.pretokenizer import of_row
    from ggpy.tokenizer.pre import lookup

    row = lookup(pre)
    tokenizer = Tokenizer(models.BPE(ignore_merges=row.ignore_merges))
    tokenizer.pre_tokenizer = of_row(row)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=480,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*TEXTS, *TEXTS], trainer)
    tokenizer.add_tokens([ADDED])
    if row.add_bos:
        tokenizer.post_processor = TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 0)]
        )
    return tokenizer.to_str().encode()


@cache
def pieces() -> bytes:
    """The sentencepiece model as a tokenizer.json of transformers: merges instead of scores."""
    from sentencepiece import SentencePieceProcessor
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

    library = SentencePieceProcessor(model_proto=spm())
    texts = [library.id_to_piece(id) for id in range(library.vocab_size())]
    ranks = {text: id for id, text in enumerate(texts) if library.get_score(id) <= 0}
    ranks = {text: id for text, id in ranks.items() if not library.is_byte(id)}
    merges = []
    for text, id in sorted(ranks.items(), key=lambda item: item[1]):
        splits = [(text[:n], text[n:]) for n in range(1, len(text))]
        splits = [(a, b) for a, b in splits if a in ranks and b in ranks]
        merges += sorted(splits, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        assert id >= 0
    vocab = {text: id for id, text in enumerate(texts)}
    model = models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    steps = [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    specials = [AddedToken(text, special=True) for text in ("<unk>", "<s>", "</s>")]
    tokenizer.add_special_tokens(specials)
    return tokenizer.to_str().encode()
