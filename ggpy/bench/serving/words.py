"""Prompts of a given number of tokens, made of common English words.

The server's tokenizer (`/tokenize`, as in llama.cpp) counts the tokens of each word; without it, a
word counts as one. Words begin with a space, at which most tokenizers cut a text, so the tokens of
words add up. Nothing here knows a server.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping

Count = Callable[[str], Awaitable[int]]  # a text's tokens
REPEATS = 9  # of a word in the text whose tokens are counted
AT_A_TIME = 4  # texts; servers have few threads
TEXT = """
a about above across after again air all along also always among and animal answer any are area
around as ask at back be because been before began being below best better between big bird black
blue boat body book both bring brother build but by call came can car care carry change children
city clear close cold come could country cut day did different do does door down draw each early
earth eat end enough even every example eye face family far farm fast father feel feet few field
find fire first fish five follow food for form found four friend from game gave get girl give go
good great green ground group grow had half hand hard has have he head hear help her here high him
his home horse hour house how idea if important in is it just keep kind king knew know land large
last late learn leave left letter life light like line list little live long look low made make
man many mark may me mean might mile money moon more morning most mother mountain move much music
must my name near need never new next night no north not now number of off often old on once one
"""
WORDS = TEXT.split()


class PromptMaker:
    """Texts with a number of tokens. sizes: word -> tokens of it, with the space before it."""

    def __init__(self, sizes: Mapping[str, int] | None = None) -> None:
        self.is_measured = bool(sizes)
        self.sizes = dict(sizes) if sizes else dict.fromkeys(WORDS, 1)

    def text(self, n: int, draws: random.Random) -> str:
        """A text of n tokens, or of fewer if no word is short enough to fill the rest."""
        found: list[str] = []
        words = list(self.sizes)
        while words := [word for word in words if self.sizes[word] <= n]:
            largest = max(self.sizes[word] for word in words)
            drawn = draws.choices(words, k=n // largest)
            found += drawn
            n -= sum(self.sizes[word] for word in drawn)
        return " ".join(found)


async def measured(count: Count) -> PromptMaker:
    """A maker with the tokens of each word, as `count` counts them, a few words at a time."""
    words, sizes = iter(WORDS), {}

    async def some() -> None:
        for word in words:
            # A token before the first word, or at the end of the text, adds less than half a token
            # to each word.
            sizes[word] = max(1, round(await count(" ".join([word] * REPEATS)) / REPEATS))

    await asyncio.gather(*(some() for _ in range(AT_A_TIME)))
    return PromptMaker({word: sizes[word] for word in WORDS})
