"""Write tests/golden/<model>.json: how llama.cpp continues a dozen prompts, greedily.

    python tests/golden/make_golden.py smollm2 FILE.gguf
    python tests/golden/make_golden.py gemma3-270m FILE.gguf

The weights are dequantised to float32 first: on blocks llama.cpp rounds activations to 8 bits,
which moves logits by up to a few tenths and so says little about another runtime. Made with
xllamacpp; the versions are in the files. Tests compare them without llama.cpp.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parent / "support"))

from oracle import Oracle, in_float32, xllamacpp  # noqa: E402

N_TOKENS = 32
PROMPTS = [
    "The capital of France is",
    "Once upon a time, there was a small robot who",
    "def fibonacci(n):\n",
    "1, 1, 2, 3, 5, 8,",
    "Water boils at a temperature of",
    "Die Hauptstadt von Deutschland ist",
    "The three primary colors are red,",
    "Q: What is the largest planet in the solar system?\nA:",
    "Roses are red,\nviolets are blue,\n",
    "In 1969, Neil Armstrong became the first person to",
    "\u65e5\u672c\u306e\u9996\u90fd\u306f",
    "To make a cup of tea, first",
]


def main(name: str, path: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        cases = continue_all(Oracle(in_float32(path, Path(folder, "f32.gguf")), n_ctx=512))
    golden = {
        "model": path.name,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "oracle": f"xllamacpp {xllamacpp.__version__}, weights dequantised to float32",
        "cases": cases,
    }
    (FOLDER / f"{name}.json").write_text(to_json(golden), encoding="utf-8")


def continue_all(oracle: Oracle) -> list[dict]:
    """Prompt, its ids, and what follows, for each of PROMPTS."""
    cases = []
    for prompt in PROMPTS:
        ids = oracle.tokenize(prompt)
        answer = oracle.greedy(ids, N_TOKENS)
        cases.append({"prompt": prompt, "prompt_ids": ids, "ids": answer.ids, "text": answer.text})
    return cases


def to_json(golden: dict) -> str:
    """JSON with a list of ids on one line."""
    text = json.dumps(golden, indent=1, ensure_ascii=False)
    return re.sub(r"\[[\d,\s]*\]", lambda m: " ".join(m[0].split()), text) + "\n"


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
