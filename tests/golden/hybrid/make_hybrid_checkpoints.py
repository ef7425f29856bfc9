"""Write tests/golden/hybrid/checkpoints.npz and .json: make_checkpoints.py, of gated delta nets.

    S=tests/support PYTHONPATH=.:$S:$S/hybrid:tests/golden \\
        python tests/golden/hybrid/make_hybrid_checkpoints.py LLAMA_CPP

wants what make_checkpoints.py does. The checkpoints have no block that predicts further tokens.
"""

from __future__ import annotations

import json
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import checkpoints
import numpy as np
from hybrid_checkpoints import HYBRID_KINDS, write_hybrid
from make_checkpoints import converted, described, logits

GOLDEN = Path(__file__).resolve().parent


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    sys.path[:0] = [sys.argv[1], str(Path(sys.argv[1], "gguf-py"))]
    from conversion.qwen import Qwen3NextModel

    Qwen3NextModel.no_mtp = True
    checkpoints.KINDS.update(HYBRID_KINDS)  # where logits() looks for a kind
    arrays: dict[str, np.ndarray] = {}
    files = {}
    with tempfile.TemporaryDirectory() as work:
        for name, kind in HYBRID_KINDS.items():
            folder = write_hybrid(Path(work, name), name)
            arrays |= logits(folder, name)
            files[name] = described(converted(folder, Path(work, f"{name}.gguf"), kind.pre))
    np.savez_compressed(GOLDEN / "checkpoints.npz", **arrays)
    made_by = {name: version(name) for name in ("torch", "transformers")}
    text = json.dumps({"made_by": made_by, "files": files}, indent=1)
    (GOLDEN / "checkpoints.json").write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
