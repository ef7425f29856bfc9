"""Write tests/golden/moe/checkpoints.npz and .json: make_checkpoints.py, of experts.

    S=tests/support PYTHONPATH=.:$S:$S/moe:tests/golden \\
        python tests/golden/moe/make_moe_checkpoints.py LLAMA_CPP [KIND ...]

makes all, or those of some kinds, and wants what make_checkpoints.py does, with transformers 5
(whose experts are in one tensor).
"""

from __future__ import annotations

import json
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import numpy as np
from checkpoints import KINDS
from make_checkpoints import converted, described, logits
from moe_checkpoints import MOE_KINDS, write_moe

GOLDEN = Path(__file__).resolve().parent


def main() -> int:
    if len(sys.argv) < 2:
        print(__doc__, file=sys.stderr)
        return 2
    sys.path[:0] = [sys.argv[1], str(Path(sys.argv[1], "gguf-py"))]
    from conversion import ModelBase
    from conversion.base import TextModel
    from conversion.hunyuan import HunYuanMoEModel

    ModelBase.no_mtp = True  # as --no-mtp
    TextModel._set_vocab_glm = TextModel._set_vocab_gpt2  # these vocabularies have no <|user|>
    HunYuanMoEModel.set_vocab = TextModel.set_vocab  # nor have they tiktoken's ranks
    KINDS.update(MOE_KINDS)  # where `logits` looks
    wanted = sys.argv[2:] or list(MOE_KINDS)
    old = json.loads((GOLDEN / "checkpoints.json").read_text(encoding="utf-8"))["files"]
    arrays = {key: found for key, found in np.load(GOLDEN / "checkpoints.npz").items()
              if key.partition("/")[0] not in wanted}  # fmt: skip
    files = {name: found for name, found in old.items() if name not in wanted}
    with tempfile.TemporaryDirectory() as work:
        for name in wanted:
            kind, folder = MOE_KINDS[name], Path(work, name)
            write_moe(folder, name)
            arrays |= logits(folder, name)
            files[name] = described(converted(folder, Path(work, f"{name}.gguf"), kind.pre))
    np.savez_compressed(GOLDEN / "checkpoints.npz", **arrays)
    made_by = {name: version(name) for name in ("torch", "transformers")}
    text = json.dumps({"made_by": made_by, "files": files}, indent=1)
    (GOLDEN / "checkpoints.json").write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
