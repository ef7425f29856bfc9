"""Write tests/golden/checkpoints.npz and .json: what transformers computes with the checkpoints of
tests/checkpoints.py, and what llama.cpp's converter writes for them.

    PYTHONPATH=.:tests/support python tests/golden/make_checkpoints.py LLAMA_CPP [KIND ...]

makes all, or those of some kinds, and wants torch (the CPU's is enough), transformers and
safetensors, and a folder with llama.cpp's sources, whose conversion/ is called as it is but for the
names of pre-tokenizers, which it knows by digests that vocabularies as small as these are not
among, and for GLM-4's special tokens, which these vocabularies have not. The .npz has the ids and
the logits of the last places in float32, the .json all metadata but the tokens, and a digest of
each tensor.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from checkpoints import KINDS, N_VOCAB, Kind, write

GOLDEN = Path(__file__).resolve().parent
ROWS = 3  # places whose logits are kept
LENGTHS = {"phi3": (24, 40)}  # before and beyond the context that LongRoPE stretches
N_TOKENS = 40


def logits(folder: Path, name: str) -> dict[str, np.ndarray]:
    """What transformers computes, by "name/length/ids" and "name/length/logits"."""
    import torch
    import transformers

    (kind,) = json.loads((folder / "config.json").read_text(encoding="utf-8"))["architectures"]
    model = (
        getattr(transformers, kind)
        .from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        .eval()
    )
    found = {}
    for n in LENGTHS.get(name, (N_TOKENS,)):
        ids = np.random.default_rng(n).integers(3, N_VOCAB, n)
        with torch.inference_mode():
            out = model(torch.tensor(ids)[None]).logits[0, -ROWS:].float().numpy()
        found |= {f"{name}/{n}/ids": ids.astype(np.int32), f"{name}/{n}/logits": out}
    return found


def converted(folder: Path, out: Path, pre: str) -> Path:
    """llama.cpp's file of a checkpoint, all in F32."""
    import gguf
    import torch
    from conversion import ModelBase, get_model_class
    from conversion.base import TextModel, get_model_architecture
    from conversion.glm import Glm4Model

    TextModel.get_vocab_base_pre = lambda self, tokenizer: pre
    Glm4Model.set_vocab = TextModel.set_vocab
    settings = ModelBase.load_hparams(folder, False)
    kind = get_model_class(get_model_architecture(settings, TextModel.model_type))
    with torch.inference_mode():
        kind(folder, gguf.LlamaFileType.ALL_F32, out).write()
    return out


def described(path: Path) -> dict[str, Any]:
    """Metadata without what tokens are, and digests of tensors."""
    from ggpy.gguf import File

    with File(path) as file:
        plain = {key: value for key, value in file.metadata.items() if not hasattr(value, "__len__")
                 or isinstance(value, str)}  # fmt: skip
        arrays = {key: len(value) for key, value in file.metadata.items() if key not in plain}
        return {
            "metadata": {key: [file.types[key], value] for key, value in plain.items()},
            "arrays": {key: [file.types[key], n] for key, n in arrays.items()},
            "tensors": {
                name: hashlib.sha256(np.ascontiguousarray(t.data)).hexdigest()[:16]
                for name, t in file.tensors.items()
            },
        }


def make(
    golden: Path,
    kinds: Mapping[str, Kind],
    write_kind: Callable[[Path, str], Path],
    wanted: Sequence[str] = (),
    known: Callable[[Path, str], Path] = lambda folder, name: folder,
) -> None:
    """Write golden/checkpoints.npz and .json of these kinds; where some are wanted, what is there
    of the others stays. known: the same checkpoint as one that transformers has a class for.
    """
    arrays: dict[str, np.ndarray] = {}
    files: dict[str, Any] = {}
    old = dict(np.load(golden / "checkpoints.npz")) if wanted else {}
    before = json.loads((golden / "checkpoints.json").read_text(encoding="utf-8")) if wanted else {}
    with tempfile.TemporaryDirectory() as work:
        for name, kind in kinds.items():
            if wanted and name not in wanted:
                arrays |= {key: x for key, x in old.items() if key.partition("/")[0] == name}
                files[name] = before["files"][name]
                continue
            folder = write_kind(Path(work, name), name)
            arrays |= logits(known(folder, name), name)
            files[name] = described(converted(folder, Path(work, f"{name}.gguf"), kind.pre))
    np.savez_compressed(golden / "checkpoints.npz", **arrays)
    made_by = {name: version(name) for name in ("torch", "transformers")}
    text = json.dumps({"made_by": made_by, "files": files}, indent=1)
    (golden / "checkpoints.json").write_text(text + "\n", encoding="utf-8")


def use_llama_cpp(doc: str | None) -> list[str]:
    """The kinds that the command line asks for, llama.cpp's conversion importable; exits if there
    is no folder of it.
    """
    if len(sys.argv) < 2:
        print(doc, file=sys.stderr)
        sys.exit(2)
    sys.path[:0] = [sys.argv[1], str(Path(sys.argv[1], "gguf-py"))]
    return sys.argv[2:]


if __name__ == "__main__":
    make(GOLDEN, dict(KINDS), write, use_llama_cpp(__doc__))
