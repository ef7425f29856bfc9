"""Which tensor of a model gets which block format: the mixes of llama-quantize, Q4_K_M and so on.

A mix gives more bits to the tensors whose errors cost the most quality (V and ffn_down of some
layers, the output matrix). The choices are llama.cpp's, so that files have the same types as its
own. Knows formats and the names of tensors, but no file and no weights.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import prod

from ..formats import Format, all_formats, by_name
from ..gguf.names import layer_of
from ..util.messages import escaped, shown
from .names import ALIASES, TABLE

Shape = Sequence[int]  # numpy's order: the last axis is a row

# Mixes with a scale for each row, and the type that they round activations to: see
# backends.interface.Ops.weight.
_ACTIVATIONS = {"W8A16": "f16", "W8A8": "int8", "W4A16": "f16"}
_ACTIVATIONS |= {"W8A16_FP8": "f16", "W8A8_FP8": "e4m3"}
MIXES = tuple(name for name in TABLE if name not in _ACTIVATIONS)  # of quant blocks
BY_ROW = tuple(_ACTIVATIONS)
MIXED = tuple(name for name in MIXES if name.endswith(("_S", "_M", "_L")) and name != "IQ3_S")

# Replaces a format if a row is no whole number of its blocks; if the replacement does not fit
# either, F16 does.
_SMALLER = {
    **{"IQ3_S": "IQ4_NL", "IQ4_XS": "IQ4_NL", "Q2_K": "Q4_0", "Q3_K": "Q4_0", "TQ1_0": "Q4_0"},
    **{"TQ2_0": "Q4_0", "NVFP4": "Q4_0", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"},
}

# The first of these parts that a tensor's name contains is its kind. "values" and "keys" are the V
# and K projections; a tensor that holds V with others (QKV) counts as values.
_KINDS = (
    *(("attn_qkv.weight", "values"), ("attn_kv_b.weight", "values"), ("attn_v.weight", "values")),
    *(("attn_k.weight", "keys"), ("attn_output.weight", "attn_output")),
    *(("ffn_up", "other"), ("ffn_gate", "other"), ("ffn_down", "ffn_down")),
)

# Small or sensitive matrices, which stay as they are.
_NEVER = (
    *("_norm.weight", "ffn_gate_inp.weight", "ffn_gate_tid2eid.weight", "altup", "laurel"),
    *("per_layer_model_proj", "ssm_conv1d", "shortconv.conv.weight", "attn_rel_b.weight"),
    *("indexer.k_proj.weight", "indexer.q_proj.weight"),
    *(f"time_mix_{x}.weight" for x in ("first", "decay_w1", "decay_w2", "lerp_fused", "w0")),
    *(f"time_mix_{x}{i}.weight" for x in "wvag" for i in (1, 2)),
    *("time_mix_v0.weight", "time_mix_a0.weight"),
    *(".position_embd", "sam.pos_embd", "sam.neck.", "sam.net_", ".rel_pos", ".patch_embd"),
    *(".patch_merger", "a.rvq.codebook", "mm.a.code_embd"),
)
_NEVER_CALLED = ("position_embd.weight", "token_types.weight")
_TOKEN_EMBD = ("token_embd.weight", "per_layer_token_embd.weight")
_OUTPUT = "output.weight"

# Large models in which many query heads share each KV head: (architecture, layers).
_LLAMA_70B = ("llama", 80)
_LIKE_70B = (("qwen2", 80), ("deci", 80), ("olmo", 80), ("jais2", 68))

# Mixes in which attn_output of models with eight experts is Q5_K.
_OUTPUT_IN_Q5_K = {"Q2_K", "Q3_K_S", "Q3_K_M", "Q4_K_S", "Q4_K_M"}
_OUTPUT_IN_Q5_K |= {"IQ3_S", "IQ3_M", "IQ4_NL", "IQ4_XS"}


def find_mix(name: str) -> str:
    """The mix called `name` in any case, or with this llama_ftype; ValueError lists all mixes."""
    wanted = name.upper()
    if wanted.isdigit():
        numbers = {str(number): mix for mix, (number, _) in reversed(TABLE.items())}
        wanted = numbers.get(wanted, wanted)
    wanted = ALIASES.get(wanted, wanted)
    if wanted not in TABLE:
        is_read = wanted in (format.name.upper() for format in all_formats())
        problem = "cannot quantise to" if is_read else "unknown type"
        raise ValueError(f"{problem} {shown(name)}: there are {', '.join((*TABLE, *ALIASES))}")
    return wanted


def file_type(name: str) -> int | None:
    """general.file_type of a mix; None if llama.cpp has no number for it."""
    return TABLE[find_mix(name)][0]


def base_of(name: str) -> Format:
    """The format of most tensors of a mix."""
    return by_name(TABLE[find_mix(name)][1])


def activations_of(name: str) -> str:
    """The type that the input of a mix's matrices is rounded to: "f16", "int8" or "e4m3"."""
    return _ACTIVATIONS.get(find_mix(name), "f16")


