"""What several tests need: models, real where they can be had and tiny ones, and devices."""

from __future__ import annotations

import gc
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault(
    "OPENBLAS_NUM_THREADS", "1"
)  # before numpy: its threads spin on a busy machine

# Thousands of collected tests are objects that stay; to look through them again and again takes a
# third of the time of collecting them.
gc.set_threshold(100_000, 20, 20)

# Its limits of time are of the clock: on a busy machine, tests would fail that find nothing.
settings.register_profile(
    "ggpy", settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("ggpy")

# What a shell without job control starts in the background ignores Ctrl-C, and so do its children.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # so does nohup with SIGHUP
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# A variable: the digest of the code that tests are known to pass with, or "".
KNOWN = "GGPY_KNOWN_TESTS"
GPU = {"gpu", "cuda", "hopper"}  # what tests call a GPU where they run on several devices

TINY = Path(__file__).resolve().parent.parent / "models" / "tiny"


def pytest_addoption(parser: pytest.Parser) -> None:
    """For a run of the whole suite."""
    parser.addoption(
        "--repeat-all",
        action="store_true",
        help="also all tests that are known to pass (tests/support/kernels/known_tests.py)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Find out once, for all processes, whether tests are known to pass."""
    import known_tests

    if not hasattr(config, "workerinput"):  # those of pytest-xdist inherit the variable
        run = known_tests.recorded() if known_tests.is_whole_suite(config) else None
        os.environ[KNOWN] = json.dumps(run) if run else ""


def pytest_report_header() -> str | None:
    """What is left out."""
    from known_tests import ONE_IN

    if not os.environ.get(KNOWN):
        return None
    return (
        f"emulator: one in {ONE_IN} functions that test kernels, and of their parameters, since "
        "all passed with this code (tests/gpu_record.json); --repeat-all repeats all of them"
    )


def pytest_collection_finish() -> None:
    """Programs look for garbage between two models: half a second each with all these tests."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what needs a GPU, so that `-m gpu` runs just that: see tools/record_gpu.py. Leave out
    what is known to pass.
    """
    for item in items:
        call = getattr(item, "callspec", None)
        on = {call.params.get(name) for name in ("device", "kind", "machine")} if call else set()
        if "gpu" in getattr(item, "fixturenames", ()) or any(x in GPU for x in map(str, on)):
            item.add_marker("gpu")
    if os.environ.get(KNOWN):
        from known_tests import Known, left_out

        out = left_out(items, Known(*json.loads(os.environ[KNOWN])))
        config.hook.pytest_deselected(items=list(out))
        items[:] = [item for item in items if item not in out]


def real_model(name: str) -> Path:
    """A model of ggpy.hub: from the folder $GGPY_TEST_MODELS, the cache, or the registry."""
    from ggpy import hub

    known = {model.name: model.file for model in hub.KNOWN}
    folder = os.environ.get("GGPY_TEST_MODELS")
    if folder and Path(folder, known[name]).is_file():
        return Path(folder, known[name])
    try:
        return hub.resolve(name)
    except (OSError, ValueError) as error:
        pytest.skip(f"no {name}: {error}")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct, 98 MB."""
    return real_model("smollm2")


@pytest.fixture(scope="session")
def gemma3() -> Path:
    """Gemma-3-270M, 253 MB."""
    return real_model("gemma3-270m")


@pytest.fixture(scope="session")
def tiny_path() -> Callable[[str], Path]:
    """The tiny model of an architecture."""
    return lambda architecture: TINY / f"{architecture}.gguf"


@pytest.fixture
def overflowing(tmp_path: Path) -> Path:
    """The tiny llama with finite weights, the feed-forward of whose last layer overflows."""
    import numpy as np

    from ggpy.gguf import File

    path = TINY / "llama.gguf"
    content = path.read_bytes()
    with File(path) as file:
        norm = bytes(np.ascontiguousarray(file.tensors["blk.1.ffn_norm.weight"].data))
    at = content.rindex(norm)  # equal norms may stand before it: this is the last layer's
    huge = np.full(len(norm) // 4, 1e38, "<f4").tobytes()
    changed = tmp_path / "overflowing.gguf"
    changed.write_bytes(content[:at] + huge + content[at + len(norm) :])
    return changed


@pytest.fixture(scope="session")
def gpu() -> Any:
    """The first GPU."""
    from devices import open_device

    return open_device("cuda")


@pytest.fixture(scope="session")
def emulator() -> Iterator[Any]:
    """The emulator without sanitizers, for what takes many launches."""
    from devices import open_device
    from prepared import Prepared

    with open_device("emulator") as device:
        yield Prepared(device)


@pytest.fixture(scope="session")
def nvrtc() -> None:
    """For tests that compile kernels, which need no GPU."""
    from ggpy.device import toolkit

    try:
        toolkit.load_nvrtc()
        toolkit.header_folders()
    except toolkit.NvrtcMissing as error:
        pytest.skip(str(error))


@pytest.fixture(params=["emulator", "gpu"])
def machine(request: pytest.FixtureRequest) -> Any:
    """Each of both in turn."""
    return request.getfixturevalue(request.param)
