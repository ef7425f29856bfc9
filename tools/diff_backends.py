"""Run one prompt through two backends and show the first op where they part.

    ggpy diff_backends MODEL.gguf cpu cuda [--prompt TEXT] [--tolerance X] [-v]

Errors are relative to the largest value of each output. Exit status: 0 when no op differs, 1 when
one does.
"""

from __future__ import annotations

import argparse
import sys

from ggpy import arch
from ggpy.backends import choose
from ggpy.backends.trace import Difference, Record, Trace, errors
from ggpy.gguf import File
from ggpy.runtime.engine import Engine
from ggpy.tokenizer import Tokenizer
from ggpy.util.outcome import ended


def main(argv: list[str] | None = None) -> int:
    """The program; its exit status."""
    options = _parser().parse_args(argv)
    return ended(lambda: compare(options))


def compare(options: argparse.Namespace) -> int:
    """Say where the two part; 1 if they do."""
    with File(options.model) as file:
        tokenizer = Tokenizer.from_gguf(file)
        ids = tokenizer.encode(options.prompt, parse_special=True)
        ours, theirs = (run(file, tokenizer, ids, device) for device in options.devices)
    found = errors(ours, theirs)
    first = next((d for d in found if not d.error <= options.tolerance), None)
    if options.verbose:
        print("\n".join(map(_line, found)))
    if first is None:
        worst = max(found, key=lambda d: d.error)
        print(f"no op differs by more than {options.tolerance:g}; most does {_line(worst)}")
        return 0
    print(f"{' and '.join(options.devices)} part first at {_line(first)}")
    return 1


def run(file: File, tokenizer: Tokenizer, ids: list[int], device: str) -> list[Record]:
    """What every op returned for one step with all ids."""
    ops = Trace(choose(device))
    decoder = arch.load(file, ops, len(ids))
    Engine(decoder, ops, tokenizer, len(ids), n_batch=len(ids)).logits(ids)
    return ops.records


def _line(d: Difference) -> str:
    return f"layer {d.layer}, {d.op}: {d.error:.2e}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Show the first op where two backends part.")
    parser.add_argument("model")
    parser.add_argument("devices", nargs=2, metavar="DEVICE", help="cpu, cuda or cuda:N, twice")
    parser.add_argument("--prompt", default="The capital of France is")
    parser.add_argument("--tolerance", type=float, default=1e-3)
    parser.add_argument("-v", "--verbose", action="store_true", help="show every op's error")
    return parser


if __name__ == "__main__":
    sys.exit(main())
