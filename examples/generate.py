"""Load a model, stream the continuation of a text, then an answer in a chat.

python examples/generate.py                                # the tiny llama, whose text is noise
python examples/generate.py smollm2 -p "The sky is"        # a known model, fetched once
python examples/generate.py model.gguf --device cuda
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import ggpy

TINY = Path(__file__).resolve().parent.parent / "models" / "tiny" / "llama.gguf"


def main() -> None:
    """Run the example."""
    options = parse()
    with ggpy.load(options.model, options.device) as model:
        print(f"{model!r}\n")
        continue_text(model, options.prompt, options.max_tokens)
        chat(model, options.question, options.max_tokens)


def continue_text(model: ggpy.Model, prompt: str, max_tokens: int) -> None:
    """Print a continuation of the prompt as it is generated; a seed makes it the same each time."""
    print(prompt, end="", flush=True)
    start, n_tokens = time.perf_counter(), 0
    for piece in model.generate(prompt, max_tokens=max_tokens, temperature=0.8, seed=1):
        print(piece.text, end="", flush=True)
        n_tokens += 1
    seconds = time.perf_counter() - start
    print(f"\n\n{n_tokens} tokens, {n_tokens / seconds:.1f} a second\n")


def chat(model: ggpy.Model, question: str, max_tokens: int) -> None:
    """Print the answer to a message, through the model's chat template."""
    messages = [
        {"role": "system", "content": "You answer in one sentence."},
        {"role": "user", "content": question},
    ]
    print(f"user: {question}\nassistant: ", end="", flush=True)
    for piece in model.chat(messages, max_tokens=max_tokens):
        print(piece.text, end="", flush=True)
    print()


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Stream a text, then a chat.")
    parser.add_argument("model", nargs="?", default=str(TINY), help="a .gguf file, or a known name")
    parser.add_argument("-p", "--prompt", default="The sky is", help="the text to continue")
    parser.add_argument("-q", "--question", default="Why is the sky blue?", help="the message")
    parser.add_argument("-n", "--max-tokens", type=int, default=40, help="of each answer at most")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    return parser.parse_args()


if __name__ == "__main__":
    main()
