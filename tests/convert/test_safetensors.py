"""The reader of safetensors files, against the format's own library and against damage."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import stored

from ggpy.convert.checkpoint import Checkpoint
from ggpy.convert.folder import ConvertError, Folder
from ggpy.convert.safetensors import DTYPES, Shard
from ggpy.convert.weights import FLOAT8, float8_table


def blob(header: Any, data: bytes = b"") -> bytes:
    """A file with this header; bytes are taken as they are."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data


def place(start: int, stop: int, shape: list[int], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


GOOD = {"a": place(0, 16, [2, 2]), "b": place(16, 24, [2]), "__metadata__": {"format": "pt"}}


def test_what_the_library_writes_is_read(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    rng = np.random.default_rng(0)
    arrays = {
        "matrix": rng.standard_normal((5, 7)).astype(np.float32),
        "half": rng.standard_normal((3, 2, 2)).astype(np.float16),
        "ids": rng.integers(0, 99, 4),
        "empty": np.zeros((0, 3), np.float32),
        "scalar": np.array(2.5),
        "bf16": stored(rng.standard_normal((4, 4)).astype(np.float32), "bfloat16"),
    }
    save_file(arrays, tmp_path / "x.safetensors", {"format": "pt"})
    with Shard(tmp_path / "x.safetensors") as shard:
        assert {name: place.shape for name, place in shard.tensors.items()} == {
            name: array.shape for name, array in arrays.items()
        }
        for name, array in arrays.items():
            assert shard.read(name).tobytes() == array.tobytes()
        assert np.array_equal(shard.read("matrix", 2, 4), arrays["matrix"][2:4])


@pytest.mark.parametrize("dtype", FLOAT8)
def test_8_bit_floats_are_those_of_ml_dtypes(dtype: str) -> None:
    import ml_dtypes

    theirs = {"F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2}[dtype]
    wanted = np.arange(256, dtype=np.uint8).view(theirs).astype(np.float32)
    assert np.array_equal(float8_table(dtype), wanted, equal_nan=True)


def test_a_good_file_by_hand(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(blob(GOOD, np.arange(6, dtype="<f4").tobytes()))
    with Shard(tmp_path / "x") as shard:
        assert shard.read("b").tolist() == [4, 5]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "a header of 0 bytes cannot be in a file of 0"),
        (b"\x08\0\0", "cannot be in a file of 3"),
        (struct.pack("<Q", 2**63) + b"{}", "cannot be in a file of 10"),
        (struct.pack("<Q", 9) + b"{}", "a header of 9 bytes cannot be in a file of 10"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        (blob(b"[]"), "is list, not an object"),
        (blob(b"{]"), "is not the JSON it should be"),
        (blob(b"\xff\xfe"), "is not the JSON it should be"),
        (blob(b"[" * 100000), "nested too deeply"),
        (blob(b'{"a": 1, "a": 2}'), "'a' is there twice"),
        (blob({"a": 3}), "tensor 'a' is of type None"),
        (blob({"a": place(0, 4, [1], "F4")}, bytes(4)), "of type 'F4'; known are F64"),
        (blob({"a": place(0, 4, [-1])}, bytes(4)), r"has the shape \[-1\]"),
        (blob({"a": place(0, 4, [1.0])}, bytes(4)), r"has the shape \[1.0\]"),  # type: ignore[list-item]
        (blob({"a": place(0, 4, [1] * 9)}, bytes(4)), "has the shape"),
        (blob({"a": place(0, 4, [2**59, 2**59])}, bytes(4)), "has the shape"),
        (blob({"a": place(0, 4, [2])}, bytes(4)), r"has 8 bytes by its shape \[2\]"),
        (blob({"a": place(4, 0, [1])}, bytes(4)), "has 4 bytes by its shape"),
        (blob({"a": {**place(0, 4, [1]), "data_offsets": [0]}}, bytes(4)), r"the place \[0\]"),
        (blob(GOOD, bytes(23)), "end at byte 1.., the file has 1..; the file is damaged"),
        (blob(GOOD, bytes(25)), "end at byte 1.., the file has 1.."),
        (blob({"a": place(0, 8, [2]), "b": place(4, 12, [2])}, bytes(12)), "'b' overlaps with"),
        (blob({"a": place(4, 8, [1])}, bytes(8)), "'a' leaves a gap before it"),
        (blob({"a": place(2**40, 2**40 + 4, [1])}, bytes(4)), "'a' leaves a gap"),
    ],
)  # fmt: skip
def test_damaged_files_are_refused(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(ConvertError, match=message) as raised:
        Shard(path)
    assert str(path) in str(raised.value) and "\n" not in str(raised.value)


def test_whatever_a_header_says_ends_in_tensors_or_in_a_line(tmp_path: Path) -> None:
    whole = blob(GOOD, bytes(24))
    rng = np.random.default_rng(0)
    for _ in range(500):
        content = bytearray(
            whole[: rng.integers(1, len(whole) + 1) if rng.random() < 0.2 else None]
        )
        for at in rng.integers(0, len(content), 2):
            content[at] = rng.integers(256)
        (tmp_path / "x").write_bytes(content)
        try:
            with Shard(tmp_path / "x") as shard:
                assert sum(shard.read(name).nbytes for name in shard.tensors) <= len(content)
        except ConvertError as error:
            assert "\n" not in str(error)


def test_the_header_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "x"
    with path.open("wb") as stream:
        stream.write(struct.pack("<Q", 1 << 30))
        stream.truncate(2 << 30)  # sparse
    with pytest.raises(ConvertError, match="are the most there may be"):
        Shard(path)


def test_a_file_that_shrinks_while_it_is_open(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(blob({"a": place(0, 1 << 22, [1 << 20])}, bytes(1 << 22)))
    with Shard(tmp_path / "x") as shard:
        (tmp_path / "x").open("r+b").truncate(1 << 21)
        with pytest.raises(ConvertError, match="tensor 'a' cannot be read"):
            shard.read("a")


# Several files


def shards(folder: Path, index: Any, **files: Any) -> Folder:
    for name, content in files.items():
        (folder / f"{name}.safetensors").write_bytes(content)
    if index is not None:
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return Folder(folder)


ONE = blob({"a": place(0, 4, [1])}, bytes(4))
OTHER = blob({"b": place(0, 4, [1])}, bytes(4))


@pytest.mark.parametrize(
    ("index", "files", "message"),
    [
        ({"weight_map": {"a": "x.safetensors", "b": "y.safetensors"}}, {"x": ONE},
         "y.safetensors, which the index names, is missing"),
        ({"weight_map": {"a": "../x.safetensors"}}, {"x": ONE}, r"'\.\./x.safetensors' is not the"),
        ({"weight_map": {"a": "/etc/passwd"}}, {"x": ONE}, "'/etc/passwd' is not the name"),
        ({"weight_map": {"a": "x.safetensors", "c": "x.safetensors"}}, {"x": ONE},
         "x.safetensors lacks tensor 'c', which the index promises"),
        ({"weight_map": {"a": "x.safetensors", "b": "y.safetensors"}}, {"x": ONE, "y": ONE},
         "tensor 'a': the index says x.safetensors"),
        ({"weight_map": {"a": "x.safetensors"}}, {"x": OTHER}, "tensor 'b': the index says None"),
        ({"weight_map": {"a": 3}}, {"x": ONE}, "has no weight_map"),
        ({"weight_map": []}, {"x": ONE}, "has no weight_map"),
        ({}, {"x": ONE}, "has no weight_map"),
        (None, {"x": ONE}, "has no model.safetensors"),
        (None, {"model-00001-of-00003": ONE, "model-00003-of-00003": OTHER},
         "part 2 of 3 is missing"),
        (None, {"model-00001-of-00002": ONE, "model-00002-of-00002": ONE}, "is in another too"),
    ],
)  # fmt: skip
def test_files_that_do_not_belong_together(
    index: Any, files: dict[str, bytes], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConvertError, match=message):
        Checkpoint(shards(tmp_path, index, **files), {})


def test_parts_without_an_index(tmp_path: Path) -> None:
    files = {"model-00001-of-00002": ONE, "model-00002-of-00002": OTHER}
    with Checkpoint(shards(tmp_path, None, **files), {}) as checkpoint:
        assert set(checkpoint.tensors) == {"a", "b"}


def test_pickles_are_not_opened(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02cposix\nsystem\n")
    with pytest.raises(ConvertError, match="only pickles, which are never opened"):
        Checkpoint(Folder(tmp_path), {})


F8 = {"w": place(0, 6, [2, 3], "F8_E4M3")}


@pytest.mark.parametrize(
    ("header", "block", "message"),
    [
        (F8, [2, 2], "'w', in F8_E4M3, has no scales"),
        ({**F8, "w_scale_inv": place(6, 14, [2, 1])}, [1, 2], "has 2 scales, which do not fit"),
        ({**F8, "w_scale_inv": place(6, 14, [2, 1])}, None, "has 2 scales, which do not fit"),
        ({**F8, "w_scale_inv": place(6, 14, [2, 1], "I32")}, [1, 3], "has no scales"),
        (F8, [0, 1], "expected positive numbers"),
        (F8, [128], "expected rows and columns"),
        (F8, "128", "expected rows and columns"),
    ],
)
def test_scales_that_do_not_fit(header: Any, block: Any, message: str, tmp_path: Path) -> None:
    nbytes = max(entry["data_offsets"][1] for entry in header.values())
    folder = shards(tmp_path, None, model=blob(header, bytes(nbytes)))
    with pytest.raises(ConvertError, match=message):
        Checkpoint(folder, {"quant_method": "fp8", "weight_block_size": block})


def test_every_type_has_a_size() -> None:
    from safetensors.numpy import _TYPES  # the library's own table

    known = {name: np.dtype(dtype).itemsize for name, dtype in _TYPES.items() if name in DTYPES}
    assert {name: np.dtype(DTYPES[name]).itemsize for name in known} == known
