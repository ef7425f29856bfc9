"""What config.json says about weights that are quantised already: quantization_config, checked.

It tells how the integers of a checkpoint are to be read, and which type their input is rounded to.
A setting that would change the weights and is not supported is refused by name and value. Opens no
tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..backends.interface import ActivationType
from ..util.messages import shown
from .folder import ConvertError, Folder

METHODS = ("fp8", "fbgemm_fp8", "gptq", "awq", "compressed-tensors", "mxfp4")
OWN_FILES = {"gptq": "quantize_config.json", "awq": "quant_config.json"}
CT_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "dense")
# Activations of 8 bits by the `type` of input_activations
BYTES: dict[str, ActivationType] = {"int": "int8", "float": "e4m3"}


@dataclass(frozen=True)
class Quantization:
    """How a checkpoint is quantised; by default it is not."""

    method: str = ""  # of METHODS
    block: tuple[int, int] | None = None  # rows and columns with one scale, of 8-bit floats
    group_size: int | None = None  # columns with one scale; -1: all; None: the scales say it
    zero_offset: int = 0  # to be added to the stored zero points of GPTQ
    activations: ActivationType = "f16"
    warnings: tuple[str, ...] = ()


def read_quantization(folder: Folder, given: Any) -> Quantization:
    """Checks `given`, the quantization_config of a folder's config.json; None: reads the file that
    older tools wrote instead, if there is one. ConvertError for what is not supported.
    """
    path, key = folder.path / "config.json", "quantization_config"
    where = _Where(f"{path}: {key}.")
    if given is None:
        for kind, name in OWN_FILES.items():
            if (found := folder.json(name)) is not None:
                given, where = {"quant_method": kind, **found}, _Where(f"{folder.path / name}: ")
    if given is None:
        return Quantization()
    if not isinstance(given, dict):
        raise ConvertError(f"{path}: {key} = {shown(given)}: expected an object")
    method = given.get("quant_method")
    if method not in (None, *METHODS):
        known = ", ".join(METHODS)
        raise ConvertError(
            f"{path}: weights quantised with {shown(method)} cannot be converted ({known} can):"
            " take the original"
        )
    if method == "gptq":
        return _gptq(given, where)
    if method == "awq":
        return _awq(given, where)
    if method == "compressed-tensors":
        return _compressed_tensors(given, where)
    dynamic = method == "fbgemm_fp8" or given.get("activation_scheme") == "dynamic"
    block = _block(given.get("weight_block_size"), where)
    return Quantization(
        method or "", block, activations="e4m3" if method and dynamic and not block else "f16"
    )


@dataclass(frozen=True)
class _Where:
    """Checks settings; messages begin with `at`: the file, and the keys above the checked one."""

    at: str

    def only(self, given: Mapping[str, Any], key: str, *accepted: object) -> None:
        """ConvertError if `key` has a value that is not `accepted`; null counts as no value."""
        value = given.get(key)
        if value is not None and not any(type(value) is type(x) and value == x for x in accepted):
            only = " or ".join(repr(x) for x in accepted) if accepted else "nothing"
            raise ConvertError(f"{self.at}{key} = {shown(value)} is not supported (only {only} is)")

    def below(self, key: str) -> _Where:
        return _Where(f"{self.at}{key}.")

    def object(self, given: Mapping[str, Any], key: str) -> dict[str, Any]:
        """The object below a key; {} where there is none."""
        value = given.get(key)
        if value is not None and not isinstance(value, dict):
            raise ConvertError(f"{self.at}{key} = {shown(value)}: expected an object")
        return value or {}

    def size(self, given: Mapping[str, Any], key: str) -> int | None:
        """A positive number or -1; None without the key."""
        value = given.get(key)
        if value is not None and (type(value) is not int or (value < 1 and value != -1)):
            raise ConvertError(
                f"{self.at}{key} = {shown(value)}: expected columns of a group, or -1"
            )
        return value


def _block(block: Any, where: _Where) -> tuple[int, int] | None:
    at = f"{where.at}weight_block_size = {shown(block)}"
    if block is None:
        return None
    if not isinstance(block, list) or len(block) != 2 or not all(type(x) is int for x in block):
        raise ConvertError(f"{at}: expected rows and columns")
    if min(block) < 1:
        raise ConvertError(f"{at}: expected positive numbers")
    return block[0], block[1]


def _gptq(given: Mapping[str, Any], where: _Where) -> Quantization:
    """AutoGPTQ and GPTQModel; unless the format is gptq_v2, zero points are stored less one."""
    where.only(given, "bits", 4)
    where.only(given, "checkpoint_format", "gptq", "gptq_v2")
    where.only(given, "dynamic", {})  # other bits for some modules
    offset = 0 if given.get("checkpoint_format") == "gptq_v2" else 1
    return Quantization("gptq", None, where.size(given, "group_size"), offset)


def _awq(given: Mapping[str, Any], where: _Where) -> Quantization:
    """AutoAWQ's layout "gemm"; other layouts pack codes in another order."""
    for key in ("bits", "w_bit"):
        where.only(given, key, 4)
    where.only(given, "version", "gemm", "GEMM")
    where.only(given, "zero_point", True)
    key = "group_size" if "group_size" in given else "q_group_size"
    return Quantization("awq", None, where.size(given, key))


def _compressed_tensors(given: Mapping[str, Any], where: _Where) -> Quantization:
    """The format of llm-compressor: groups of modules, each with settings of weights and inputs."""
    where.only(given, "format", *CT_FORMATS)
    where.only(given, "transform_config", {})  # weights that are rotated
    sparsity = where.object(given, "sparsity_config")
    where.below("sparsity_config").only(sparsity, "format", "dense")
    groups = where.object(given, "config_groups")
    sizes, blocks, kinds = set(), set(), set()
    warnings: list[str] = []
    for name in groups:
        group, at = where.object(groups, name), where.below(name)
        at.only(group, "format", *CT_FORMATS)
        weights, below = at.object(group, "weights"), at.below("weights")
        below.only(weights, "type", "int", "float")
        below.only(weights, "num_bits", 4, 8)
        below.only(weights, "strategy", "group", "channel", "tensor", "block")
        sizes.add(below.size(weights, "group_size"))
        blocks.add(_block(weights.get("block_structure"), below))
        kinds.add(_activations(at.object(group, "input_activations"), warnings))
    if len(kinds) > 1:
        warnings.append("modules have activations of several kinds: all of them become f16 here")
    activations: ActivationType = kinds.pop() if len(kinds) == 1 else "f16"
    return Quantization(
        "compressed-tensors",
        _single(blocks),
        _single(sizes),
        activations=activations,
        warnings=tuple(warnings),
    )


def _activations(given: Mapping[str, Any], warnings: list[str]) -> ActivationType:
    """The type that the input of a group's modules is rounded to. May add a warning."""
    if not given:
        return "f16"
    kind = BYTES.get(str(given.get("type", "int")))
    usual = given.get("num_bits") == 8 and given.get("symmetric", True) is True
    if kind and usual and given.get("dynamic") is True:
        return kind
    what = "static" if given.get("dynamic") is not True else "of this kind"
    warnings.append(f"activations that are {what} are not quantised here: they are f16")
    return "f16"


def _single(values: Iterable[Any]) -> Any:
    """The value, if there is exactly one distinct value; else None."""
    found = set(values)
    return found.pop() if len(found) == 1 else None
