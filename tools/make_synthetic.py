"""`ggpy make_synthetic SPEC FILE`: write a synthetic model as a GGUF file, for another runtime.

    ggpy make_synthetic Llama-3.1-8B:Q4_K 8b-q4_k.gguf

SPEC is what `ggpy bench --synthetic` takes, and the file has the very same blocks, so two runtimes
are measured on the same model. Its tokens are bytes and numbers, and it answers noise.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ggpy.synthetic import Synthetic

RESERVE = 1 << 20  # bytes of a file beside its tensors, about
NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6  # token types
MOSTLY = {  # general.file_type of llama.cpp, by the format of most tensors
    **{"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9},
    **{"Q2_K": 10, "Q3_K": 12, "Q4_K": 15, "Q5_K": 17, "Q6_K": 18, "BF16": 32},
}


def main(argv: list[str] | None = None) -> int:
    """Run the program; its exit status: 0, or 2 for a spec or file that is no good."""
    options = parser().parse_args(argv)
    from ggpy.synthetic import Synthetic  # --help needs no numpy

    try:
        with Synthetic(options.spec, options.seed) as model:
            check_room(options.file, model.nbytes)
            write(model, options.file)
    except (ValueError, OSError) as error:
        print(f"ggpy: error: {error}", file=sys.stderr)
        return 2
    print(f"{options.file}: {options.file.stat().st_size} bytes")
    return 0


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="ggpy make_synthetic",
        description="Write a model of random weights in a known model's shape as a GGUF file.",
    )
    found.add_argument(
        "spec", metavar="SHAPE:TYPE", help="as Llama-3.1-8B:Q4_K or tiny:Q8_0 (models/shapes.json)"
    )
    found.add_argument("file", type=Path, metavar="FILE", help="what to write")
    found.add_argument("--seed", type=int, default=0, help="other seeds give other weights")
    return found


def check_room(path: Path, nbytes: int) -> None:
    """OSError if the disk has less than the file needs."""
    free = shutil.disk_usage(path.resolve().parent).free
    if nbytes + RESERVE > free:
        raise OSError(f"{path}: needs {nbytes / 1e9:.1f} GB, {free / 1e9:.1f} GB are free there")


def write(model: Synthetic, path: Path) -> None:
    """Write the file; its tensors are copied one after the other."""
    import gguf

    writer = gguf.GGUFWriter(path, model.architecture)
    for key, value in {**model.metadata, **tokenizer(model.shape.n_vocab)}.items():
        if key != "general.architecture":  # the writer has it
            _add(writer, key, value)
    writer.add_quantization_version(2)
    if model.format in MOSTLY:
        writer.add_file_type(MOSTLY[model.format])
    for tensor in model.tensors.values():
        kind = gguf.GGMLQuantizationType(tensor.format.type_id)
        data = tensor.data.view("<f4") if len(tensor.shape) == 1 else _viewed(tensor)
        writer.add_tensor(tensor.name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tokenizer(n_vocab: int) -> dict[str, Any]:
    """The least that runtimes accept: three special tokens, all bytes, and numbers to the end."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += [f"\u2581{i}" for i in range(len(tokens), n_vocab)]
    n_numbers = len(tokens) - 259
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(i) for i in range(n_numbers)],
        "tokenizer.ggml.token_type": [UNKNOWN, CONTROL, CONTROL]
        + [BYTE] * 256
        + [NORMAL] * n_numbers,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def _viewed(tensor: Any) -> Any:
    """Blocks as bytes; of float formats as the numbers that the writer expects."""
    plain = {"F32": "<f4", "F16": "<f2"}.get(tensor.format.name)
    return tensor.data.view(plain) if plain else tensor.data


def _add(writer: Any, key: str, value: Any) -> None:
    import gguf

    if isinstance(value, list):
        writer.add_array(key, value)
        return
    kind = {bool: "BOOL", int: "UINT32", float: "FLOAT32", str: "STRING"}[type(value)]
    writer.add_key_value(key, value, gguf.GGUFValueType[kind])


if __name__ == "__main__":
    sys.exit(main())
