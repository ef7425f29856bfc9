"""Write tests/golden/moe/checkpoints.npz and .json: make_checkpoints.py, of experts.

    S=tests/support PYTHONPATH=.:$S:$S/moe:tests/golden \\
        python tests/golden/moe/make_moe_checkpoints.py LLAMA_CPP

wants what make_checkpoints.py does, with transformers 5 (whose experts are in one tensor).
"""

from __future__ import annotations

import json
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import numpy as np
from make_checkpoints import converted, described, logits
from moe_checkpoints import MOE_KINDS, write_moe

GOLDEN = Path(__file__).resolve().parent


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    sys.path[:0] = [sys.argv[1], str(Path(sys.argv[1], "gguf-py"))]
    arrays: dict[str, np.ndarray] = {}
    files = {}
    with tempfile.TemporaryDirectory() as work:
        for name, kind in MOE_KINDS.items():
            folder = write_moe(Path(work, name), name)
            arrays |= logits(folder, name)
            files[name] = described(converted(folder, Path(work, f"{name}.gguf"), kind.pre))
    np.savez_compressed(GOLDEN / "checkpoints.npz", **arrays)
    made_by = {name: version(name) for name in ("torch", "transformers")}
    text = json.dumps({"made_by": made_by, "files": files}, indent=1)
    (GOLDEN / "checkpoints.json").write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
