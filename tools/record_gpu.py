"""Run the tests that need a GPU on this machine's, and keep what came out in tests/gpu_record.json.

    python tools/record_gpu.py [-n N] [--as ARCH | --all] [--no-speeds] [--device cuda:N] [-o FILE]

The record holds a run for each architecture, the GPU's own and older ones that it is used as
(ggpy/util/simulated.py), with a digest of the kernels, so that a test can tell when they have
changed since. A run replaces the one of its architecture; --all makes all that the test asks for.
Works in a checkout, which has the tests. Exit status: 0, 1 when a test failed, 2 without a GPU.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

from ggpy.device import Gpu, NoGpu, probe, toolkit
from ggpy.util import simulated
from ggpy.util.outcome import ended
from ggpy.util.output_file import write_whole

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "tests" / "gpu_record.json"
KERNELS = ("cuda", "ggpy/kernels")  # what the record is about
SPEEDS = (  # models of the benchmark that are decoded, and tokens of each
    ("Llama-3.1-8B:Q8_0", 128),
    ("Llama-3.1-8B:Q4_K", 128),
    ("Llama-3.2-1B:Q8_0", 128),
)
ARCHITECTURES = ("sm_75", "sm_80", "sm_89", "sm_90a")  # that a record must have
LONG = 120  # seconds of a test, after which it is said where it is: a kernel may never end


def digest(root: Path = ROOT) -> str:
    """Of all sources below `cuda` and `ggpy/kernels`: names and contents, but not line ends."""
    total = hashlib.sha256()
    for path in sorted(p for folder in KERNELS for p in (root / folder).rglob("*")):
        if path.suffix in (".cu", ".cuh", ".py"):
            text = path.read_bytes().replace(b"\r\n", b"\n")
            total.update(f"{path.relative_to(root).as_posix()} {len(text)}\n".encode() + text)
    return total.hexdigest()


def main(argv: list[str] | None = None) -> int:
    """The program; its exit status."""
    options = _parser().parse_args(argv)
    return ended(lambda: record(options))


def record(options: argparse.Namespace) -> int:
    """Test, measure, and write the file, after each architecture; ValueError without a GPU."""
    asked = [simulated.asked()]
    if options.all:
        asked = [None, *(arch for arch in ARCHITECTURES if arch in simulated.SHARED_BYTES)]
    status = 0
    for arch in asked:
        simulated.ask(arch)
        gpu = probe(int(options.device.partition(":")[2] or 0))
        if isinstance(gpu, NoGpu):
            raise ValueError(f"no GPU to test on: {gpu.reason}")
        run = one_run(gpu, options)
        runs = read(options.output) | {gpu.arch: run}
        text = json.dumps(dict(sorted(runs.items())), indent=2)
        write_whole(options.output, text + "\n")
        tests = run["tests"]
        print(f"{options.output}: {gpu.arch}: {json.dumps(tests)}", file=sys.stderr)
        status |= tests["failed"] > 0 or not tests["passed"]
    return int(status)


def read(path: Path) -> dict[str, Any]:
    """The runs in a record, by architecture."""
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}


def one_run(gpu: Gpu, options: argparse.Namespace) -> dict[str, Any]:
    """The tests on a GPU, or on what it is used as, and what it decodes with."""
    before = digest()
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        **machine(gpu),
        "digest": before,
        "tests": run_tests(options.numprocesses),
        "speeds": {} if options.no_speeds else speeds(options.device),
    }


def machine(gpu: Gpu) -> dict[str, str]:
    """What ran the tests."""
    return {
        "gpu": gpu.name,
        "compiled for": gpu.target,
        "driver": _driver_version(gpu.ordinal),
        "cuda of the driver": gpu.driver,
        "cuda compiler": toolkit.nvrtc_version(),
    }


def run_tests(processes: int) -> dict[str, float]:
    """The tests that are marked gpu: how many passed, failed and were skipped, and seconds."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", f"--junitxml={report}"]
        command += ["-o", f"faulthandler_timeout={LONG}"]
        command += ["-n", str(processes)] if processes > 1 else []
        subprocess.run(command, cwd=ROOT, stdout=sys.stderr)
        text = report.read_text(encoding="utf-8")
    return {**counts(text), "seconds": round(time.monotonic() - started)}


def counts(report: str) -> dict[str, float]:
    """Passed, failed and skipped of a JUnit report; an error in a fixture is a failure."""
    totals = {"tests": 0, "failures": 0, "errors": 0, "skipped": 0}
    for suite in ET.fromstring(report).iter("testsuite"):
        for name in totals:
            totals[name] += int(suite.get(name, 0))
    failed = totals["failures"] + totals["errors"]
    passed = totals["tests"] - failed - totals["skipped"]
    return {"passed": passed, "failed": failed, "skipped": totals["skipped"]}


def speeds(device: str) -> dict[str, float]:
    """Tokens a second of one sequence that is decoded, by model, from `ggpy bench`."""
    found = {}
    for model, n in SPEEDS:
        command = [sys.executable, "-m", "ggpy", "bench", "--synthetic", model, "--device", device]
        command += ["-p", "0", "-n", str(n), "-r", "3", "-o", "json"]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
        result: dict[str, Any] = json.loads(done.stdout)[0]
        found[f"{model} tg{n}"] = round(float(result["avg_ts"]), 1)
    return found


def _driver_version(ordinal: int) -> str:
    command = [
        "nvidia-smi",
        "-i",
        str(ordinal),
        "--query-gpu=driver_version",
        "--format=csv,noheader",
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="record_gpu", description="Test on this machine's GPU, and keep the outcome."
    )
    parser.add_argument("--device", default="cuda:0", help="which GPU (cuda:0)")
    parser.add_argument(
        "-n", "--numprocesses", type=int, default=1, metavar="N",
        help="processes that test; most of the time of a first run is compilation (1)",
    )  # fmt: skip
    which = parser.add_mutually_exclusive_group()
    simulated.add_option(which)
    which.add_argument("--all", action="store_true", help="each architecture that is asked for")
    parser.add_argument("--no-speeds", action="store_true", help="tests only, no benchmark")
    parser.add_argument("-o", "--output", type=Path, default=RECORD, help=f"({RECORD.name})")
    return parser


if __name__ == "__main__":
    sys.exit(main())
