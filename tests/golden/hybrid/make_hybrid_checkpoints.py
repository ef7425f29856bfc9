"""Write tests/golden/hybrid/checkpoints.npz and .json: make_checkpoints.py, of gated delta nets.

    S=tests/support PYTHONPATH=.:$S:$S/hybrid:tests/golden \\
        python tests/golden/hybrid/make_hybrid_checkpoints.py LLAMA_CPP [KIND ...]

makes and wants what make_checkpoints.py does. The checkpoints have no block that predicts further
tokens.
"""

from __future__ import annotations

from pathlib import Path

from hybrid_checkpoints import HYBRID_KINDS, write_hybrid
from make_checkpoints import make, use_llama_cpp

GOLDEN = Path(__file__).resolve().parent


def main() -> None:
    wanted = use_llama_cpp(__doc__)
    from conversion.qwen import Qwen3NextModel

    Qwen3NextModel.no_mtp = True
    make(GOLDEN, HYBRID_KINDS, write_hybrid, wanted)


if __name__ == "__main__":
    main()
