"""Models that exist only in memory: the shape of a known model, filled with random valid blocks.

`Synthetic` stands in for an open `gguf.File`, so it is checked and loaded like any other; its
tensors are those that the architecture declares. The values of weights affect speed only by the
power that toggling bits takes, and random blocks take as much as quantised normal numbers (LOG.md).
So each format has one pool of random blocks, which is repeated, and every tensor is a view of it: a
model of any size takes the memory of the largest tensor of each format, and of its embedding table.
The values of that table are larger than what a layer adds to them, and biases are 0: so tokens
differ in all layers, and choose experts evenly. Nothing here knows what the model is for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import isqrt, prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..arch import architectures
from ..arch.architecture import Context
from ..arch.config import Config, Dimensions
from ..arch.scheme import scale_of, settings_for
from ..formats import Format, all_formats, by_name
from ..formats.random_blocks import random_blocks
from ..formats.rows import stored_as
from ..gguf import Tensor
from ..quantization.mix import BY_ROW, MIXED, Mix, activations_of, base_of, file_type, in_order
from ..util.paths import data_dir

# Random weights of a format, about. The number of blocks is prime: rows differ then, although the
# blocks repeat. Of equal rows of an output matrix the first one is chosen, so tokens would, too.
POOL = 1 << 22
SMALLER = {"Q6_K": "Q8_0", "Q5_K": "Q5_1", "Q4_K": "Q5_0"}  # for rows that are no multiple of 256
SMALLEST = "Q4_0"  # replaces all other formats of 256 weights for such rows
OUTPUT_OF_ROWS = "Q8_0"  # output and embedding table of types with a scale for each row
TABLE = "token_embd.weight"
# Root mean square of embeddings. What attention adds is the same for all tokens, or nearly, and of
# size 1: beside an x of 8 it grows by 1 % a layer, beside a smaller one tokens become alike. With a
# larger table, logits of a tied model would all reach its soft cap.
EMBEDDING_RMS = 8.0
VALUES = 100.0  # root mean square of 8-bit numbers that have a scale for each row
EXPERT_MIX, OUTPUT_OF_EXPERT_MIX = "MXFP4_MOE", "Q8_0"  # as in files of gpt-oss
OF_SEVERAL = (*MIXED, EXPERT_MIX)  # types whose matrices have several formats
TAPS = "ssm_conv1d.weight"  # always floats
OUTPUT_OF_K = "Q6_K"  # of models in Q2_K to Q5_K, as in most files


@dataclass(frozen=True)
class ModelShape:
    """The dimensions of a known model: an entry of models/shapes.json."""

    name: str
    architecture: str
    n_vocab: int
    tied: bool  # the embedding table is the output matrix
    settings: Mapping[str, Any]  # metadata, by keys without the prefix `<architecture>.`


@cache
def shapes() -> dict[str, ModelShape]:
    """All shapes by name."""
    entries = json.loads((data_dir("models") / "shapes.json").read_text(encoding="utf-8"))
    return {name: ModelShape(name=name, **entry) for name, entry in entries.items()}


def dimensions(shape: ModelShape) -> Dimensions:
    """The sizes of a model of this shape."""
    return _context(shape).sizes


def _context(shape: ModelShape) -> Context:
    """What its architecture reads settings from, without tensors."""
    config = Config(_metadata(shape), shape.architecture)
    sizes = architectures()[shape.architecture].dimensions(config, shape.n_vocab)
    return Context(config, sizes, {}, 1)


def parse(spec: str) -> tuple[ModelShape, str, str]:
    """(shape, type, format of the output) of "SHAPE:TYPE" or "SHAPE:TYPE/OUTPUT"; ValueError.

    The type is a format, one of OF_SEVERAL, or one of `mix.BY_ROW`, whose matrices have a scale for
    each row.
    """
    name, colon, types = spec.rpartition(":")
    known = {s.name.lower(): s for s in shapes().values()}
    if not colon or name.lower() not in known:
        raise ValueError(
            f"unknown synthetic model {spec!r}: give SHAPE:TYPE, with SHAPE one of "
            + ", ".join(shapes())
        )
    first, _, output = types.partition("/")
    if first.upper() in BY_ROW:
        format, usual = first.upper(), OUTPUT_OF_ROWS
    elif first.upper() in OF_SEVERAL:
        format = first.upper()
        usual = OUTPUT_OF_EXPERT_MIX if format == EXPERT_MIX else OUTPUT_OF_K
    else:
        format = usual = _format(first).name
        usual = OUTPUT_OF_K if format in ("Q2_K", "Q3_K", "Q4_K", "Q5_K") else format
    return known[name.lower()], format, _format(output).name if output else usual


def _format(name: str) -> Format:
    scaled = [f for f in all_formats() if f.scales(np.zeros(1, f.dtype)).shape[1]]  # no integers
    known = {f.name.lower(): f for f in scaled if not f.is_private}
    if name.lower() not in known:
        there = ", ".join([*(f.name for f in known.values()), *OF_SEVERAL, *BY_ROW])
        raise ValueError(f"unknown type {name!r}: there are {there}")
    return known[name.lower()]


class Repeated(Tensor):
    """A tensor whose blocks are a pool's, repeated, and valid like these."""

    def check_scales(self) -> None:
        """Does nothing: the scales of the pool are finite."""


