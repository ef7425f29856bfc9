from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from ggpy.util.disk import NoRoom, check_room, size


@pytest.mark.parametrize(
    ("nbytes", "told"),
    [
        (0, "0 MB"),
        (9_700, "0.0097 MB"),
        (1_000_000, "1 MB"),
        (9_990_000, "10 MB"),
        (999_400_000, "999 MB"),
        (2_340_000_000, "2.34 GB"),
    ],
)
def test_sizes(nbytes: int, told: str) -> None:
    assert size(nbytes) == told


def test_room_is_that_of_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def usage(path: Path) -> SimpleNamespace:
        asked.append(path)
        return SimpleNamespace(free=5 * 10**6)

    monkeypatch.setattr("shutil.disk_usage", usage)
    check_room(tmp_path / "x", 5 * 10**6)
    with pytest.raises(NoRoom, match=r"x: needs 6 MB, 5 MB are free there"):
        check_room(tmp_path / "x", 6 * 10**6)
    assert asked == [tmp_path] * 2
