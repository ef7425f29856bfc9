"""Without numba a module of this folder is skipped, with the reason, before it is imported."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest


class NeedsNumba(pytest.Module):
    """A module of tests that cannot be imported here."""

    def collect(self) -> list[pytest.Item]:
        pytest.skip("needs the extra 'cpu'", allow_module_level=True)


def pytest_pycollect_makemodule(
    module_path: Path, parent: pytest.Collector
) -> pytest.Module | None:
    """What stands for a module; None is the usual."""
    if find_spec("numba"):
        return None
    return NeedsNumba.from_parent(parent, path=module_path)