def find_type(name: str) -> Format:
    """The format called `name` in any case; ValueError unless weights can be quantised to it."""
    format = by_name(name)
    if format.is_private:
        raise ValueError(f"{format.name} is no type of files: its bytes are stored as I8")
    if format.quantize_blocks is None:
        format.quantize([0.0])  # type: ignore[arg-type]  # its error lists possible formats
    return format


def tensor_type(text: str) -> tuple[str, Format]:
    """(pattern, format) of "attn_q=q8_0", one of `Mix.tensor_types`; ValueError."""
    pattern, equals, name = text.rpartition("=")
    if not pattern or not equals or not name:
        raise ValueError(f"--tensor-type {text}: say REGEX=TYPE, for example ffn_down=q6_k")
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"--tensor-type {text}: {pattern!r} is no expression: {error}") from None
    return pattern, find_type(name)


def in_order(names: Iterable[str]) -> list[str]:
    """Names in the order in which llama.cpp chooses and writes tensors: by layer, then by name."""

    def place(name: str) -> tuple[int, bytes]:
        layer = layer_of(name)
        return (-1 if layer is None else layer), name.encode()

    return sorted(names, key=place)


def is_values(name: str) -> bool:
    """Whether a tensor counts among Mix.n_values."""
    return _kind(name) == "values"


def _kind(name: str) -> str:
    if name == _OUTPUT:
        return "output"
    if name in _TOKEN_EMBD:
        return "token_embd"
    return next((kind for part, kind in _KINDS if part in name), "other")


def more_bits(i: int, n: int) -> bool:
    """Whether layer i of n gets more bits: the first and last eighth, and every third between."""
    return i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2


