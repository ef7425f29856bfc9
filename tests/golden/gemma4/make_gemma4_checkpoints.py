"""Write tests/golden/gemma4/checkpoints.npz and .json: make_checkpoints.py, of Gemma 4.

    S=tests/support PYTHONPATH=.:$S:$S/gemma4:tests/golden \\
        python tests/golden/gemma4/make_gemma4_checkpoints.py LLAMA_CPP [KIND ...]

makes and wants what make_checkpoints.py does, with transformers 5.
"""

from __future__ import annotations

from pathlib import Path

from gemma4_checkpoints import GEMMA4_KINDS, write_gemma4
from make_checkpoints import make, use_llama_cpp

GOLDEN = Path(__file__).resolve().parent

if __name__ == "__main__":
    make(GOLDEN, GEMMA4_KINDS, write_gemma4, use_llama_cpp(__doc__))
