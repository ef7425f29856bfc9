"""Files of a folder: only those in it, and only plain ones."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from ggpy.convert.folder import ConvertError, Folder

NAMES = ("../x", "/etc/passwd", "a/b", "..", ".", "", "a\\b", "C:x", "a\0b")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder beside a secret."""
    (tmp_path / "secret.json").write_text('{"a": 1}')
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "good.json").write_text('{"a": 1}')
    return tmp_path / "model"


def test_files_are_read(folder: Path) -> None:
    assert Folder(folder).json("good.json") == {"a": 1}
    assert Folder(folder).json("other.json") is None
    assert Folder(folder).name == "model"
    with pytest.raises(ConvertError, match=r"has no other\.json"):
        Folder(folder).required("other.json")


@pytest.mark.skipif(sys.platform != "linux", reason="names of files are UTF-8 elsewhere")
def test_a_folder_whose_name_is_no_utf8(tmp_path: Path) -> None:
    """Its name becomes general.name, which is UTF-8."""
    path = tmp_path / os.fsdecode(b"a\xff")
    path.mkdir()
    assert Folder(path).name == "a\ufffd"


@pytest.mark.parametrize("name", NAMES)
def test_names_that_lead_outside(name: str, folder: Path) -> None:
    with pytest.raises(ConvertError, match="is not the name of a file in this folder"):
        Folder(folder).find(name)


def test_links_that_lead_outside(folder: Path) -> None:
    (folder / "link.json").symlink_to("../secret.json")
    (folder / "inside.json").symlink_to("good.json")
    (folder / "loop.json").symlink_to("loop.json")
    (folder / "dangling.json").symlink_to("nothing.json")
    found = Folder(folder)
    with pytest.raises(ConvertError, match="outside the folder: it is not opened"):
        found.json("link.json")
    with pytest.raises(ConvertError, match="cannot be read"):
        found.json("loop.json")
    assert found.json("inside.json") == {"a": 1}
    assert found.json("dangling.json") is None


def test_a_folder_may_be_a_link_itself(folder: Path) -> None:
    folder.with_name("link").symlink_to(folder, target_is_directory=True)
    assert Folder(folder.with_name("link")).json("good.json") == {"a": 1}


def test_the_cache_of_the_hub_links_to_blobs(tmp_path: Path) -> None:
    repository = tmp_path / "models--user--Nice-1B"
    snapshot = repository / "snapshots" / "0123"
    (repository / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    (repository / "blobs" / "abc").write_text('{"a": 2}')
    (repository / "refs").write_text("secret")
    (snapshot / "config.json").symlink_to("../../blobs/abc")
    (snapshot / "bad.json").symlink_to("../../refs")
    found = Folder(snapshot)
    assert found.json("config.json") == {"a": 2} and found.name == "Nice-1B"
    with pytest.raises(ConvertError, match="outside"):
        found.json("bad.json")


def test_what_is_no_plain_file(folder: Path) -> None:
    (folder / "sub.json").mkdir()
    os.mkfifo(folder / "pipe.json")
    for name in ("sub.json", "pipe.json"):
        with pytest.raises(ConvertError, match="is no plain file"):
            Folder(folder).json(name)


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"\xff", "is not the JSON"), (b"[1]", "is list, not an object"), (b"{", "is not the JSON"),
     (b'{"a": 1, "a": 2}', "'a' is there twice"), (b"[" * 10**6, "nested too deeply")],
)  # fmt: skip
def test_json_that_is_none(content: bytes, message: str, folder: Path) -> None:
    (folder / "bad.json").write_bytes(content)
    with pytest.raises(ConvertError, match=message) as raised:
        Folder(folder).json("bad.json")
    assert "\n" not in str(raised.value)


def test_limits(folder: Path) -> None:
    with pytest.raises(ConvertError, match="has more than"):
        Folder(folder).read("good.json", 3)
    assert Folder(folder).read("good.json", 8) == b'{"a": 1}'
    (folder / "text").write_bytes(b"\xff")
    with pytest.raises(ConvertError, match="is not UTF-8"):
        Folder(folder).text("text")


def test_no_folder(tmp_path: Path) -> None:
    for path in (tmp_path / "nothing", tmp_path / "file"):
        (tmp_path / "file").touch()
        with pytest.raises(ConvertError, match="is no folder"):
            Folder(path)
