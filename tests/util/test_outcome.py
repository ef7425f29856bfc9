"""How programs end: exit statuses, errors in one line, readers that stop reading."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ggpy.util import paths
from ggpy.util.outcome import FAILED, INTERRUPTED, REFUSED, ended


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (ValueError("a\n  b"), REFUSED, "ggpy show: error: a b\n"),
        (FileNotFoundError(2, "No such file", "x.gguf"), REFUSED, "ggpy show: error: x.gguf: No"),
        (MemoryError(), REFUSED, "ggpy show: error: MemoryError\n"),
        (RuntimeError("a\nb"), FAILED, "ggpy show: error: a\nb\n"),
        (OverflowError("x"), FAILED, "ggpy show: error: x\n"),
        (KeyboardInterrupt(), INTERRUPTED, "ggpy show: interrupted\n"),
    ],
)
def test_errors(
    error: BaseException, status: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def work() -> int:
        raise error

    assert ended(work, program="ggpy show") == status
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith(line)


def test_what_is_no_error_and_what_is_a_bug() -> None:
    assert ended(lambda: 7) == 7
    with pytest.raises(KeyError):
        ended(lambda: {}["x"])


def unread(code: str) -> subprocess.CompletedProcess[str]:
    """Run Python with its stdout in a pipe that is closed at once."""
    return subprocess.run(
        ["bash", "-c", f'set -o pipefail; "{sys.executable}" -c "{code}" | true'],
        cwd=paths.data_dir("tools").parent,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.skipif(sys.platform == "win32", reason="bash")
def test_a_reader_that_stops_reading() -> None:
    """Also where all of the output was still in Python's buffer."""
    for text in ("'x\\n'", "'x\\n' * 100000"):
        code = f"from ggpy.util.outcome import ended; exit(ended(lambda: print({text}) or 0))"
        result = unread(code)
        assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.skipif(sys.platform == "win32", reason="bash")
def test_work_goes_on_without_a_reader(tmp_path: Path) -> None:
    """What a program makes beside its output is made."""
    code = "import time; from ggpy.util.outcome import tell; time.sleep(0.3); tell('a'); tell('b')"
    code += f"; open({str(tmp_path / 'made')!r}, 'w'); import sys; sys.stderr.write('c')"
    result = unread(code)
    assert (result.returncode, result.stderr) == (0, "c")
    assert (tmp_path / "made").exists()


def test_a_terminal_without_a_character() -> None:
    code = "from ggpy.util.outcome import ended; ended(lambda: print('\\xb1') or 0)"
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=paths.data_dir("tools").parent,
        env={"PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert result.stdout == "\\xb1\n"


@pytest.mark.skipif(sys.platform == "win32", reason="needs a shell that closes streams")
@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_streams_may_be_closed(closed: str, tmp_path: Path) -> None:
    """What would be printed is lost, and what is written is not."""
    out = tmp_path / "status"
    code = (
        "import sys; from ggpy.util.outcome import ended, tell\n"
        "def work(): tell('a'); print('b'); print('c', file=sys.stderr); return 0\n"
        f"open({str(out)!r}, 'w').write(str(ended(work)))"
    )
    command = ["sh", "-c", f'"$0" -c "$1" {closed}', sys.executable, code]
    done = subprocess.run(command, cwd=paths.data_dir("tools").parent, capture_output=True)
    assert (done.returncode, out.read_text()) == (0, "0")
    assert b"Traceback" not in done.stderr
