"""Output files: whole or not there, nobody else's touched, one writer at a time."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from errno import EBUSY
from pathlib import Path

import pytest

from ggpy.util import output_file
from ggpy.util.output_file import OutputFile, write_whole
from ggpy.util.paths import data_dir

ROOT = data_dir("tools").parent
posix = pytest.mark.skipif(os.name != "posix", reason="locks, links and modes of POSIX")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_appears_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_text("before")
    with OutputFile(path) as out:
        out.write(b"after")
        out.stream.flush()
        assert path.read_text() == "before"
        assert len(list(tmp_path.glob("out.????????.part"))) == 1
    assert path.read_text() == "after" and names(tmp_path) == ["out"]
    write_whole(path, "text Δ")
    assert path.read_bytes() == "text Δ".encode()


def test_nothing_is_left_of_what_goes_wrong(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), OutputFile(tmp_path / "out") as out:
        out.write(b"half")
        raise RuntimeError
    assert names(tmp_path) == []
    abandoned = OutputFile(tmp_path / "out")  # nobody calls __exit__
    assert len(names(tmp_path)) == 1
    del abandoned
    assert names(tmp_path) == []


def test_it_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    sync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: said.append("sync") or sync(handle))
    monkeypatch.setattr(os, "replace", lambda a, b: said.append("replace") or replace(a, b))
    write_whole(tmp_path / "out", b"x")
    assert said == ["sync", "replace"]


@pytest.mark.parametrize("name", ["fsync", "replace"])
def test_errors_at_the_end_name_the_file_and_leave_nothing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", "something.part")

    monkeypatch.setattr(os, name, full)
    with pytest.raises(OSError) as raised:
        write_whole(tmp_path / "out", b"x")
    assert raised.value.filename == str(tmp_path / "out") and names(tmp_path) == []


def test_what_others_have_under_such_names_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part gets another name, and what is there is neither written to nor removed."""
    tokens = iter(["00000000", "11111111", "22222222"])
    monkeypatch.setattr(output_file.secrets, "token_hex", lambda n: next(tokens))
    (tmp_path / "out.part").write_text("notes")
    (tmp_path / "out.00000000.part").write_text("more notes")
    (tmp_path / "victim").write_text("victim")
    if os.name == "posix":
        (tmp_path / "out.11111111.part").symlink_to(tmp_path / "victim")
    else:
        (tmp_path / "out.11111111.part").write_text("")
    with pytest.raises(RuntimeError), OutputFile(tmp_path / "out") as out:
        assert out.part == tmp_path / "out.22222222.part"
        raise RuntimeError
    monkeypatch.setattr(output_file.secrets, "token_hex", lambda n: "33333333")
    write_whole(tmp_path / "out", "x")
    assert (tmp_path / "victim").read_text() == "victim"
    assert (tmp_path / "out.part").read_text() == "notes"
    assert (tmp_path / "out.00000000.part").read_text() == "more notes"


@posix
def test_a_link_is_replaced_and_what_it_led_to_stays(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    victim = tmp_path / "elsewhere" / "victim"
    victim.write_text("victim")
    for there in (victim, tmp_path / "nowhere"):
        link = tmp_path / "link"
        link.unlink(missing_ok=True)
        link.symlink_to(there)
        write_whole(link, "x")
        assert not link.is_symlink() and link.read_text() == "x"
    assert victim.read_text() == "victim" and names(tmp_path / "elsewhere") == ["victim"]
    assert not (tmp_path / "nowhere").exists()


@posix
@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_the_mode_follows_umask(mask: int, tmp_path: Path) -> None:
    before = os.umask(mask)
    try:
        write_whole(tmp_path / "out", b"")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o666 & ~mask


@posix
def test_devices_and_pipes_are_written_to(tmp_path: Path) -> None:
    """A device of the test's own where that can be made: who may do so could replace /dev/null."""
    null = Path("/dev/null")
    if os.access("/dev", os.W_OK):
        null = tmp_path / "null"
        os.mknod(null, stat.S_IFCHR | 0o666, os.makedev(1, 3))
    write_whole(null, b"x")
    assert stat.S_ISCHR(null.stat().st_mode)
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_whole(tmp_path / "pipe", b"through")
    assert os.read(reader, 99) == b"through" and set(names(tmp_path)) <= {"pipe", "null"}
    os.close(reader)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="no /proc")
@pytest.mark.parametrize("where", ["pipe", "file"])
def test_stdout_by_its_name(where: str, tmp_path: Path) -> None:
    """Nothing is written to /dev/stdout itself, which a mistake could replace."""
    code = (
        "from pathlib import Path; from ggpy.util.output_file import is_stream, write_whole\n"
        "assert is_stream(Path('/dev/stdout')) and is_stream(Path('/dev/fd/1'))\n"
        "write_whole('/proc/self/fd/1', 'x')"
    )
    with (tmp_path / "out").open("wb") as stream:
        out = stream if where == "file" else subprocess.PIPE
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, stdout=out, check=True)
    assert ((tmp_path / "out").read_bytes() if where == "file" else done.stdout) == b"x"


def test_where_no_file_can_be(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError, match="name a file in it"):
        OutputFile(tmp_path)
    with pytest.raises(FileNotFoundError) as raised:
        OutputFile(tmp_path / "nothing" / "out")
    assert raised.value.filename == str(tmp_path / "nothing" / "out")