@dataclass
class Mix:
    """Chooses the format of each tensor of a model: call `choose` once for each, in `in_order`.

    `choose` counts calls for tensors of a kind, so another order gives other types. output_type,
    token_embd_type and the formats in tensor_types override the mix.
    """

    name: str  # any name that `find_mix` knows
    architecture: str
    n_layer: int
    n_head: int
    n_head_kv: int
    tied: bool  # there is no output.weight: the embedding table is the output matrix, too
    n_expert: int = 0
    n_values: int | None = None  # tensors that satisfy `is_values`; None: one for each layer
    pure: bool = False  # no mix: one format for all
    leave_output: bool = False  # output.weight stays as it is
    output_type: Format | None = None  # of output.weight, or of the table where it is tied
    token_embd_type: Format | None = None  # of the embedding table
    tensor_types: Sequence[tuple[str, Format]] = ()  # the first pattern found in a name counts
    has_imatrix: bool = False
    remarks: list[str] = field(default_factory=list)  # formats that differ from the mix, and why
    n_fallback: int = 0  # tensors whose rows are no whole number of blocks of the wanted format

    def __post_init__(self) -> None:
        self.name = find_mix(self.name)
        self.file_type = file_type(self.name)
        self.base = base_of(self.name)
        self.activations = activations_of(self.name)
        self._seen = {"values": 0, "ffn_down": 0}
        self._patterns = [(re.compile(pattern), format) for pattern, format in self.tensor_types]
        self._rules: dict[str, Callable[[str, Shape], str | None]] = {
            "values": self._values,
            "keys": self._keys,
            "attn_output": self._attn_output,
            "ffn_down": self._ffn_down,
            "token_embd": self._token_embd,
            "output": self._output,
        }

    def choose(self, name: str, shape: Shape) -> Format | None:
        """The format of a tensor; None: it keeps its own, as vectors and small matrices do."""
        if not self.quantizes(name, shape):
            return None
        kind = _kind(name)
        by_pattern = next((f for p, f in self._patterns if p.search(name)), None)
        named = by_pattern is not None and name == "per_layer_token_embd.weight"
        if self.token_embd_type is not None and kind == "token_embd" and not named:
            return self._fitting(name, self.token_embd_type, shape[-1])
        if self.output_type is not None and kind == "output":
            return self._fitting(name, self.output_type, shape[-1])
        if by_pattern is not None:
            if by_pattern is not self.base:
                self.remarks.append(_override(name, self.base, by_pattern))
            return self._fitting(name, by_pattern, shape[-1])
        if self.by_row:
            wide = kind in ("output", "token_embd") and not self.pure
            in_blocks = len(shape) > 2 and self.base.block_size == 1  # experts have no such scales
            found = by_name("Q8_0") if wide or in_blocks else self.base
            return self._fitting(name, found, shape[-1])
        if self.base.block_size == 1:
            return self.base
        found = self.base if self.pure else self._mixed(kind, name, shape)
        return self._fitting(name, found, shape[-1])

    def is_named(self, name: str) -> bool:
        """Whether an argument that overrides the mix names this tensor."""
        kind = _kind(name)
        if kind in ("output", "token_embd"):
            given = self.output_type if kind == "output" else self.token_embd_type
            if given is not None:
                return True
        return any(pattern.search(name) for pattern, _ in self._patterns)

    def unused(self, names: Sequence[str]) -> list[str]:
        """The patterns of tensor_types that none of these names has."""
        patterns = (pattern for pattern, _ in self._patterns)
        return [p.pattern for p in patterns if not any(map(p.search, names))]

    @property
    def by_row(self) -> bool:
        """Whether tensors of the format `base` have a scale for each row."""
        return self.name in _ACTIVATIONS

    def quantizes(self, name: str, shape: Shape) -> bool:
        """Whether this tensor may be quantised at all."""
        is_matrix = prod(shape[:-1]) > 1
        fixed = name in _NEVER_CALLED or any(part in name for part in _NEVER)
        left = self.leave_output and name == _OUTPUT
        return is_matrix and name.endswith("weight") and not fixed and not left

    def needs_imatrix(self, name: str, format: Format) -> bool:
        """Whether this tensor in this format is useless without an importance matrix."""
        return (
            self.name == "Q2_K_S"
            and format.name == "Q2_K"
            and _kind(name) != "output"
            and name not in _TOKEN_EMBD
        )

    def _fitting(self, name: str, wanted: Format, columns: int) -> Format:
        """`wanted`, or its replacement if a row of `columns` is no whole number of its blocks."""
        if columns % wanted.block_size == 0:
            return wanted
        found = by_name(_SMALLER.get(wanted.name, wanted.name))
        if columns % found.block_size:
            found = by_name("F16")
        self.n_fallback += 1
        self.remarks.append(_fallback(name, columns, wanted, found))
        return found

    # The mix. Each rule returns the name of a format, or None for `base`.

    def _mixed(self, kind: str, name: str, shape: Shape) -> Format:
        if kind == "token_embd" and self.tied:
            kind = "output"
        if self.name == "MXFP4_MOE":
            is_expert = kind != "output" and len(shape) > 2 and shape[-3] > 1
            return by_name("MXFP4" if is_expert else "Q8_0")
        rule = self._rules.get(kind)
        found = rule(name, shape) if rule else None
        return by_name(found) if found else self.base

    def _output(self, name: str, shape: Shape) -> str | None:
        if self.output_type is not None:
            return self.output_type.name
        if self.architecture == "falcon" or shape[-1] % self.base.block_size:
            return "Q8_0"
        return None if self.base.name == "Q8_0" else "Q6_K"

    def _token_embd(self, name: str, shape: Shape) -> str | None:
        return "Q4_K" if self.name in ("TQ1_0", "TQ2_0") else None

    def _values(self, name: str, shape: Shape) -> str | None:
        i, n = self._count("values"), self.n_layer if self.n_values is None else self.n_values
        if self.n_expert == 8:
            return "Q8_0"
        shared = self.n_head_kv > 0 and self.n_head // self.n_head_kv >= 4
        found = {
            "Q2_K": "Q4_K" if shared else "Q3_K",
            "Q2_K_S": "Q4_K" if shared else None,
            "IQ3_S": "Q4_K" if shared else None,
            "IQ3_M": "Q4_K",
            "Q3_K_M": "Q5_K" if i < 2 else "Q4_K",
            "Q3_K_L": "Q5_K",
            "IQ4_NL": "Q5_K" if shared else None,
            "IQ4_XS": "Q5_K" if shared else None,
            "Q4_K_S": "Q5_K" if i < 4 else None,
            "Q4_K_M": "Q6_K" if more_bits(i, n) else None,
            "Q5_K_M": "Q6_K" if more_bits(i, n) else None,
        }.get(self.name)
        little = (found or self.base.name) in ("Q3_K", "Q4_K")
        return "Q5_K" if little and self._is_70b() else found

    def _is_70b(self) -> bool:
        """Whether it is a 70B model: its V matrices are small, so more bits cost little."""
        size = self.architecture, self.n_layer
        return size in _LIKE_70B or (size == _LLAMA_70B and self.n_head != self.n_head_kv)

    def _keys(self, name: str, shape: Shape) -> str | None:
        return "Q8_0" if self.n_expert == 8 else None

    def _attn_output(self, name: str, shape: Shape) -> str | None:
        if self.architecture == "falcon":
            return "Q4_K" if self.name == "Q3_K_L" else None
        if self.n_expert == 8:
            return "Q5_K" if self.name in _OUTPUT_IN_Q5_K else None
        types = {"Q2_K": "Q3_K", "Q3_K_M": "Q4_K", "Q3_K_L": "Q5_K", "IQ3_M": "Q4_K"}
        return types.get(self.name)

    def _ffn_down(self, name: str, shape: Shape) -> str | None:
        i, n = self._count("ffn_down"), self.n_layer
        if self.n_expert > 1:  # a layer may have several ffn_down
            i = self._layer(name)
        first, more = i < n // 8, more_bits(i, n)
        found = {
            "Q2_K": "Q3_K",
            "Q2_K_S": "Q4_K" if first else None,
            "Q3_K_M": "Q5_K" if i < n // 16 else "Q4_K",
            "Q3_K_L": "Q5_K",
            "IQ3_M": "Q4_K" if first or (more and self.n_expert == 8) else None,
            "Q4_K_S": "Q5_K" if first else None,
            "Q4_K_M": "Q6_K" if more else None,
            "Q5_K_M": "Q6_K" if more else None,
            "IQ4_NL": "Q5_K" if first and not self.has_imatrix else None,
            "IQ4_XS": "Q5_K" if first and not self.has_imatrix else None,
            "Q4_0": "Q4_1" if first and self.has_imatrix else None,
            "Q5_0": "Q5_1" if first and self.has_imatrix else None,
        }
        of_falcon = {
            "Q3_K_M": "Q5_K" if i < n // 16 else "Q4_K" if more else None,
            "Q3_K_L": "Q4_K",
            "Q4_K_S": None,
            "Q4_K_M": "Q6_K" if i < n // 16 else "Q5_K" if more else None,
        }
        return (found | of_falcon if self.architecture == "falcon" else found).get(self.name)

    def _layer(self, name: str) -> int:
        layer = layer_of(name)
        if layer is None or layer >= self.n_layer:
            raise ValueError(f"tensor {name!r}: a model of {self.n_layer} layers has none for it")
        return layer

    def _count(self, kind: str) -> int:
        """How many tensors of this kind came before this call."""
        self._seen[kind] += 1
        return self._seen[kind] - 1


def _override(name: str, base: Format, chosen: Format) -> str:
    name = escaped(name)
    return f"{name:36} - applying manual override: {base.name.lower()} -> {chosen.name.lower()}"


def _fallback(name: str, columns: int, wanted: Format, found: Format) -> str:
    name = escaped(name)
    return (
        f"{name:36} - ncols {columns:6} not divisible by {wanted.block_size:3} (required for type "
        f"{wanted.name.lower():>7}) -> falling back to {found.name.lower():>7}"
    )
