"""The folder of compiled kernels: the user's own, and nothing of others is loaded from it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from ggpy.device import cache, toolkit
from ggpy.device.cubin import Cubin, Resources
from ggpy.util import paths

KEY = "a" * 40
CUBIN = Cubin(b"\x7fELF code", {"add": "_Z3add"}, {"add": Resources(8, 0, 0, 0, 0)}, "log")
posix = pytest.mark.skipif(os.name != "posix", reason="owners and modes")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "ggpy" / "cubins"


def test_what_is_stored_is_loaded(folder: Path) -> None:
    assert cache.load(KEY) is None and cache.refusal() == ""
    cache.store(KEY, CUBIN)
    assert cache.load(KEY) == CUBIN and cache.refusal() == ""
    assert sorted(p.name for p in folder.iterdir()) == [f"{KEY}.cubin", f"{KEY}.json"]


@posix
@pytest.mark.parametrize("mask", [0, 0o002, 0o022])
def test_folders_that_are_made_are_the_user_s_alone(mask: int, folder: Path) -> None:
    before = os.umask(mask)
    try:
        cache.store(KEY, CUBIN)
    finally:
        os.umask(before)
    for path in (folder, folder.parent, folder.parent.parent):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert cache.load(KEY) == CUBIN


@posix
def test_a_folder_that_was_there_keeps_its_mode(folder: Path) -> None:
    folder.mkdir(parents=True)
    for path in (folder, folder.parent):
        path.chmod(0o755)
    cache.store(KEY, CUBIN)
    assert cache.load(KEY) == CUBIN and stat.S_IMODE(folder.stat().st_mode) == 0o755


@posix
@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702, 0o1777])
@pytest.mark.parametrize("which", ["cubins", "ggpy"])
def test_a_folder_that_others_can_write_to_is_closed_before_it_is_used(
    which: str, mode: int, folder: Path
) -> None:
    cache.store(KEY, CUBIN)
    open_to_all = folder if which == "cubins" else folder.parent
    open_to_all.chmod(mode)
    assert cache.load(KEY) is None
    cache.store("b" * 40, CUBIN)
    assert stat.S_IMODE(open_to_all.stat().st_mode) == mode & ~0o022
    assert cache.load(KEY) == CUBIN == cache.load("b" * 40) and cache.refusal() == ""


@posix
@pytest.mark.parametrize("suffix", [".cubin", ".json"])
def test_a_cubin_of_another_owner_is_not_loaded(
    suffix: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.store(KEY, CUBIN)
    real = os.fstat

    def fstat(handle: int) -> os.stat_result:
        found = real(handle)
        if os.readlink(f"/proc/self/fd/{handle}").endswith(suffix):
            return os.stat_result([*found[:4], found.st_uid + 1, *found[5:10]])
        return found

    if os.getuid() == 0:
        os.chown(folder / (KEY + suffix), 12345, -1)
    elif Path("/proc/self/fd").exists():
        monkeypatch.setattr(cache.os, "fstat", fstat)
    else:
        pytest.skip("no way to have a file of another user")
    assert cache.load(KEY) is None


@posix
def test_a_folder_of_another_owner_is_not_used(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.store(KEY, CUBIN)
    uid = os.getuid()
    monkeypatch.setattr(paths.os, "getuid", lambda: uid + 1)
    assert cache.load(KEY) is None and cache.refusal() != ""


@posix
def test_links_are_not_followed(folder: Path, tmp_path: Path) -> None:
    cache.store(KEY, CUBIN)
    (folder / f"{KEY}.cubin").rename(tmp_path / "elsewhere")
    (folder / f"{KEY}.cubin").symlink_to(tmp_path / "elsewhere")
    assert cache.load(KEY) is None
    cache.store(KEY, CUBIN)
    assert cache.load(KEY) == CUBIN and not (folder / f"{KEY}.cubin").is_symlink()


@posix
def test_the_compiler_s_version_is_not_taken_from_others(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Nvrtc:
        @staticmethod
        def nvrtcVersion() -> tuple[int, int, int]:
            return 0, 13, 4

    monkeypatch.setattr(toolkit, "_nvrtc_files", lambda: [("libnvrtc.so", 1, 1)])
    monkeypatch.setattr(toolkit, "load_nvrtc", lambda: Nvrtc)
    version = toolkit.nvrtc_version.__wrapped__
    assert version() == "13.4"
    (memo,) = paths.cache_dir("nvrtc").iterdir()
    memo.write_text("12.0")
    assert version() == "12.0"
    memo.parent.chmod(0o777)
    assert version() == "13.4"


def test_a_platform_without_owners(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "getuid", raising=False)
    cache.store(KEY, CUBIN)
    assert cache.load(KEY) == CUBIN
