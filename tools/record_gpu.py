"""`ggpy record_gpu` (for developers): run the GPU tests, and record the result in the checkout.

    ggpy record_gpu [-n N] [--as ARCH | --all] [--no-speeds] [--device cuda:N] [-o FILE]
    ggpy record_gpu --emulator [-n N] [-o FILE]

tests/gpu_record.json holds a run for each architecture, the GPU's own and older ones that it is
used as (ggpy/util/simulated.py), with a digest of the kernels, from which a test sees whether they
have changed since. A run replaces the one of its architecture; --all makes every run that the test
asks for. A test that failed because the test was wrong is run again once it is mended; until a GPU
is at hand, `replaced` in the record may name it, with the reason, if there is no such test any more
(its name or its parameters are others). Exit status: 0, 1 when a test failed, 2 without a GPU.

--emulator: the tests of kernels, and of the backend that launches them, without a GPU: on the
emulator, and with the compiler. The digest of that run is of all that decides about them. Where it
belongs to the code, `pytest` repeats only a part of them (tests/support/kernels/known_tests.py).
"""

from __future__ import annotations

import argparse
import ast
import datetime
import hashlib
import io
import json
import re
import subprocess
import sys
import tempfile
import time
import tokenize
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ggpy.cli.parser import Parser, positive
from ggpy.cli.simulated import add_option
from ggpy.util import simulated
from ggpy.util.outcome import ended
from ggpy.util.output_file import write_whole

if TYPE_CHECKING:
    from ggpy.device import Gpu

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "tests" / "gpu_record.json"
KERNELS = ("cuda", "ggpy/kernels")  # what the record is about
EMULATOR = "emulator"  # the run without a GPU, of the tests below EMULATED
EMULATED = ("tests/kernels", "tests/backends")
# What decides about those tests, beside the kernels.
OF_EMULATOR = (
    *(*EMULATED, "tests/emulator", "tests/support", "ggpy/arch", "ggpy/backends"),
    *("ggpy/device", "ggpy/formats", "tests/conftest.py"),
)
TIMED = ("tests.tools.test_bench_kernels::test_on_a_gpu",)
OF_SERVER = ("tests.serve", "tests.grammar", "tests.examples")  # or whose examples ask it
SPEEDS = (  # models of the benchmark that are decoded, and tokens of each
    ("Llama-3.1-8B:Q8_0", 128),
    ("Llama-3.1-8B:Q4_K", 128),
    ("Llama-3.2-1B:Q8_0", 128),
)
ARCHITECTURES = ("sm_75", "sm_80", "sm_89", "sm_90a")  # that a record must have
LONG = 120  # seconds of a test, after which it is said where it is: a kernel may never end


def digest(root: Path = ROOT, beside: Sequence[str] = ()) -> str:
    """Of the code below `cuda` and `ggpy/kernels`, and of what is beside them: names of files, and
    what is in them without comments and docstrings; where lines of CUDA and C++ are broken does not
    matter either.
    """
    total = hashlib.sha256()
    places = [root / place for place in (*KERNELS, *beside)]
    for path in sorted(p for place in places for p in (place, *place.rglob("*")) if p.is_file()):
        if path.suffix in (".cu", ".cuh", ".h", ".cpp", ".py"):
            text = path.read_text(encoding="utf-8")
            code = python_code(text) if path.suffix == ".py" else cuda_code(text)
            total.update(f"{path.relative_to(root).as_posix()} {len(code)}\n{code}".encode())
    return total.hexdigest()


def python_code(text: str) -> str:
    """The lines of a module without docstrings, comments and blank lines."""
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        body = getattr(node, "body", None)
        first = body[0] if isinstance(body, list) and body else None
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
            for i in range(first.lineno - 1, first.end_lineno or first.lineno):
                lines[i] = ""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    return "\n".join(line.rstrip() for line in lines if line.strip())


_CUDA_TOKEN = re.compile(
    r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\'|^[ \t]*\#(?:\\\n|[^\n])*'
    r"|[\w.]+|[^\w\s]",
    re.DOTALL | re.MULTILINE,
)


def cuda_code(text: str) -> str:
    """The tokens of a CUDA source without comments; a directive of the preprocessor is a line."""
    tokens = (token.strip() for token in _CUDA_TOKEN.findall(text.replace("\r\n", "\n")))
    kept = (t for t in tokens if not t.startswith(("//", "/*")))
    return "\n".join(" ".join(t.split("//")[0].split()) if t.startswith("#") else t for t in kept)


def main(argv: list[str] | None = None) -> int:
    """Run the program; its exit status."""
    options = parser().parse_args(argv)
    return ended(lambda: record(options), program="ggpy record_gpu")


def record(options: argparse.Namespace) -> int:
    """Test, measure, and write the file, after each architecture; ValueError without a GPU."""
    from ggpy.device import NoGpu, probe

    if options.emulator:
        return note(options.output, EMULATOR, emulator_run(options.numprocesses))
    asked = [simulated.asked()]
    if options.all:
        asked = [None, *(arch for arch in ARCHITECTURES if arch in simulated.SHARED_BYTES)]
    status = 0
    for arch in asked:
        simulated.ask(arch)
        gpu = probe(int(options.device.partition(":")[2] or 0))
        if isinstance(gpu, NoGpu):
            raise ValueError(f"no GPU to test on: {gpu.reason}")
        status |= note(options.output, gpu.arch, one_run(gpu, options))
    return status