class Synthetic:
    """A model of a shape in a format; use it where an open `gguf.File` is expected.

    The same spec and seed are the same model. empty: all its matrices are 0, which takes no memory
    and no time, and is enough for plans. ValueError for a spec that is not known.
    """

    def __init__(self, spec: str, seed: int = 0, *, empty: bool = False) -> None:
        self.shape, self.format, self.output_format = parse(spec)
        self.path = Path(f"{self.shape.name}:{spec.rpartition(':')[2]}")
        self.version = 3
        self.rows = base_of(self.format) if self.format in BY_ROW else None  # with a scale each
        self.metadata = {**_metadata(self.shape), **_scheme(self)}
        self.tensors = _tensors(self, seed, empty)
        self.nbytes = sum(t.nbytes for t in self.tensors.values())

    @property
    def architecture(self) -> str:
        """general.architecture."""
        return self.shape.architecture

    def close(self) -> None:
        """Releases the tensors."""
        self.tensors = {}

    def __enter__(self) -> Synthetic:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _metadata(shape: ModelShape) -> dict[str, Any]:
    """Metadata without a tokenizer, because benchmarks make their own ids."""
    settings = {
        f"{shape.architecture}.{key}": np.array(value) if isinstance(value, list) else value
        for key, value in shape.settings.items()
    }
    return {
        "general.architecture": shape.architecture,
        "general.name": f"{shape.name} (synthetic)",
        f"{shape.architecture}.vocab_size": shape.n_vocab,
        **settings,
    }


def _scheme(model: Synthetic) -> dict[str, Any]:
    """Metadata of a mix, or of a type with a scale for each row."""
    if model.format in OF_SEVERAL:
        return {"general.file_type": file_type(model.format)}
    if model.rows is None:
        return {}
    settings = settings_for([model.rows], activations_of(model.format))
    return {key: value for key, (_, value) in settings.items()}


def _tensors(model: Synthetic, seed: int, empty: bool) -> dict[str, Tensor]:
    """The tensors that the architecture declares, in its order."""
    shape = model.shape
    architecture, context = architectures()[shape.architecture], _context(shape)
    sizes = context.sizes
    shapes, _ = architecture.stored(sizes, shape.tied)
    formats = _formats(model, sizes, shapes)
    rms = sizes.n_embd**-0.5  # products of a normalised x keep its magnitude: no overflow in f16
    table_rms = EMBEDDING_RMS / architecture.read(context).embedding_scale
    kinds = {  # the pool of each matrix, by format and RMS
        name: (format.name, table_rms if name == TABLE else rms)
        for name, format in formats.items()
        if len(shapes[name]) > 1
    }
    largest: dict[tuple[str, float], int] = {}
    for name, kind in kinds.items():
        largest[kind] = max(largest.get(kind, 0), _nbytes(formats[name], shapes[name]))
    made = _EmptyPool if empty else _Pool
    pools = {
        (f, rms): made(by_name(f), n, rms, seed, model.rows) for (f, rms), n in largest.items()
    }
    found = {}
    for name, size in shapes.items():
        pool = pools[kinds[name]] if name in kinds else None
        found[name] = pool.tensor(name, size) if pool else _constant(name, size, _value(name))
        if pool and pool.row_scale:
            found[scale_of(name)] = _constant(scale_of(name), size[:1], pool.row_scale)
    return found


def _value(name: str) -> float:
    """The value of all elements of a vector: 1 for norms, -1 where a state decays by it, 0 for
    biases, which would make tokens alike.
    """
    if name.endswith(".bias"):
        return 0.0
    return -1.0 if name.endswith("ssm_a") else 1.0


