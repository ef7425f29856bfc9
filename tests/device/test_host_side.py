"""Runs with_fake_driver.py: the device layer against a recording driver, in a process that has no
other."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ggpy.device import toolkit

HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """The environment of a process whose CUDA driver is the fake one."""
    if sys.platform != "linux" or shutil.which("g++") is None:
        pytest.skip("needs Linux and g++ for the recording driver")
    try:
        toolkit.nvrtc_version()
        toolkit.header_folders()
    except toolkit.NvrtcMissing as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("driver")
    command = ["g++", "-std=c++17", "-O1", "-w", "-shared", "-fPIC", str(HERE / "fake_driver.cpp")]
    subprocess.run([*command, "-o", str(folder / "libcuda.so.1"), "-ldl"], check=True)
    path = os.pathsep.join([str(folder), os.environ.get("LD_LIBRARY_PATH", "")])
    return {**os.environ, "LD_LIBRARY_PATH": path}


def python(environment, *arguments, **variables):
    """Run Python in the checkout with the recording driver."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=HERE.parents[1],
        env={**environment, **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_device_layer(environment):
    done = python(
        environment,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        str(HERE / "with_fake_driver.py"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout and "skipped" not in done.stdout


@pytest.mark.parametrize(
    "variables, reason",
    [
        ({"FAKE_INIT": "100"}, "the NVIDIA driver finds no GPU"),
        ({"FAKE_COUNT": "0"}, "the NVIDIA driver finds no GPU"),
        ({"FAKE_INIT": "803"}, "restart the machine"),
        ({"FAKE_INIT": "999"}, "the NVIDIA driver does not start: CUDA_ERROR_UNKNOWN"),
    ],
)
def test_probe_says_why_a_driver_is_of_no_use(environment, variables, reason):
    code = "from ggpy.device import probe, list_gpus; print(probe().reason, list_gpus())"
    done = python(environment, "-c", code, **variables)
    assert reason in done.stdout and done.stdout.endswith("[]\n"), done.stdout + done.stderr
