"""Write tests/golden/moe/checkpoints.npz and .json: make_checkpoints.py, of experts.

    S=tests/support PYTHONPATH=.:$S:$S/moe:tests/golden \\
        python tests/golden/moe/make_moe_checkpoints.py LLAMA_CPP [KIND ...]

makes all, or those of some kinds, and wants what make_checkpoints.py does, with transformers 5
(whose experts are in one tensor).
"""

from __future__ import annotations

from pathlib import Path

from make_checkpoints import make, use_llama_cpp
from moe_checkpoints import MOE_KINDS, write_moe

GOLDEN = Path(__file__).resolve().parent


def main() -> None:
    wanted = use_llama_cpp(__doc__)
    from conversion import ModelBase
    from conversion.base import TextModel
    from conversion.hunyuan import HunYuanMoEModel

    ModelBase.no_mtp = True  # as --no-mtp
    TextModel._set_vocab_glm = TextModel._set_vocab_gpt2  # these vocabularies have no <|user|>
    HunYuanMoEModel.set_vocab = TextModel.set_vocab  # nor have they tiktoken's ranks
    make(GOLDEN, MOE_KINDS, write_moe, wanted)


if __name__ == "__main__":
    main()