def _constant(name: str, shape: tuple[int, ...], value: float) -> Tensor:
    """A vector of one value."""
    data = np.full(shape, value, np.float32).view(np.uint8)
    return Tensor(name, shape, by_name("F32"), data)


def _formats(
    model: Synthetic, sizes: Dimensions, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Format]:
    """The format of each tensor."""
    if model.format not in OF_SEVERAL:
        return {name: _format_of(model, name, shape) for name, shape in shapes.items()}
    counts = sizes.n_layer, sizes.layers[0].n_head, sizes.layers[0].n_head_kv
    output = by_name(model.output_format)
    n_expert = max(layer.n_expert for layer in sizes.layers)
    tied = model.shape.tied
    mix = Mix(model.format, model.architecture, *counts, tied, n_expert, output_type=output)
    vectors = by_name("F32")
    return {name: mix.choose(name, shapes[name]) or vectors for name in in_order(shapes)}


def _format_of(model: Synthetic, name: str, shape: tuple[int, ...]) -> Format:
    """F32 for vectors, routers, biases and taps; a format of smaller blocks if rows are no whole
    number of the format's blocks.
    """
    if len(shape) == 1 or name.endswith((".bias", "ffn_gate_inp.weight", TAPS)):
        return by_name("F32")
    is_output = name == (TABLE if model.shape.tied else "output.weight")
    is_table = is_output or name == TABLE
    rows = model.rows if len(shape) == 2 and not is_table else None
    if rows is not None and shape[1] % rows.block_size == 0:
        return rows
    usual = OUTPUT_OF_ROWS if model.rows is not None else model.format
    format = by_name(model.output_format if is_output else usual)
    if shape[-1] % format.block_size:
        format = by_name(SMALLER.get(format.name, SMALLEST))
    return format if shape[-1] % format.block_size == 0 else by_name("F16")


def _nbytes(format: Format, shape: tuple[int, ...]) -> int:
    return prod(shape[:-1]) * format.row_bytes(shape[-1])


def _prime(most: int) -> int:
    """The largest prime number up to `most`."""
    return next(n for n in range(most, 1, -1) if all(n % i for i in range(2, isqrt(n) + 1)))


class _Pool:
    """Random blocks of one format, repeated so that the largest tensor fits from any block on."""

    def __init__(
        self, format: Format, nbytes: int, rms: float, seed: int, rows: Format | None = None
    ) -> None:
        """rows: the format whose values have a scale for each row, `row_scale`."""
        self.format = format
        self.row_scale = 0.0  # none
        self._n_blocks = min(_prime(POOL // format.block_size), -(-nbytes // format.nbytes))
        self._start = 0
        times = 1 + -(-nbytes // (self._n_blocks * format.nbytes))
        self._bytes = self._values(rms, seed, times, format is rows)
        self._bytes.flags.writeable = False

    def _values(self, rms: float, seed: int, times: int, by_row: bool) -> NDArray[np.uint8]:
        """The bytes of all blocks, so many times. by_row: without their scale, `row_scale`."""
        n, rng = self._n_blocks, np.random.default_rng(seed)
        blocks = np.ascontiguousarray(random_blocks(self.format, n, rng, rms))
        if by_row:
            blocks = np.ascontiguousarray(random_blocks(self.format, n, rng, VALUES))
            if self.format.block_size > 1:
                self.format.set_scales(blocks, np.ones((n, 1), np.float32))
            values = self.format.dequantize(blocks.view(np.uint8))
            self.row_scale = rms / float(np.sqrt(np.mean(np.square(values))))
        return np.tile(blocks.view(np.uint8).reshape(-1), times)

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The next tensor, which begins at another block than the one before."""
        begin = self._start * self.format.nbytes
        self._start = (self._start + 7919) % self._n_blocks  # a prime, so that few starts repeat
        data = self._bytes[begin : begin + _nbytes(self.format, shape)]
        rows = data.reshape(*shape[:-1], -1)
        return Repeated(name, shape, stored_as(self.format), rows, "synthetic", begin)


class _EmptyPool(_Pool):
    """A pool of zeros, which the operating system gives when they are read."""

    def _values(self, rms: float, seed: int, times: int, by_row: bool) -> NDArray[np.uint8]:
        self.row_scale = float(by_row)
        return np.zeros(times * self._n_blocks * self.format.nbytes, np.uint8)
