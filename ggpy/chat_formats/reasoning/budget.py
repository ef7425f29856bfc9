"""A budget of reasoning for one answer in a chat format: which ids end it, and where it stands."""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING

from ...sampling.reasoning import ReasoningBudget, ReasoningMarkers
from ..channels.messages import MESSAGE
from ..chat_format import ChatFormat

if TYPE_CHECKING:
    from ...sampling import TokenMask
    from ...tokenizer import Tokenizer


def reasoning_budget(
    chat_format: ChatFormat,
    tokenizer: Tokenizer,
    limit: int,
    message: str = "",
    *,
    opened: bool = False,
    mask: TokenMask | None = None,
) -> ReasoningBudget | None:
    """A mask that ends an answer's reasoning after `limit` tokens, with a message; None where the
    format has no reasoning.

    opened: the prompt ends inside reasoning. mask: what the answer must match besides.
    """
    channels = chat_format.channels
    closer = channels.thought_close if channels else chat_format.reasoning_close
    if not closer or not (channels or chat_format.reasoning_open or opened):
        return None
    after = channels.between if channels else ""
    encode = partial(tokenizer.encode, add_special=False, parse_special=True)
    special = chat_format.needs_special(tokenizer)
    return ReasoningBudget(
        limit,
        _markers(chat_format, tokenizer),
        encode(message + closer + after),
        encode(closer + after),
        tokenizer.pieces(special).__getitem__,
        tokenizer.n_vocab,
        opened=opened,
        mask=mask,
    )


def _markers(chat_format: ChatFormat, tokenizer: Tokenizer) -> ReasoningMarkers:
    """Where the format has reasoning in the bytes of an answer."""

    def is_token(marker: str) -> bool:
        return len(tokenizer.encode(marker, add_special=False, parse_special=True)) == 1

    if (channels := chat_format.channels) is not None:
        header = channels.thought_header
        return ReasoningMarkers(
            _pattern(header + re.escape(MESSAGE)),
            channels.thought_close.encode(),
            tuple(end.encode() for end in channels.ends),
            begun=_pattern(f"(?:{header})$") if is_token(MESSAGE) else None,
        )
    opener, closer = chat_format.reasoning_open, chat_format.reasoning_close
    spelled = not is_token(closer)
    if not chat_format.reasoning_anywhere:
        start = _pattern(r"\A\s*" + re.escape(opener)) if opener else _pattern(r"(?!)")
        return ReasoningMarkers(
            start, closer.encode(), start=opener.encode() or b"\0", spelled=spelled
        )
    first = next((m for m in chat_format.also if opener.startswith(m) and m != opener), "")
    begun = _pattern(re.escape(first) + r"\s*\w*$") if first and is_token(first) else None
    return ReasoningMarkers(
        _pattern(re.escape(opener)), closer.encode(), begun=begun, spelled=spelled
    )


def _pattern(text: str) -> re.Pattern[bytes]:
    return re.compile(text.encode())
