"""`ggpy make_benchmarks` (for developers): measure what BENCHMARKS.md shows, and write the page.

    ggpy make_benchmarks [--only models,kernels] [--name h200] [-o benchmarks]

Each run is one command of `ggpy`, and its JSON becomes FOLDER/NAME-RUN.json; a run that fails
leaves the file as it was. Exit status: 0, 1 when a run failed, 2 without a GPU.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

from ggpy.cli.parser import Parser
from ggpy.util.outcome import ended

ROOT = Path(__file__).resolve().parent.parent
LARGE, SMALL, TINY = "Llama-3.1-8B", "Llama-3.2-1B", "SmolLM2-135M"
FORMATS = (  # all that are not among the models
    *("Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q5_K", "Q6_K", "IQ4_XS", "IQ4_NL", "IQ3_S"),
    *("IQ3_XXS", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_M", "IQ1_S", "TQ1_0", "TQ2_0", "MXFP4"),
    *("NVFP4", "Q1_0", "Q2_0", "BF16", "F32", "W8A16", "W4A16", "W8A8", "W8A8_FP8"),
)
FAMILIES = (LARGE, SMALL, "Qwen3-8B", "Qwen3-4B", "Gemma-3-12B", "Gemma-3-4B", "Phi-4")
RUNS = {
    "models": [
        *("bench", "--synthetic", f"{LARGE}:Q8_0,{LARGE}:Q4_0,{LARGE}:Q4_K,{LARGE}:F16"),
        *("--synthetic", f"{SMALL}:Q8_0,{SMALL}:Q4_0,{TINY}:Q8_0", "-p", "512,2048", "-n", "128"),
    ],
    "prompts": [  # in steps of 2048 tokens, and behind a deep context
        *("bench", "--synthetic", f"{LARGE}:Q8_0,{LARGE}:Q4_0,{LARGE}:Q4_K,{LARGE}:F16"),
        *("-p", "2048", "-n", "0", "-ub", "2048", "-d", "0,16384"),
    ],
    "formats": [
        "bench",
        *("--synthetic", ",".join(f"{LARGE}:{name}" for name in FORMATS)),
        *("-p", "512", "-n", "128"),
    ],
    "batch": [
        *("bench", "--synthetic", f"{LARGE}:Q8_0,{LARGE}:Q4_K"),
        *("-p", "0", "-n", "128", "--batch", "1-64*2"),
    ],
    "depth": [
        *("bench", "--synthetic", f"{LARGE}:Q8_0"),
        *("-p", "0", "-n", "128", "-d", "4096,16384,32768"),
    ],
    "families": [  # as people have them
        *("bench", "--synthetic", ",".join(f"{name}:Q4_K_M" for name in FAMILIES)),
        *("-p", "512", "-n", "128"),
    ],
    "mixtures": [  # and hybrids
        *("bench", "--synthetic", "Qwen3-30B-A3B:Q4_K_M,gpt-oss-20b:MXFP4_MOE"),
        *("--synthetic", "gpt-oss-120b:MXFP4_MOE,Qwen3.5-9B:Q4_K_M,Gemma-4-E4B:Q4_K_M"),
        *("-p", "512,2048", "-ub", "2048", "-n", "128", "--batch", "1,8,64", "-r", "3"),
    ],
    "profile": [
        *("bench", "--synthetic", f"{LARGE}:Q8_0,{LARGE}:Q4_K,{SMALL}:Q8_0,{TINY}:Q8_0"),
        *("-n", "64", "--batch", "1,8", "--profile"),
    ],
    "kernels": [
        "bench_kernels",
        "-k",
        "^((?!tests/support/kernels/cases.py).)*$",
    ],  # in the shapes of models
}


def main(argv: list[str] | None = None) -> int:
    """The program; its exit status."""
    options = parser().parse_args(argv)
    return ended(lambda: run(options), program="ggpy make_benchmarks")


def run(options: argparse.Namespace) -> int:
    """Measure, and write the page; ValueError for unknown runs, and without a GPU."""
    chosen = options.only.split(",") if options.only else [*RUNS]
    unknown = [name for name in chosen if name not in RUNS]
    if unknown:
        raise ValueError(f"no run {unknown[0]!r}: {', '.join(RUNS)}")
    name = options.name or name_of_gpu()
    if not name:
        raise ValueError("there is no GPU to measure")
    options.output.mkdir(parents=True, exist_ok=True)
    failed = [one for one in chosen if not measure(one, options.output / f"{name}-{one}.json")]
    command = [sys.executable, "-m", "ggpy", "bench", "--report", str(options.output)]
    written = subprocess.run(command, cwd=ROOT).returncode == 0
    return 1 if failed or not written else 0


def parser() -> Parser:
    found = Parser("make_benchmarks", "Measure what BENCHMARKS.md shows, and write the page.")
    found.add_argument("--only", metavar="RUN,...", help=f"some of {', '.join(RUNS)}")
    found.add_argument("--name", help="prefix of files and sections (the GPU's name)")
    found.add_argument(
        "-o", "--output", type=Path, default=ROOT / "benchmarks", metavar="FOLDER",
        help="folder of the JSON files; the page is written beside it (benchmarks)",
    )  # fmt: skip
    return found


def name_of_gpu() -> str:
    """The first GPU's, in short: "h200"; empty if there is none."""
    from ggpy.device import NoGpu, probe

    found = probe()
    return "" if isinstance(found, NoGpu) else found.name.split()[-1].lower()


def measure(run: str, path: Path) -> bool:
    """Whether the run gave results, which are then in the file."""
    from ggpy.util.output_file import write_whole

    started = time.monotonic()
    command = [sys.executable, "-m", "ggpy", *RUNS[run], "-o", "json"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE)
    try:
        json.loads(done.stdout)
    except ValueError:
        print(f"{run}: failed with {done.returncode}", file=sys.stderr)
        return False
    write_whole(path, done.stdout)
    said = "" if done.returncode == 0 else f", but ended with {done.returncode}"
    print(f"{path}: {time.monotonic() - started:.0f} s{said}", file=sys.stderr)
    return done.returncode == 0


if __name__ == "__main__":
    sys.exit(main())
