"""The GGUF reader on good files: against the gguf package, whose writer makes them."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from gguf_files import STR, U8, array, key, tensor, text, u32
from gguf_files import gguf as by_hand

from ggpy.formats import Format, all_formats
from ggpy.formats.random_blocks import random_blocks
from ggpy.gguf import File, GGUFError

ROOT_READS_ALL = hasattr(os, "geteuid") and os.geteuid() == 0
SCALAR_TYPES = [t for t in GGUFValueType if t not in (GGUFValueType.STRING, GGUFValueType.ARRAY)]
OUR_NAME = {"FLOAT": "f", "UINT": "u", "INT": "i"}


def our_type(value_type: GGUFValueType) -> str:
    """The package's FLOAT32 is our f32."""
    name = value_type.name
    for theirs, ours in OUR_NAME.items():
        if name.startswith(theirs):
            return ours + name[len(theirs) :]
    return {"BOOL": "bool", "STRING": "str"}[name]


def limits(value_type: GGUFValueType) -> list[Any]:
    """The least and the greatest value of a type, and one between."""
    if value_type is GGUFValueType.BOOL:
        return [False, True, True]
    dtype = np.dtype(GGUFReader.gguf_scalar_to_np[value_type])
    if dtype.kind == "f":
        info = np.finfo(dtype)
        return [float(info.min), float(info.max), float(dtype.type(0.1))]
    return [int(np.iinfo(dtype).min), int(np.iinfo(dtype).max), 7]


