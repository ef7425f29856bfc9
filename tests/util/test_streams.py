"""Whether stdout and stderr are one."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ggpy.util import paths
from ggpy.util.streams import is_stdout_stderr

CODE = "from ggpy.util.streams import is_stdout_stderr; raise SystemExit(is_stdout_stderr())"


@pytest.mark.skipif(sys.platform == "win32", reason="sh")
@pytest.mark.parametrize(
    ("redirection", "expected"),
    [
        ("2>&1 | cat", True),
        (">x 2>&1", True),
        (">>x 2>>x", True),
        ("2>x | cat", False),
        (">x 2>y", False),
        (">&-", False),
    ],
)
def test_redirections(redirection: str, expected: bool, tmp_path) -> None:
    command = f"{{ {sys.executable} -c '{CODE}'; echo $? >status; }} {redirection}"
    root = paths.data_dir("tools").parent
    environment = {"PYTHONPATH": str(root)}
    subprocess.run(["sh", "-c", command], cwd=tmp_path, env=environment, timeout=60, check=False)
    assert (tmp_path / "status").read_text() == f"{int(expected)}\n"


def test_streams_without_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert is_stdout_stderr() is False
