"""Models in several GGUF files: all are opened by the first, or none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter
from gguf_files import STR, U16, U32, gguf, key, tensor, text, u32

from ggpy.gguf import File, GGUFError


def split_model(folder: Path, n_tensors: int = 5, per_part: int = 2) -> list[Path]:
    writer = GGUFWriter(folder / "model.gguf", "test", split_max_tensors=per_part)
    writer.add_string("general.name", "in parts")
    for i in range(n_tensors):
        writer.add_tensor(f"w{i}", np.full((2, 8), i, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(folder.glob("model-*.gguf"))


def test_first_part_opens_all(tmp_path: Path) -> None:
    parts = split_model(tmp_path)
    assert len(parts) == 3
    with File(parts[0]) as file:
        assert file.metadata["general.name"] == "in parts"
        assert list(file.tensors) == [f"w{i}" for i in range(5)]
        assert file.nbytes == sum(p.stat().st_size for p in parts)
        for i, w in enumerate(file.tensors.values()):
            assert (w.dequantize() == i).all()
        assert file.tensors["w4"].path == str(parts[2])


def test_later_part_says_what_to_open(tmp_path: Path) -> None:
    parts = split_model(tmp_path)
    with pytest.raises(GGUFError, match=r"this is part 2 of 3: open the first, .*-00001-of-00003"):
        File(parts[1])


def test_missing_part_is_named(tmp_path: Path) -> None:
    parts = split_model(tmp_path)
    parts[1].unlink()
    with pytest.raises(GGUFError, match=r"part 2 of 3 is missing: put model-00002-of-00003\.gguf"):
        File(parts[0])


def test_damaged_part_is_named(tmp_path: Path) -> None:
    parts = split_model(tmp_path)
    parts[2].write_bytes(parts[2].read_bytes()[:-20])
    with pytest.raises(
        GGUFError, match=r"model-00003-of-00003\.gguf: tensor 'w4': .* 20 bytes are"
    ):
        File(parts[0])


def test_parts_in_the_wrong_place(tmp_path: Path) -> None:
    parts = split_model(tmp_path)
    parts[1].write_bytes(parts[2].read_bytes())
    with pytest.raises(GGUFError, match=r"split\.no: is 2, .* says 1"):
        File(parts[0])


def test_renamed_part(tmp_path: Path) -> None:
    first = split_model(tmp_path)[0]
    for name in ("other.gguf", "model-00001-of-00004.gguf"):
        renamed = first.rename(tmp_path / name)
        with pytest.raises(GGUFError, match=r"split\.count: is 3, .* NAME-00001-of-00003\.gguf"):
            File(renamed)
        first = renamed


def hand_split(folder: Path, *parts: dict[str, Any]) -> Path:
    """Parts by hand: no, count, total, tensors of each; the path of the first."""
    for i, part in enumerate(parts):
        keys = [
            key("split.no", U16, part["no"].to_bytes(2, "little")),
            key("split.count", U16, part["count"].to_bytes(2, "little")),
            key("split.tensors.count", U32, u32(part["total"])),
        ]
        keys = [k for k in keys if part.get("without", "none").encode() not in k]
        data = gguf(keys, [tensor(part["name"])], bytes(32))
        (folder / f"m-{i + 1:05}-of-{len(parts):05}.gguf").write_bytes(data)
    return folder / f"m-00001-of-{len(parts):05}.gguf"


FIRST: dict[str, Any] = {"no": 0, "count": 2, "total": 2, "name": "a"}
SECOND: dict[str, Any] = {"no": 1, "count": 2, "total": 2, "name": "b"}


def test_parts_gguf(tmp_path: Path) -> None:
    assert list(File(hand_split(tmp_path, FIRST, SECOND)).tensors) == ["a", "b"]


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ({"total": 3}, {}, r"split\.tensors\.count: is 3, the parts hold 2 tensors"),
        ({"without": "split.no"}, {}, r"split\.no: is missing, the parts of a split model need"),
        ({"without": "split.tensors"}, {}, r"split\.tensors\.count: is missing"),
        ({}, {"without": "split.no"}, r"m-00002-of-00002\.gguf: split\.no: is missing"),
        ({}, {"count": 3}, r"m-00002-of-00002\.gguf: split\.count: is 3, .* says 2"),
        ({}, {"name": "a"}, r"m-00002-of-00002\.gguf: tensor 'a': is in an earlier part too"),
    ],
)
def test_parts_that_do_not_fit(
    first: dict[str, Any], second: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    path = hand_split(tmp_path, FIRST | first, SECOND | second)
    with pytest.raises(GGUFError, match=expected):
        File(path)


def test_split_count_of_text(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf([key("split.count", STR, text("2"))]))
    with pytest.raises(GGUFError, match=r"split\.count: is str, .* need an integer"):
        File(path)


@pytest.mark.parametrize("count", [0, 1])
def test_one_part_is_no_split(count: int, tmp_path: Path) -> None:
    path = tmp_path / "model-00002-of-00003.gguf"  # what it says of itself counts
    keys = [key("split.count", U16, bytes([count, 0])), key("split.no", U16, b"\0\0")]
    path.write_bytes(gguf(keys, [tensor()], bytes(32)))
    assert len(File(path).tensors) == 1


@pytest.mark.parametrize(("end", "all_pieces"), [(".part1of2", ".part*"), ("-split-a", "-split-*")])
@pytest.mark.parametrize("piece", [slice(50_000), slice(50_000, None)], ids=["first", "second"])
def test_pieces_of_a_file_that_was_cut(
    end: str, all_pieces: str, piece: slice, tiny_path: Any, tmp_path: Path
) -> None:
    path = tmp_path / f"m.gguf{end}"
    path.write_bytes(tiny_path("llama").read_bytes()[piece])
    with pytest.raises(GGUFError) as error:
        File(path)
    assert str(error.value).endswith(f"join them first: cat m.gguf{all_pieces} > m.gguf")
