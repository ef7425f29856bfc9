"""The process that tries grammars: requests on stdin, answers on stdout, a line of JSON each.

`trial` starts it as a program, isolated, so it imports nothing of ggpy. The kernel ends it when a
grammar takes too long; an allocation beyond the memory limit fails. It must not know who asks.

Arguments: bytes of address space, bytes of stack, the folder to import llguidance from.
"""

from __future__ import annotations

import json
import sys
import threading
from contextlib import suppress
from typing import Any


class ByteTokens:
    """The smallest vocabulary: a token for each byte, and one that ends."""

    eos_token_id, bos_token_id = 256, None
    tokens = (*(bytes([value]) for value in range(256)), b"<end>")
    special_token_ids = (256,)

    def __call__(self, text: str | bytes) -> list[int]:
        """The tokens of a text."""
        return list(text.encode() if isinstance(text, str) else text)


def limit_memory(nbytes: int) -> None:
    """Bound the address space, where the system can."""
    with suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (nbytes, nbytes))


def limit_time(seconds: float) -> None:
    """Let the kernel end this process after so much processor time from now; 0 is no limit."""
    with suppress(ImportError, AttributeError):
        import signal

        signal.setitimer(signal.ITIMER_PROF, seconds)


def problem(grammar: str, tokenizer: Any) -> str:
    """What llguidance says against a grammar; empty if nothing."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(verbose_errors=False)
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    if not matcher.is_error():
        matcher.compute_bitmask()
    return str(matcher.get_error())


def main() -> None:
    """Answer requests until there are no more."""
    from llguidance import LLTokenizer, TokenizerWrapper

    tokenizer = LLTokenizer(TokenizerWrapper(ByteTokens()), eos_token=256, slices=[])
    for line in sys.stdin.buffer:
        request = json.loads(line)
        limit_time(request["seconds"])
        answer = {"error": problem(request["grammar"], tokenizer)}
        limit_time(0)
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    memory, stack, folder = sys.argv[1:]
    sys.path.append(folder)
    limit_memory(int(memory))
    threading.stack_size(int(stack))
    thread = threading.Thread(target=main)
    thread.start()
    thread.join()