def note(record: Path, name: str, run: dict[str, Any]) -> int:
    """Write a run to the record, in place of the one with this name; 1 if it was no success."""
    runs = read(record) | {name: run}
    write_whole(record, json.dumps(dict(sorted(runs.items())), indent=2) + "\n")
    tests = run["tests"]
    print(f"{record}: {name}: {json.dumps(tests)}", file=sys.stderr)
    return int(bool(bad(tests)) or not tests["passed"])


def bad(tests: Mapping[str, Any]) -> list[str]:
    """What went wrong in a run, of what tells something about kernels: not the times of a GPU that
    several processes share, and not modules of the server, whose packages a GPU's machine may lack.
    """
    missing = [name for name in tests["not imported"] if not name.startswith(OF_SERVER)]
    told = {*TIMED, *tests.get("replaced", {})}
    return [name for name in tests["failed"] if name not in told] + missing


def read(path: Path) -> dict[str, Any]:
    """The runs in a record, by architecture, and that of the emulator."""
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}


def one_run(gpu: Gpu, options: argparse.Namespace) -> dict[str, Any]:
    """The tests on a GPU, or on what it is used as, and what it decodes with."""
    before = digest()
    return {
        "date": today(),
        **machine(gpu),
        "digest": before,
        "tests": run_tests(["-m", "gpu"], "worksteal", options.numprocesses),
        "speeds": {} if options.no_speeds else speeds(options.device),
    }


def emulator_run(processes: int) -> dict[str, Any]:
    """The tests of kernels, and of what launches them, without a GPU."""
    from ggpy.device import toolkit

    before = digest(beside=OF_EMULATOR)
    return {
        "date": today(),
        "cuda compiler": toolkit.nvrtc_version(),
        "digest": before,
        "tests": run_tests([*EMULATED, "-m", "not gpu"], "loadfile", processes),
    }


def today() -> str:
    """The date, in UTC."""
    return datetime.datetime.now(datetime.timezone.utc).date().isoformat()


def machine(gpu: Gpu) -> dict[str, str]:
    """What ran the tests."""
    from ggpy.device import toolkit

    return {
        "gpu": gpu.name,
        "compiled for": gpu.target,
        "driver": _driver_version(gpu.ordinal),
        "cuda of the driver": gpu.driver,
        "cuda compiler": toolkit.nvrtc_version(),
    }


def run_tests(which: Sequence[str], dist: str, processes: int) -> dict[str, float]:
    """The tests that arguments of pytest choose: how many passed, failed and were skipped, and
    seconds. dist: how pytest-xdist, which one process does not need, deals them to several.
    """
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", *which, f"--junitxml={report}"]
        command += ["-o", f"faulthandler_timeout={LONG}"]
        command += ["-n", str(processes), "--dist", dist] if processes > 1 else []
        subprocess.run(command, cwd=ROOT, stdout=sys.stderr)
        text = report.read_text(encoding="utf-8")
    return {**results(text), "seconds": round(time.monotonic() - started)}


def results(report: str) -> dict[str, Any]:
    """Passed and skipped of a JUnit report, and the names of what failed; an error in a fixture is
    a failure. Apart: modules that could not be imported, for which packages were missing.
    """
    found: dict[str, Any] = {"passed": 0, "failed": [], "skipped": 0, "not imported": []}
    for case in ET.fromstring(report).iter("testcase"):
        name = "::".join(filter(None, [case.get("classname"), case.get("name")]))
        kinds = {part.tag for part in case}
        if any("collection failure" in e.get("message", "") for e in case.iter("error")):
            found["not imported"].append(name)
        elif kinds & {"failure", "error"}:
            found["failed"].append(name)
        elif "skipped" in kinds:
            found["skipped"] += 1
        else:
            found["passed"] += 1
    return found


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


def parser() -> Parser:
    found = Parser("record_gpu", "Run the GPU tests, and record the result in the checkout.")
    found.add_argument("--device", default="cuda:0", help="the GPU (cuda:0)")
    found.add_argument(
        "-n", "--numprocesses", type=positive, default=1, metavar="N",
        help="test processes (1); a first run mostly compiles, which several do faster",
    )  # fmt: skip
    which = found.add_mutually_exclusive_group()
    add_option(which)
    which.add_argument("--all", action="store_true", help="every architecture of the record")
    which.add_argument(
        "--emulator", action="store_true", help="tests of kernels on the emulator; uses no GPU"
    )
    found.add_argument("--no-speeds", action="store_true", help="run the tests, but no benchmark")
    found.add_argument(
        "-o", "--output", type=Path, default=RECORD, metavar="FILE",
        help=f"the record (tests/{RECORD.name})",
    )  # fmt: skip
    return found


if __name__ == "__main__":
    sys.exit(main())