@pytest.mark.parametrize("name", ["n" * 255, "n" * 250, "ä" * 127, "x-00001-of-00002.gguf"])
def test_names_as_long_as_they_can_be(name: str, tmp_path: Path) -> None:
    write_whole(tmp_path / name, b"x")
    assert names(tmp_path) == [name]


# Two writers


@posix
def test_the_second_writer_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with OutputFile(path) as first:
        first.write(b"first")
        with pytest.raises(OSError, match="another process is writing it, to out") as raised:
            OutputFile(path)
        assert raised.value.errno == EBUSY and raised.value.filename == str(path)
        write_whole(tmp_path / "out2", b"")  # other names are free,
        write_whole(tmp_path / "out.00000000.part", b"")  # whatever they look like
        (tmp_path / "out.00000000.part").unlink()
        (tmp_path / "out2").unlink()
        assert len(names(tmp_path)) == 1
    assert path.read_bytes() == b"first"
    write_whole(path, b"second")
    assert path.read_bytes() == b"second" and names(tmp_path) == ["out"]


@posix
def test_files_of_a_cache_may_be_made_by_several(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with OutputFile(path, alone=False) as first:
        first.write(b"same")
        write_whole(path, b"same", alone=False)
        assert path.read_bytes() == b"same"
    assert path.read_bytes() == b"same" and names(tmp_path) == ["out"]


@posix
def test_long_names_that_begin_alike_are_two(tmp_path: Path) -> None:
    parts = [tmp_path / f"{'n' * 220}-0000{i}-of-00002.gguf" for i in (1, 2)]
    with OutputFile(parts[0]), OutputFile(parts[1]):
        pass
    assert names(tmp_path) == sorted(part.name for part in parts)


WRITER = """
import sys, time
from ggpy.util.outcome import ended
from ggpy.util.output_file import OutputFile
def work():
    with OutputFile(sys.argv[1]) as out:
        for _ in range(40):
            out.write(sys.argv[2].encode() * 1000)
            time.sleep(0.01)
    return 0
sys.exit(ended(work))
"""


def start(*words: object, code: str = WRITER, **more: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, *map(str, words)]
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, **more)  # type: ignore[call-overload,no-any-return]


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@posix
def test_of_many_writers_one_wins_and_the_others_say_so(tmp_path: Path) -> None:
    path = tmp_path / "out"
    writers = [start(path, letter) for letter in "abcd"]
    said = [writer.communicate(timeout=60)[1] for writer in writers]
    statuses = [writer.returncode for writer in writers]
    assert sorted(statuses) == [0, 2, 2, 2], said
    winner = "abcd"[statuses.index(0)]
    assert path.read_text() == winner * 40_000 and names(tmp_path) == ["out"]
    for status, line in zip(statuses, said, strict=True):
        if status:
            assert line.startswith(f"ggpy: error: {path}: another process is writing it")
            assert line.count("\n") == 1


@posix
def test_what_a_killed_process_left_blocks_nobody_and_stays(tmp_path: Path) -> None:
    path = tmp_path / "out"
    writer = start(path, "a")
    until(lambda: any(tmp_path.glob("out.*.part")))
    writer.kill()
    writer.communicate()
    left = names(tmp_path)
    assert len(left) == 1
    write_whole(path, b"x")
    assert path.read_bytes() == b"x" and names(tmp_path) == sorted(["out", *left])


@posix
def test_who_holds_the_folder_s_lock_stops_nobody_for_long(tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    import fcntl

    monkeypatch.setattr(output_file, "PATIENCE", 0.1)
    handle = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    write_whole(tmp_path / "out", b"x")
    os.close(handle)
    assert names(tmp_path) == ["out"]


# Signals


@posix
@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGINT"])
def test_a_signal_leaves_nothing(name: str, tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_text("before")
    number = getattr(signal, name)
    writer = start(path, "a")
    until(lambda: any(tmp_path.glob("out.*.part")))
    writer.send_signal(number)
    said = writer.communicate(timeout=30)[1]
    assert writer.returncode == 128 + number
    wanted = "ggpy: interrupted\n" if name == "SIGINT" else f"ggpy: ended by {name}\n"
    assert said == wanted
    assert path.read_text() == "before" and names(tmp_path) == ["out"]


@posix
def test_a_signal_between_two_lines_leaves_nothing(tmp_path: Path) -> None:
    """After the file is made, before anybody has it."""
    code = """
import os, signal, sys
from ggpy.util import output_file
from ggpy.util.outcome import ended
real = output_file._lock
def lock(handle):
    os.kill(os.getpid(), signal.SIGTERM)
    real(handle)
output_file._lock = lock
sys.exit(ended(lambda: output_file.write_whole(sys.argv[1], b'x') or 0))
"""
    writer = start(tmp_path / "out", code=code)
    writer.communicate(timeout=30)
    assert writer.returncode == 143 and names(tmp_path) == []


@posix
def test_nohup_is_respected(tmp_path: Path) -> None:
    path = tmp_path / "out"
    writer = start(path, "a", preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    until(lambda: any(tmp_path.glob("out.*.part")))
    writer.send_signal(signal.SIGHUP)
    assert writer.communicate(timeout=30)[1] == "" and writer.returncode == 0
    assert path.read_text() == "a" * 40_000