def write(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


def save(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("value_type", SCALAR_TYPES, ids=lambda t: t.name)
def test_numbers_of_every_type(value_type: GGUFValueType, path: Path) -> None:
    values = limits(value_type)
    writer = GGUFWriter(path, "test")
    for i, value in enumerate(values):
        writer.add_key_value(f"scalar.{i}", value, value_type)
    writer.add_key_value("array", values, GGUFValueType.ARRAY, sub_type=value_type)
    write(writer)
    with File(path) as file:
        name = our_type(value_type)
        read = [file.metadata[f"scalar.{i}"] for i in range(3)]
        assert read == values
        assert [type(v) for v in read] == [type(v) for v in values]
        assert file.types["scalar.0"] == name
        assert file.types["array"] == f"arr[{name}]"
        assert file.metadata["array"].dtype == GGUFReader.gguf_scalar_to_np[value_type]
        assert file.metadata["array"].tolist() == values


def test_strings(path: Path) -> None:
    words = ["", "a", "naïve", "😀" * 30, "x" * 255, "y" * 256, "é" * 2000, "a\nb\0c", "last"]
    writer = GGUFWriter(path, "test")
    writer.add_string("text", "".join(words))
    writer.add_array("words", words * 700)
    write(writer)
    with File(path) as file:
        assert file.metadata["text"] == "".join(words)
        assert file.metadata["words"] == words * 700
        assert file.types == {
            "general.architecture": "str",
            "text": "str",
            "words": "arr[str]",
        }


def test_nan_and_infinity_are_values_like_others(path: Path) -> None:
    writer = GGUFWriter(path, "test")
    writer.add_float32("nan", math.nan)
    writer.add_float64("inf", -math.inf)
    write(writer)
    with File(path) as file:
        assert math.isnan(file.metadata["nan"])
        assert file.metadata["inf"] == -math.inf


@pytest.mark.parametrize("type_id", [STR, *range(8), 10, 11, 12])
def test_empty_array(type_id: int, path: Path) -> None:
    with File(save(path, by_hand([array("none", type_id, 0, b"")]))) as file:
        assert len(file.metadata["none"]) == 0


def random_file(path: Path, rng: np.random.Generator) -> None:
    """Some keys and tensors of random kinds and sizes."""
    writer = GGUFWriter(path, "test")
    if rng.random() < 0.5:
        writer.add_custom_alignment(int(2 ** rng.integers(3, 9)))
    for i in range(rng.integers(20)):
        value_type = SCALAR_TYPES[rng.integers(len(SCALAR_TYPES))]
        values = [limits(value_type)[j] for j in rng.integers(3, size=rng.integers(1, 9))]
        if rng.random() < 0.5:
            writer.add_key_value(f"k{i}", values[0], value_type)
        else:
            writer.add_key_value(f"k{i}", values, GGUFValueType.ARRAY, sub_type=value_type)
    # The package takes a Q8_1 block for 40 bytes; ggml's has 36.
    sizes = gguf.GGML_QUANT_SIZES
    formats = [f for f in all_formats() if sizes.get(f.type_id) == (f.block_size, f.nbytes)]
    for i in range(rng.integers(8)):
        format = formats[rng.integers(len(formats))]
        outer = rng.integers(1, 5, size=rng.integers(4)).tolist()
        row_bytes = format.nbytes * int(rng.integers(1, 4))
        data = rng.integers(256, size=(*outer, row_bytes), dtype=np.uint8)
        writer.add_tensor(f"t{i}", data, raw_dtype=GGMLQuantizationType(format.type_id))
    write(writer)


@pytest.mark.parametrize("seed", range(12))
def test_random_files_read_as_the_gguf_package_reads_them(seed: int, path: Path) -> None:
    random_file(path, np.random.default_rng(seed))
    oracle = GGUFReader(path)
    with File(path) as file:
        fields = {k: v for k, v in oracle.fields.items() if not k.startswith("GGUF.")}
        assert list(file.metadata) == list(fields)
        for name, field in fields.items():
            value = file.metadata[name]
            assert (value.tolist() if isinstance(value, np.ndarray) else value) == field.contents()
        assert list(file.tensors) == [t.name for t in oracle.tensors]
        for theirs in oracle.tensors:
            ours = file.tensors[theirs.name]
            assert ours.shape == tuple(reversed(theirs.shape.tolist()))
            assert ours.format.type_id == theirs.tensor_type
            assert ours.nbytes == theirs.n_bytes
            assert ours.offset == theirs.data_offset
            assert ours.data.tobytes() == theirs.data.tobytes()
        assert file.nbytes == path.stat().st_size


IN_FILES = [format for format in all_formats() if not format.is_private]


@pytest.mark.parametrize("format", IN_FILES, ids=lambda f: f.name)
def test_tensor_of_every_format(format: Format, path: Path) -> None:
    blocks = random_blocks(format, 6, np.random.default_rng(3))
    description = tensor("w", (2 * format.block_size, 3), format.type_id)
    with File(save(path, by_hand([], [description], blocks.tobytes()))) as file:
        w = file.tensors["w"]
        assert (w.name, w.shape, w.format) == ("w", (3, 2 * format.block_size), format)
        assert w.data.shape == (3, 2 * format.nbytes)
        assert w.nbytes == 6 * format.nbytes
        assert w.dequantize().dtype == np.float32
        expected = format.dequantize(blocks.view(np.uint8).reshape(3, -1))
        np.testing.assert_array_equal(w.dequantize(), expected)
        w.check_scales()


def test_data_is_a_read_only_view_of_the_file(path: Path) -> None:
    data = bytes(range(64))
    with File(save(path, by_hand([], [tensor("w", (16,))], data))) as file:
        w = file.tensors["w"]
        assert path.read_bytes()[w.offset : w.offset + w.nbytes] == data
        assert not w.data.flags.owndata
        with pytest.raises(ValueError, match="read-only"):
            w.data[0] = 1


def test_views_outlive_the_file(path: Path) -> None:
    file = File(save(path, by_hand([], [tensor("w", (16,))], bytes(range(64)))))
    data = file.tensors["w"].data
    file.close()
    assert file.tensors == {}
    assert data.tolist() == list(range(64))


def test_shape_is_in_numpys_order(path: Path) -> None:
    writer = GGUFWriter(path, "test")
    weights = np.arange(2 * 3 * 5 * 4, dtype=np.float32).reshape(2, 3, 5, 4)
    writer.add_tensor("w", weights)
    write(writer)
    with File(path) as file:
        assert file.tensors["w"].shape == (2, 3, 5, 4)
        np.testing.assert_array_equal(file.tensors["w"].dequantize(), weights)


def test_version_2(path: Path) -> None:
    writer = GGUFWriter(path, "test")
    writer.add_array("words", ["a", "b"])
    writer.add_tensor("w", np.arange(8, dtype=np.float32))
    write(writer)
    data = path.read_bytes()
    assert data[4:8] == u32(3)
    with File(save(path, data[:4] + u32(2) + data[8:])) as file:
        assert file.version == 2
        assert file.metadata == {"general.architecture": "test", "words": ["a", "b"]}
        assert file.tensors["w"].dequantize().tolist() == list(range(8))


@pytest.mark.parametrize("alignment", [1, 8, 64, 4096])
def test_alignment(alignment: int, path: Path) -> None:
    writer = GGUFWriter(path, "test")
    writer.add_custom_alignment(alignment)
    for i in range(3):
        writer.add_tensor(f"w{i}", np.full(5, i, np.int16))
    write(writer)
    with File(path) as file:
        for i, w in enumerate(file.tensors.values()):
            assert w.offset % alignment == 0
            assert w.dequantize().tolist() == [i] * 5


def test_tensors_in_any_order_with_gaps_and_nothing_in_them(path: Path) -> None:
    tensors = [tensor("b", (8,), offset=128), tensor("none", (8, 0), offset=64), tensor("a", (8,))]
    with File(save(path, by_hand([], tensors, bytes(160)))) as file:
        assert list(file.tensors) == ["b", "none", "a"]
        none = file.tensors["none"]
        assert none.dequantize().shape == none.shape == (0, 8)
        none.check_scales()


def test_vocabulary_without_tensors(path: Path) -> None:
    with File(save(path, by_hand([array("words", STR, 1, text("a"))]))) as file:
        assert file.tensors == {}


# Files that are not there, or not files.


def fifo(path: Path) -> None:
    if not hasattr(os, "mkfifo"):
        pytest.skip("this system has no named pipes")
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda path: None, "there is no such file: check the path"),
        (lambda path: path.mkdir(), "is a directory: name one of the .gguf files in it"),
        (lambda path: path.touch(), r"is empty \(0 bytes\)"),
        (fifo, "is a pipe or a device"),
    ],
    ids=["missing", "directory", "empty", "pipe"],
)
def test_no_file(make: Callable[[Path], None], expected: str, path: Path) -> None:
    make(path)
    with pytest.raises(GGUFError, match=expected) as caught:
        File(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert isinstance(caught.value, FileNotFoundError) == (not path.exists())


@pytest.mark.parametrize("name", ["a\0b", "x" * 5000, "file/below"])
def test_impossible_path(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(GGUFError, match="cannot be read"):
        File(tmp_path / name)


@pytest.mark.skipif(ROOT_READS_ALL, reason="root may read everything")
def test_file_without_permission(path: Path) -> None:
    path.write_bytes(by_hand())
    path.chmod(0)
    with pytest.raises(GGUFError, match="permission denied"):
        File(path)


def test_permission_refused_by_the_system(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    path.write_bytes(by_hand())
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(GGUFError, match="permission denied"):
        File(path)


def test_architecture(path: Path) -> None:
    with File(save(path, by_hand([key("general.architecture", STR, text("llama"))]))) as file:
        assert file.architecture == "llama"


@pytest.mark.parametrize(
    "keys",
    [
        [],
        [key("general.architecture", U8, b"\1")],
        [key("general.architecture", STR, text(""))],
    ],
)
def test_no_architecture(keys: list[bytes], path: Path) -> None:
    with (
        File(save(path, by_hand(keys))) as file,
        pytest.raises(GGUFError, match=r"general\.architecture: is missing"),
    ):
        _ = file.architecture


def test_max_metadata(path: Path) -> None:
    save(path, by_hand([array("words", STR, 1000, text("a") * 1000)]))
    assert len(File(path).metadata["words"]) == 1000
    with pytest.raises(GGUFError, match="the limit is 10000: raise max_metadata"):
        File(path, max_metadata=10_000)
