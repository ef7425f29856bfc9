"""Write tests/golden/quantize.json: what llama-quantize makes of the models of quantize_cases.

    python tests/golden/make_quantize.py LLAMA_QUANTIZE SMOLLM2.gguf

LLAMA_QUANTIZE is llama.cpp's program, built without -march=native: then its compiler fuses no
products and sums, as in the releases. SMOLLM2.gguf is the model of that name in models/README.md.
Kept are sha256 of whole files, and how many tensors have which type, with a digest of which they
are.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
SUPPORT = FOLDER.parent / "support"
sys.path[:0] = [str(SUPPORT), str(SUPPORT / "kernels"), str(FOLDER.parent.parent)]

from oracle import in_float32  # noqa: E402
from quantize_cases import (  # noqa: E402
    CASES,
    SHARED_MIXES,
    WEIGHTS,
    Case,
    digest_of_file,
    importance_of,
    summary_of_types,
    write_case,
)

from ggpy.quantization.importance import write_gguf  # noqa: E402

TENSOR = re.compile(r"\[ *\d+/ *\d+\] (\S+) .* type = +(\S+), size = .*?(?:-> .* \((\S+)\))?$")
REAL = ("q4_k_m", "q8_0", "q5_k_m", "q6_k", "q3_k_m", "iq4_xs")


def quantize(program: str, folder: Path, *words: object) -> str:
    """What the program says; it runs in `folder`, whose files are named without it."""
    command = [program, *map(str, words)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}:\n{done.stderr[-2000:]}")
    return done.stderr


def types(program: str, folder: Path, case: Case) -> dict[str, str]:
    """Counts and digests by mix, without and with an importance matrix."""
    write_case(case, folder / "case.gguf")
    write_gguf(folder / "case.imatrix.gguf", importance_of(case))
    found = {}
    for mix in SHARED_MIXES:
        for name, options in ((mix, []), (f"{mix} imatrix", ["--imatrix", "case.imatrix.gguf"])):
            said = quantize(program, folder, *options, "--dry-run", "case.gguf", mix)
            lines = (TENSOR.search(line) for line in said.splitlines())
            chosen = {m[1]: (m[3] or m[2]).lower() for m in lines if m}
            if chosen.keys() != case.shapes().keys():
                raise SystemExit(f"{name}: not all tensors are in what the program says")
            found[name] = summary_of_types(chosen)
    return found


def files(program: str, folder: Path) -> dict[str, str]:
    """Digests of files by mix and options."""
    write_case(WEIGHTS, folder / "weights.gguf")
    write_gguf(folder / "weights.imatrix.gguf", importance_of(WEIGHTS))
    found = {}
    for mix in SHARED_MIXES:
        for name, options in ((mix, []), (f"{mix} imatrix", ["--imatrix", "weights.imatrix.gguf"])):
            if mix == "Q2_K_S" and not options:
                continue  # it needs one
            quantize(program, folder, *options, "weights.gguf", "out.gguf", mix)
            found[name] = digest_of_file(folder / "out.gguf")
    return found


def real(program: str, folder: Path, path: Path) -> dict[str, str]:
    """Digests of SmolLM2 in several types."""
    in_float32(path, folder / "f32.gguf")
    found = {}
    for mix in REAL:
        quantize(program, folder, "f32.gguf", "out.gguf", mix)
        found[mix] = digest_of_file(folder / "out.gguf")
    return found


def main(program: str, smollm2: Path) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        golden = {
            "types": {name: types(program, folder, case) for name, case in CASES.items()},
            "files": files(program, folder),
            "smollm2": real(program, folder, smollm2),
        }
    text = json.dumps(golden, indent=1) + "\n"
    (FOLDER / "quantize.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]).resolve())
