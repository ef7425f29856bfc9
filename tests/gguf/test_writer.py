"""Writing GGUF files: bytes equal to those of the gguf package, round trips, and no half file."""

from __future__ import annotations

import errno
from pathlib import Path

import gguf
import numpy as np
import pytest

from ggpy.formats import by_name
from ggpy.gguf import File, writer
from ggpy.gguf.writer import Slot, Writer, header

F32, Q8_0 = by_name("F32"), by_name("Q8_0")

METADATA = {
    "general.architecture": ("str", "llama"),
    "a.u8": ("u8", 255),
    "a.i8": ("i8", -128),
    "a.u16": ("u16", 65535),
    "a.i16": ("i16", -32768),
    "a.u32": ("u32", 2**32 - 1),
    "a.i32": ("i32", -(2**31)),
    "a.u64": ("u64", 2**64 - 1),
    "a.i64": ("i64", -(2**63)),
    "a.f32": ("f32", 0.1),
    "a.f64": ("f64", 0.1),
    "a.bool": ("bool", True),
    "a.text": ("str", "naïve ☃"),
    "a.words": ("arr[str]", ["", "ä", "x" * 300]),
    "a.numbers": ("arr[i32]", [1, -2, 3]),
    "a.scores": ("arr[f32]", np.array([0.5, -np.inf], np.float32)),
    "a.flags": ("arr[bool]", [True, False]),
    "a.none": ("arr[str]", []),
}


def tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "matrix": rng.standard_normal((3, 64)).astype("<f4"),
        "odd": np.arange(5, dtype="<f4"),
        "cube": rng.standard_normal((2, 3, 32)).astype("<f4"),
    }


def write(path: Path, metadata=METADATA, piece: int = 1 << 20) -> Path:
    arrays = tensors()
    slots = [Slot(name, array.shape, F32) for name, array in arrays.items()]
    with Writer(path, metadata, slots) as out:
        for array in arrays.values():
            raw = array.tobytes()
            for start in range(0, len(raw), piece):
                out.write(raw[start : start + piece])
    return path


def test_bytes_are_those_of_the_gguf_package(tmp_path: Path) -> None:
    metadata = {key: value for key, value in METADATA.items() if key != "a.none"}
    ours = write(tmp_path / "ours.gguf", metadata)
    theirs = gguf.GGUFWriter(tmp_path / "theirs.gguf", "llama")
    kinds = {"u": "UINT", "i": "INT", "f": "FLOAT"}
    for key, (kind, value) in metadata.items():
        if key == "general.architecture":
            continue
        element = kind.removeprefix("arr[").removesuffix("]")
        name = {"str": "STRING", "bool": "BOOL"}.get(element) or kinds[element[0]] + element[1:]
        type_, is_array = gguf.GGUFValueType[name], element != kind
        values = value.tolist() if isinstance(value, np.ndarray) else value
        array = (key, values, gguf.GGUFValueType.ARRAY, type_)
        theirs.add_key_value(*(array if is_array else (key, value, type_)))
    for name, tensor in tensors().items():
        theirs.add_tensor(name, tensor)
    theirs.write_header_to_file()
    theirs.write_kv_data_to_file()
    theirs.write_tensors_to_file()
    theirs.close()
    assert ours.read_bytes() == (tmp_path / "theirs.gguf").read_bytes()


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    path = write(tmp_path / "out.gguf", piece=7)
    with File(path) as file:
        assert file.types == {key: kind for key, (kind, _) in METADATA.items()}
        for key, (kind, value) in METADATA.items():
            expected = np.float32(value) if kind == "f32" else value
            assert np.array_equal(file.metadata[key], expected), key
        for name, array in tensors().items():
            assert file.tensors[name].shape == array.shape
            assert np.array_equal(file.tensors[name].dequantize(), array)
    assert [p.name for p in tmp_path.iterdir()] == ["out.gguf"]


def test_alignment_and_leading_ones(tmp_path: Path) -> None:
    """ggml has no leading dimensions of 1, and a file says how its tensors are aligned."""
    slots = [Slot("a", (1, 32), Q8_0), Slot("b", (1, 1, 32), Q8_0), Slot("c", (2, 0), F32)]
    metadata = {"general.alignment": ("u32", 64)}
    with Writer(tmp_path / "out.gguf", metadata, slots) as out:
        out.write(bytes(34))
        out.write(np.zeros((1, 34), np.uint8))
    with File(tmp_path / "out.gguf") as file:
        assert [t.shape for t in file.tensors.values()] == [(32,), (32,), (2, 0)]
        assert file.tensors["b"].offset - file.tensors["a"].offset == 64
    assert (tmp_path / "out.gguf").stat().st_size % 64 == 0


def test_nothing_is_left_of_what_was_not_finished(tmp_path: Path) -> None:
    path, slots = tmp_path / "out.gguf", [Slot("a", (2, 32), Q8_0), Slot("b", (32,), Q8_0)]
    path.write_bytes(b"before")
    with (
        pytest.raises(ValueError, match=r"out\.gguf: tensor b is missing"),
        Writer(path, {}, slots) as out,
    ):
        assert len(list(tmp_path.glob("out.gguf.*.part"))) == 1
        out.write(bytes(68))
    with pytest.raises(RuntimeError, match="in between"), Writer(path, {}, slots) as out:
        out.write(bytes(68))
        raise RuntimeError("in between")
    with (
        pytest.raises(ValueError, match="69 bytes are more than the tensor has"),
        Writer(path, {}, slots) as out,
    ):
        out.write(bytes(69))
    assert path.read_bytes() == b"before"
    assert [p.name for p in tmp_path.iterdir()] == ["out.gguf"]


def test_a_full_disk_is_seen_before_and_while_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = [Slot("a", (1 << 20, 1 << 20), F32)]
    with pytest.raises(OSError, match=r"out\.gguf: needs 4398\.05 GB, .* GB are free there"):
        Writer(tmp_path / "out.gguf", {}, slots)
    monkeypatch.setattr(writer, "check_room", lambda path, nbytes: None)
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("this system has no device that is always full")
    with pytest.raises(OSError) as error, Writer(tmp_path / "out.gguf", {}, slots) as out:
        out._file.stream.close()
        out._file.stream = full.open("wb")
        for _ in range(100):
            out.write(bytes(1 << 20))
    assert error.value.errno == errno.ENOSPC
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["", "x" * 64, "ä" * 32, "a\0b", "\0"])
def test_names_that_ggml_does_not_have(name: str) -> None:
    with pytest.raises(ValueError, match="cannot name a tensor"):
        header({}, [Slot(name, (32,), Q8_0)])


def test_names_are_different() -> None:
    with pytest.raises(ValueError, match="'a' cannot name a tensor: names are different"):
        header({}, [Slot("a", (32,), Q8_0)] * 2)


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        ("u8", 256, "k: 256 is no u8"),
        ("u32", -1, "k: -1 is no u32"),
        ("i32", 1.5, r"k: 1\.5 is no i32"),
        ("arr[u8]", [1, 300], "k: holds numbers that are no u8"),
        ("arr[i32]", [0.5], "k: holds numbers that are no i32"),
        ("i128", 1, "k: GGUF has no values of type 'i128'"),
    ],
)
def test_values_that_gguf_does_not_have(kind: str, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        header({"k": (kind, value)}, [])


def test_broken_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="Q8_0 rows are multiples of 32 weights, not 33"):
        header({}, [Slot("a", (2, 33), Q8_0)])
