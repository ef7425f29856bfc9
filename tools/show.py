"""`ggpy show MODEL`: print metadata and tensors of a GGUF file, and whether it can be run.

Opens the file as the runtime does, so what is printed here has passed all of its checks of files.
Whether the model and its tokenizer are such that the runtime knows is said in a line, with what is
missing if not.
Nothing of the tensors' data is read.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from ggpy.cli.parser import MODEL, Parser
from ggpy.util.outcome import ended

if TYPE_CHECKING:
    from ggpy.gguf import File, Tensor

WIDTH = 72  # characters of a value in the table
MB = 1e6


def main(argv: list[str] | None = None) -> int:
    """Run the program; its exit status: 0, or 2 for a file that cannot be read."""
    options = parser().parse_args(argv)
    return ended(lambda: show(options.model, options.json), program="ggpy show")


def show(model: str, in_json: bool) -> int:
    """Print a file, or a known model's; HubError, GGUFError, OSError."""
    from ggpy import hub
    from ggpy.gguf import File  # --help needs no numpy

    with File(hub.resolve(model)) as file:
        for line in as_json(file) if in_json else as_text(file):
            print(line)
    return 0


def parser() -> Parser:
    found = Parser("show", "Print metadata and tensors of a GGUF file, and whether it can be run.")
    found.add_argument("model", metavar="MODEL", help=f"{MODEL}; of a split file the first part")
    found.add_argument("--json", action="store_true", help="everything, arrays in full, as JSON")
    return found


# Text.


def as_text(file: File) -> Iterator[str]:
    """The lines of the tables."""
    yield printable(file.path.name)
    yield summary(file)
    yield f"can be run: {why_not(file) or 'yes'}"
    yield ""
    yield from table(
        [
            (printable(key), file.types[key], shown(value, WIDTH))
            for key, value in file.metadata.items()
        ],
        "<<<",
    )
    if file.tensors:
        yield "\nTensors; the last number of a shape is the length of a row, the place in bytes"
        yield from table([tensor_row(t) for t in file.tensors.values()], "<<<>>")
        yield "\nTypes"
        yield from table(type_rows(list(file.tensors.values())), "<>>>")


def summary(file: File) -> str:
    """Sizes in a line."""
    tensors = file.tensors.values()
    weights = sum(math.prod(t.shape) for t in tensors)
    facts = [f"GGUF version {file.version}", f"{file.nbytes / MB:.1f} MB"]
    facts += [f"{len(file.metadata)} keys", f"{len(tensors)} tensors"]
    if weights:
        bits = 8 * sum(t.nbytes for t in tensors) / weights
        facts += [f"{weights / 1e6:.1f} million weights", f"{bits:.2f} bits a weight"]
    return ", ".join(facts)


def why_not(file: File) -> str:
    """What is in the way of running the model; empty if nothing is."""
    from ggpy import arch
    from ggpy.gguf import GGUFError
    from ggpy.tokenizer import Tokenizer

    try:
        arch.check(file)
        Tokenizer.from_gguf(file)
    except GGUFError as error:
        return "no, " + str(error).removeprefix(f"{file.path}: ")
    return ""


def tensor_row(tensor: Tensor) -> tuple[str, ...]:
    """Name, type, shape, size, place."""
    shape = " x ".join(map(str, tensor.shape))
    size = f"{tensor.nbytes / MB:.3f} MB"
    return printable(tensor.name), tensor.format.name, shape, size, str(tensor.offset)


def type_rows(tensors: Sequence[Tensor]) -> list[tuple[str, ...]]:
    """Name, number of tensors, size and share of each type, largest first."""
    sizes: dict[str, list[int]] = {}
    for tensor in tensors:
        sizes.setdefault(tensor.format.name, []).append(tensor.nbytes)
    total = max(1, sum(map(sum, sizes.values())))
    ordered = sorted(sizes.items(), key=lambda item: -sum(item[1]))
    return [
        (name, f"{len(n)} tensors", f"{sum(n) / MB:.1f} MB", f"{sum(n) / total:.1%}")
        for name, n in ordered
    ]


def table(rows: Sequence[tuple[str, ...]], alignment: str) -> Iterator[str]:
    """Lines with columns as wide as they need; `alignment` is < or > for each."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (f"{c:{a}{w}}" for c, a, w in zip(row, alignment, widths, strict=True))
        yield "  ".join(cells).rstrip()


def shown(value: Any, width: int) -> str:
    """A value in about `width` characters: strings quoted, of arrays the length and the first."""
    if isinstance(value, str):
        return shortened(repr(value[: width + 1]), width)
    if not hasattr(value, "__len__"):
        return number(value)
    first = value[:width].tolist() if hasattr(value, "tolist") else value[:width]
    items = ", ".join(shown(item, width) for item in islice(first, width))
    return f"{len(value)}: {shortened(items, width)}"


def number(value: float) -> str:
    """Integers and bools in full, floats to the digits that f32 has."""
    return f"{value:.7g}" if isinstance(value, float) else str(value)


def shortened(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."


def printable(name: str) -> str:
    """A name from the file: not too long for a table, and nothing that a terminal obeys."""
    return shortened(name if name.isprintable() else repr(name[:WIDTH]), WIDTH)


# JSON.


def as_json(file: File) -> Iterator[str]:
    """The one line of JSON."""
    metadata = {
        key: {"type": file.types[key], "value": plain(value)}
        for key, value in file.metadata.items()
    }
    tensors = [
        {
            "name": tensor.name,
            "type": tensor.format.name,
            "shape": tensor.shape,
            "nbytes": tensor.nbytes,
            "file": tensor.path,
            "offset": tensor.offset,
        }
        for tensor in file.tensors.values()
    ]
    found = {"file": str(file.path), "version": file.version, "nbytes": file.nbytes}
    found["why_not_run"] = why_not(file).removeprefix("no, ") or None
    yield json.dumps({**found, "metadata": metadata, "tensors": tensors}, allow_nan=False)


def plain(value: Any) -> Any:
    """A value that JSON has: arrays as lists, NaN and infinity as strings."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


if __name__ == "__main__":
    sys.exit(main())
