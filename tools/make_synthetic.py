"""`ggpy make_synthetic SPEC FILE` (for developers): write a model of random weights.

    ggpy make_synthetic Llama-3.1-8B:Q4_K 8b-q4_k.gguf

SPEC is what `ggpy bench --synthetic` takes, and the file has the very same blocks, so two runtimes
are measured on the same model. Its tokens are bytes and numbers, and it answers noise.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from errno import EEXIST
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ggpy.cli.parser import Parser
from ggpy.util.outcome import ended
from ggpy.util.output_file import is_stream

if TYPE_CHECKING:
    from ggpy.evaluate.synthetic import Synthetic

PIECE = 1 << 24  # bytes that are written at a time
NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6  # token types


def main(argv: list[str] | None = None) -> int:
    """Run the program; its exit status: 0, or 2 for a spec or file that is no good."""
    options = parser().parse_args(argv)
    program = "ggpy make_synthetic"
    return ended(
        lambda: make(options.spec, options.seed, options.file, options.force), program=program
    )


def make(spec: str, seed: int, path: Path, force: bool) -> int:
    """Write the file; ValueError for a bad spec, FileExistsError unless `force`."""
    from ggpy.evaluate.synthetic import Synthetic  # --help needs no numpy

    if path.exists() and not force and not is_stream(path):
        raise FileExistsError(EEXIST, "exists already: --force overwrites it", str(path))
    with Synthetic(spec, seed) as model:
        write(model, path)
    print(f"{path}: {path.stat().st_size} bytes")
    return 0


def parser() -> Parser:
    found = Parser("make_synthetic", "Write a model of random weights.")
    found.add_argument(
        "spec", metavar="SHAPE:TYPE", help="as Llama-3.1-8B:Q4_K or tiny:Q8_0 (models/shapes.json)"
    )
    found.add_argument("file", type=Path, metavar="FILE", help="what to write")
    found.add_argument("--seed", type=int, default=0, help="of the weights (0)", metavar="N")
    found.add_argument("--force", action="store_true", help="overwrite FILE if it exists")
    return found


def write(model: Synthetic, path: Path) -> None:
    """Write the file; ValueError, OSError."""
    from ggpy.gguf.writer import Slot, Writer

    tensors = model.tensors.values()
    slots = [Slot(tensor.name, tensor.shape, tensor.format) for tensor in tensors]
    with Writer(path, metadata(model), slots) as out:
        for tensor in tensors:
            data = tensor.data.reshape(-1)
            for start in range(0, len(data), PIECE):
                out.write(data[start : start + PIECE])


def metadata(model: Synthetic) -> dict[str, tuple[str, Any]]:
    """The model's settings, a tokenizer's, and what readers expect to find about its format."""
    import numpy as np

    from ggpy.quantization.mix import file_type

    values = {**model.metadata, **tokenizer(model.shape.n_vocab)}
    values["general.quantization_version"] = 2
    with suppress(ValueError):  # llama.cpp has no number for files of this format
        values["general.file_type"] = file_type(model.format)
    lists = {key: x.tolist() for key, x in values.items() if isinstance(x, np.ndarray)}
    values.update(lists)
    return {key: (type_of(value), value) for key, value in values.items() if value is not None}


def type_of(value: Any) -> str:
    """The type that a value has in the file."""
    if isinstance(value, list):
        kind = type_of(value[0])
        return f"arr[{'i32' if kind == 'u32' else kind}]"
    return {bool: "bool", int: "u32", float: "f32", str: "str"}[type(value)]


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


if __name__ == "__main__":
    sys.exit(main())
