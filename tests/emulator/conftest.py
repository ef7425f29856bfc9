"""Fixtures that run small kernels, written in a test, on a new device."""

import pytest
from emulator import build
from emulator.emulated import Emulated

from ggpy.util.paths import cuda_dir


@pytest.fixture(autouse=True)
def _needs_emulator():
    if build.unavailable():
        pytest.skip(build.unavailable())


@pytest.fixture
def make(tmp_path):
    """A function that writes a source file beside the needed headers and opens a device on it."""
    devices = []
    folder = tmp_path / "cuda"  # the same name in every test: the cache key contains only the text
    (folder / "lib").mkdir(parents=True)
    for name in ("common", "mma", "cluster", "bulk_copy", "wgmma"):
        header = f"lib/{name}.cuh"
        (folder / header).write_bytes((cuda_dir() / header).read_bytes())

    def create(source, **options):
        (folder / "sample.cu").write_text('#include "lib/mma.cuh"\n' + source)
        devices.append(Emulated(cuda=folder, **options))
        return devices[-1]

    yield create
    for device in devices:
        device.close()
