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

N_VOCAB, TIE = 512, "tie_word_embeddings"
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
LAYER_NORM = {"layer_norm_eps": 1e-5, "rms_norm_eps": None}
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
    inside: Mapping[str, Any] | None = (
        None  # of a model with images: what config.json says of these
    )


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
    "gemma": Kind(
        *("gemma", "GemmaForCausalLM", "gemma"),
        {"head_dim": 32, "num_key_value_heads": 1, "hidden_activation": "gelu_pytorch_tanh"},
        *("bare spm", ""),
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
    "smollm3": Kind(
        *("smollm3", "SmolLM3ForCausalLM", "smollm3"),
        {"num_hidden_layers": 5, "rope_theta": 5e6, "no_rope_layers": [1, 1, 1, 0, 1]},
        tied=True,
    ),
    "granite": Kind(
        *("granite", "GraniteForCausalLM", "granite"),
        {
            **{"attention_multiplier": 0.2, "embedding_multiplier": 12.0},
            **{"residual_multiplier": 0.22, "logits_scaling": 8.0, "rms_norm_eps": 1e-3},
        },
        tied=True,
    ),
    "olmo2": Kind("olmo2", "Olmo2ForCausalLM", "olmo2", {"rope_theta": 5e5}),
    "olmo3": Kind(
        *("olmo2", "Olmo3ForCausalLM", "olmo3"),
        {
            **{"num_hidden_layers": 5, "sliding_window": 8, "rope_theta": 5e5},
            "rope_scaling": {
                **{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
                **{"attention_factor": 1.1386294361119891, "beta_fast": 32.0, "beta_slow": 1.0},
            },
        },
    ),
    "seed_oss": Kind(
        *("seed_oss", "SeedOssForCausalLM", "seed_oss"),
        {"head_dim": 24, "attention_bias": True, "attention_out_bias": False, "rope_theta": 1e7},
    ),
    "ernie4_5": Kind(
        *("ernie4_5", "Ernie4_5ForCausalLM", "ernie4_5"),
        {"head_dim": 24, "use_bias": False, "rope_theta": 5e5},
        *("spm", ""),
        tied=True,
    ),
    "hunyuan-dense": Kind(
        *("hunyuan-dense", "HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense"),
        {
            **{"head_dim": 24, "max_position_embeddings": 32768, "use_qk_norm": True},
            **{"rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0}},
            "eod_token_id": 2,
        },
        tied=True,
    ),
    "mistral3": Kind(
        *("mistral3", "Ministral3ForCausalLM", "ministral3"),
        {
            "head_dim": 24,
            "rope_parameters": {
                **{"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "mscale": 1.0},
                **{"original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.5},
                **{"beta_fast": 32.0, "beta_slow": 1.0, "mscale_all_dim": 1.0},
            },
        },
    ),
    "exaone4": Kind(
        *("exaone4", "Exaone4ForCausalLM", "exaone4"),
        {
            **{"sliding_window": None, "layer_types": ["full_attention"] * 2},
            **{"rope_scaling": LLAMA3, "rope_theta": 1e6},
        },
        tied=True,
    ),
    "exaone4-window": Kind(
        *("exaone4", "Exaone4ForCausalLM", "exaone4"),
        {
            **{"num_hidden_layers": 5, "sliding_window": 8, "sliding_window_pattern": "LLLG"},
            "layer_types": [f"{x}_attention" for x in (*("sliding",) * 3, "full", "sliding")],
        },
    ),
    "glm4": Kind(
        *("glm4", "Glm4ForCausalLM", "glm4"),
        {"head_dim": 24, "attention_bias": True, "partial_rotary_factor": 0.5},
    ),
    "cohere2": Kind(
        *("cohere2", "Cohere2ForCausalLM", "cohere2"),
        {
            **{"num_hidden_layers": 5, "sliding_window": 8, "sliding_window_pattern": 4},
            **{**LAYER_NORM, "logit_scale": 0.25, "rope_theta": 5e4, "rotary_pct": 1.0},
        },
        tied=True,
    ),
    "command-r": Kind(
        *("command-r", "CohereForCausalLM", "cohere"),
        {**LAYER_NORM, "logit_scale": 0.0625, "rope_theta": 8e6, "use_qk_norm": False},
        tied=True,
    ),
    "command-r-plus": Kind(
        *("command-r", "CohereForCausalLM", "cohere"),
        {**LAYER_NORM, "logit_scale": 0.8, "rope_theta": 75e6, "use_qk_norm": True},
        tied=True,
    ),
    "muse-glimmer": Kind(
        *("muse-glimmer", "MuseGlimmerForConditionalGeneration", "muse_glimmer_text"),
        {
            **{"num_hidden_layers": 5, "head_dim": 24, "sliding_window": 8, "hidden_act": None},
            **{"layer_types": [f"{x}_attention" for x in ("full", *("sliding",) * 3, "full")]},
            **{"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
            **{"layer_rope_theta": [0, 5e5, 5e5, 5e5, 0], "post_norm_eps": 1e-8},
            **{"hidden_activation": "silu", "final_logit_softcapping": 20.0},
            **{"qk_scale_factor": 1.5, "output_multiplier": 0.5},
        },
        inside={
            "model_type": "muse_glimmer",
            "vision_config": {
                **{"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2},
                **{"intermediate_size": 16, "pos_emb_height": 2, "pos_emb_width": 2},
            },
        },
    ),
    "qwen3vl": Kind(
        *("qwen3vl", "Qwen3VLForConditionalGeneration", "qwen3_vl_text"),
        {
            "head_dim": 32,
            "rope_theta": 5e6,
            "rope_scaling": {
                **{"rope_type": "default", "mrope_section": [6, 5, 5], "mrope_interleaved": True}
            },
        },
        pre="qwen2",
        tied=True,
        inside={
            "model_type": "qwen3_vl",
            "vision_config": {
                **{"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16},
                **{"out_hidden_size": 64, "deepstack_visual_indexes": [0]},
            },
        },
    ),
    "qwen2vl": Kind(  # as all released ones, with settings of the text model at the top
        *("qwen2vl", "Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl"),
        {
            **{"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}, "rope_theta": 1e6},
            **{"use_sliding_window": False, "sliding_window": 32768, "max_window_layers": 2},
            **{"image_token_id": 4, "video_token_id": 5, "vision_start_token_id": 6},
            "vision_config": {
                **{"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16},
                **{"out_hidden_size": 64, "fullatt_block_indexes": [0]},
            },
        },
        pre="qwen2",
        tied=True,
    ),
}
NORMS = {  # of layers, by architecture; None are those that most have
    None: ("input", "post_attention"),
    **dict.fromkeys(("olmo2", "exaone4"), ("post_attention", "post_feedforward")),
    **dict.fromkeys(("cohere2", "command-r"), ("input",)),
    "glm4": ("input", "post_self_attn", "post_attention", "post_mlp"),
    "muse-glimmer": ("input", "post_attention", "pre_feedforward", "post_feedforward"),
}
FUSED = {"phi3": ("qkv", "gate_up"), "glm4": ("gate_up",)}
QK_NORMS = {
    **dict.fromkeys(("qwen3", "gemma3", "exaone4", "olmo2", "qwen3vl"), ("q_norm", "k_norm")),
    "hunyuan-dense": ("query_layernorm", "key_layernorm"),
}
BIASES = ("qwen2", "qwen2vl", "seed_oss", "glm4")


def write(folder: Path, name: str, *, tokenizer: bool = True, **changes: Any) -> Path:
    """Write the checkpoint `name`. `changes` replace settings, or remove them (None)."""
    kind = KINDS[name]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(config_json(kind, **changes))
    write_weights(folder, weights_of(name), kind.dtype, kind.shards)
    if tokenizer:
        write_tokenizer(folder, kind.tokenizer, kind.pre)
    return folder


def config_json(kind: Kind, **changes: Any) -> str:
    """The file's text. `changes` replace settings, or remove them (None)."""
    config = {**config_of(kind), **changes}
    if kind.inside is not None:
        text_config = {k: v for k, v in config.items() if k not in ("architectures", TIE)}
        config = {"architectures": [kind.classes], TIE: kind.tied, **kind.inside}
        config["text_config"] = text_config
    return json.dumps({key: value for key, value in config.items() if value is not None})


def config_of(kind: Kind) -> dict[str, Any]:
    found = {**BASE, "architectures": [kind.classes], "model_type": kind.model_type}
    found |= {"hidden_act": "silu"} if "gemma" not in kind.architecture else {}
    return {**found, TIE: kind.tied, "torch_dtype": kind.dtype, **kind.config}


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
        offset = kind.architecture == "muse-glimmer" and "layernorm" in name
        mean = 0.0 if offset or "gemma" in kind.architecture else 1.0
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
    norms, fused = NORMS.get(kind.architecture, NORMS[None]), FUSED.get(kind.architecture, ())
    layer: dict[str, tuple[int, ...]] = {f"{norm}_layernorm": (width,) for norm in norms}
    if "qkv" in fused:
        layer |= {"self_attn.qkv_proj": (q + 2 * kv, width)}
    else:
        layer |= {f"self_attn.{x}_proj": (n, width) for x, n in (("q", q), ("k", kv), ("v", kv))}
    if "gate_up" in fused:
        layer |= {"mlp.gate_up_proj": (2 * ffn, width)}
    else:
        layer |= {"mlp.gate_proj": (ffn, width), "mlp.up_proj": (ffn, width)}
    layer |= {"self_attn.o_proj": (width, q), "mlp.down_proj": (width, ffn)}
    if kind.architecture in ("gemma2", "gemma3"):
        layer |= {f"{x}_feedforward_layernorm": (width,) for x in ("pre", "post")}
    widths = (q, kv) if kind.architecture == "olmo2" else (size, size)
    pairs = zip(QK_NORMS.get(kind.architecture, ()), widths, strict=False)
    layer |= {f"self_attn.{name}": (n,) for name, n in pairs}
    if kind.architecture == "command-r" and config["use_qk_norm"]:
        heads = {"q_norm": n_head, "k_norm": config["num_key_value_heads"]}
        layer |= {f"self_attn.{name}": (n, size) for name, n in heads.items()}
    if kind.architecture == "muse-glimmer":
        layer["self_attn.gate_proj"] = (q, width)
    model = "model." if kind.inside is None else "model.language_model."
    found = {f"{model}embed_tokens.weight": (N_VOCAB, width), f"{model}norm.weight": (width,)}
    for i in range(config["num_hidden_layers"]):
        found |= {f"{model}layers.{i}.{name}.weight": shape for name, shape in layer.items()}
        if kind.architecture in BIASES:
            at = f"{model}layers.{i}.self_attn."
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
