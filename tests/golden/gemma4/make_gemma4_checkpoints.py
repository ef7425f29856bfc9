"""Write tests/golden/gemma4/checkpoints.npz and .json: make_checkpoints.py, of Gemma 4.

    S=tests/support PYTHONPATH=.:$S:$S/gemma4:tests/golden \\
        python tests/golden/gemma4/make_gemma4_checkpoints.py LLAMA_CPP

wants what make_checkpoints.py does, with transformers 5.
"""

from __future__ import annotations

import json
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import numpy as np
from checkpoints import KINDS
from gemma4_checkpoints import GEMMA4_KINDS, write_gemma4
from make_checkpoints import converted, described, logits

GOLDEN = Path(__file__).resolve().parent


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    sys.path[:0] = [sys.argv[1], str(Path(sys.argv[1], "gguf-py"))]
    KINDS.update(GEMMA4_KINDS)  # where `logits` looks for classes
    arrays: dict[str, np.ndarray] = {}
    files = {}
    with tempfile.TemporaryDirectory() as work:
        for name in GEMMA4_KINDS:
            folder = write_gemma4(Path(work, name), name)
            arrays |= logits(folder, name)
            files[name] = described(converted(folder, Path(work, f"{name}.gguf"), ""))
    np.savez_compressed(GOLDEN / "checkpoints.npz", **arrays)
    made_by = {name: version(name) for name in ("torch", "transformers")}
    text = json.dumps({"made_by": made_by, "files": files}, indent=1)
    (GOLDEN / "checkpoints.json").write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
