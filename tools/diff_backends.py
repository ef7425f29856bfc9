"""`ggpy diff_backends` (for developers): find the first op whose output differs on two backends.

    ggpy diff_backends smollm2 cpu cuda [--prompt TEXT] [--tolerance X] [-v]

Both backends run the same prompt. Errors are relative to the largest value of each output. Exit
status: 0 when no op differs, 1 when one does.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from ggpy.cli.parser import MODEL, Parser
from ggpy.util.outcome import ended

if TYPE_CHECKING:
    from ggpy.backends.trace import Difference, Record
    from ggpy.gguf import File
    from ggpy.tokenizer import Tokenizer

PROMPT = "The capital of France is"


def main(argv: list[str] | None = None) -> int:
    """Run the program; its exit status."""
    options = parser().parse_args(argv)
    return ended(lambda: compare(options), program="ggpy diff_backends")


def compare(options: argparse.Namespace) -> int:
    """Print the first op that differs; 1 if there is one."""
    from ggpy import hub
    from ggpy.backends.trace import errors
    from ggpy.gguf import File
    from ggpy.tokenizer import Tokenizer

    with File(hub.resolve(options.model)) as file:
        tokenizer = Tokenizer.from_gguf(file)
        ids = tokenizer.encode(options.prompt, parse_special=True)
        ours, theirs = (run(file, tokenizer, ids, device) for device in options.devices)
    found = errors(ours, theirs)
    first = next((d for d in found if not d.error <= options.tolerance), None)
    if options.verbose:
        print("\n".join(map(_line, found)))
    if first is None:
        worst = max(found, key=lambda d: d.error)
        print(f"no op differs by more than {options.tolerance:g}; the largest is {_line(worst)}")
        return 0
    print(f"{' and '.join(options.devices)} differ first at {_line(first)}")
    return 1


def run(file: File, tokenizer: Tokenizer, ids: list[int], device: str) -> list[Record]:
    """What every op returned for one step with all ids."""
    from ggpy import arch
    from ggpy.backends import choose
    from ggpy.backends.trace import Trace
    from ggpy.runtime.engine import Engine

    ops = Trace(choose(device))
    decoder = arch.load(file, ops, len(ids))
    Engine(decoder, ops, tokenizer, len(ids), n_batch=len(ids)).logits(ids)
    return ops.records


def _line(d: Difference) -> str:
    return f"layer {d.layer}, {d.op}: {d.error:.2e}"


def parser() -> Parser:
    found = Parser("diff_backends", "Find the first op whose output differs on two backends.")
    add = found.add_argument
    add("model", metavar="MODEL", help=MODEL)
    add("devices", nargs=2, metavar="DEVICE", help="cpu, numpy, cuda or cuda:N, twice")
    add("--prompt", metavar="TEXT", default=PROMPT, help=f"the prompt ({PROMPT})")
    add("--tolerance", type=float, default=1e-3, metavar="X", help="the largest error (0.001)")
    add("-v", "--verbose", action="store_true", help="print every op's error")
    return found


if __name__ == "__main__":
    sys.exit(main())
