"""Long texts go another way through the package that encodes, which lets other threads work."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from ggpy.tokenizer import Tokenizer
from ggpy.tokenizer.bpe import LONG_TEXT

QWEN = Path(__file__).resolve().parents[2] / "models" / "tiny" / "qwen2.gguf"


def test_a_long_text_has_the_tokens_of_its_parts() -> None:
    tokenizer = Tokenizer.from_gguf(QWEN)
    line = "the quick brown fox, 123 times\n"
    assert tokenizer.encode(line * LONG_TEXT) == tokenizer.encode(line) * LONG_TEXT


def longest_gap(tokenizer: Tokenizer, text: str) -> float:
    """The longest time in which another thread did not work, as a share of encoding the text."""
    gaps: list[float] = []
    done = threading.Event()

    def watch() -> None:
        last = time.perf_counter()
        while not done.is_set():
            time.sleep(0.0005)
            gaps.append(time.perf_counter() - last)
            last = time.perf_counter()

    thread = threading.Thread(target=watch)
    thread.start()
    start = time.perf_counter()
    tokenizer.encode(text)
    whole = time.perf_counter() - start
    done.set()
    thread.join()
    return max(gaps) / whole


def test_other_threads_work_while_a_long_text_is_encoded() -> None:
    tokenizer, text = Tokenizer.from_gguf(QWEN), " ".join(map(str, range(40_000)))
    assert min(longest_gap(tokenizer, text) for _ in range(5)) < 0.5
