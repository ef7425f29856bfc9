"""Writes golden_ids.json: what llama.cpp makes of the texts in `small_vocab`, for every name of a
pre-tokenizer.

Run from the checkout with xllamacpp installed: `python tests/tokenizer/make_golden_ids.py`. It
calls llama.cpp's C functions inside that package, as llama.h declares them.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import gguf

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "support"), str(HERE.parent.parent)]

import small_vocab  # noqa: E402

from ggpy.tokenizer.pre import BY_NAME  # noqa: E402


class ModelParams(ctypes.Structure):
    """struct llama_model_params, with room for fields that later versions append."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("devices", "overrides")),
        *((name, ctypes.c_int32) for name in ("layers", "split", "load", "lazy", "main_gpu")),
        *((name, ctypes.c_void_p) for name in ("tensor_split", "progress", "data", "kv")),
        ("vocab_only", ctypes.c_bool),
        ("rest", ctypes.c_char * 63),
    )


def library() -> ctypes.CDLL:
    """llama.cpp, with the functions used here declared."""
    spec = importlib.util.find_spec("xllamacpp")
    if spec is None or spec.origin is None:
        raise SystemExit("this needs the package xllamacpp")
    lib = ctypes.CDLL(str(next(Path(spec.origin).parent.glob("xllamacpp*.so"))))
    lib.llama_model_default_params.restype = ModelParams
    lib.llama_model_load_from_file.argtypes = [ctypes.c_char_p, ModelParams]
    lib.llama_model_load_from_file.restype = ctypes.c_void_p
    lib.llama_model_get_vocab.argtypes = [ctypes.c_void_p]
    lib.llama_model_get_vocab.restype = ctypes.c_void_p
    lib.llama_model_free.argtypes = [ctypes.c_void_p]
    flags = [ctypes.c_bool, ctypes.c_bool]
    sized = [ctypes.c_void_p, ctypes.c_int32]
    lib.llama_tokenize.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int32, *sized, *flags]
    return lib


def write_gguf(path: Path, metadata: dict[str, Any]) -> None:
    """A GGUF file of this metadata and no tensors."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value if isinstance(value, list) else value.tolist())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def encode_all(lib: ctypes.CDLL, metadata: dict[str, Any], texts: Any, parse: bool) -> list[str]:
    """llama.cpp's ids of each text, as "1 2 3", special tokens added."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "vocab.gguf"
        write_gguf(path, metadata)
        params = lib.llama_model_default_params()
        params.vocab_only = True
        model = lib.llama_model_load_from_file(str(path).encode(), params)
        if not model:
            raise SystemExit(f"llama.cpp refuses {metadata.get('tokenizer.ggml.pre')}")
        vocab = lib.llama_model_get_vocab(model)
        answers = [encode(lib, vocab, text.encode(), parse) for text in texts]
        lib.llama_model_free(model)
    return answers


def encode(lib: ctypes.CDLL, vocab: int, text: bytes, parse: bool) -> str:
    room = (ctypes.c_int32 * (2 * len(text) + 16))()
    count = lib.llama_tokenize(vocab, text, len(text), room, len(room), True, parse)
    return " ".join(map(str, room[:count]))


def main() -> None:
    """Write the file: ids are pooled, since most names agree on most texts."""
    lib = library()
    pool: dict[str, int] = {}
    golden: dict[str, Any] = {"byte_level": {}, "special": {}}

    def pooled(metadata: dict[str, Any], texts: Any, parse: bool) -> list[int]:
        ids = encode_all(lib, metadata, texts, parse)
        return [pool.setdefault(line, len(pool)) for line in ids]

    for name in sorted(name for name, row in BY_NAME.items() if not row.raw):
        golden["byte_level"][name] = pooled(small_vocab.byte_level(name), small_vocab.TEXTS, False)
    others = {
        "gemma4": small_vocab.gemma4(),
        "sentencepiece": small_vocab.sentencepiece(True),
        "sentencepiece_bare": small_vocab.sentencepiece(False),
    }
    for name, metadata in others.items():
        golden[name] = pooled(metadata, small_vocab.TEXTS, False)
    for name, metadata in {"byte_level": small_vocab.byte_level("gpt-2"), **others}.items():
        golden["special"][name] = pooled(metadata, small_vocab.SPECIAL_TEXTS, True)
    golden["pool"] = list(pool)
    text = json.dumps(golden, separators=(",", ":")).replace('],"', '],\n"')
    (HERE / "golden_ids.json").write_text(text.replace('","', '",\n"') + "\n")


if __name__ == "__main__":
    main()
