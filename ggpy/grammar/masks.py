"""Grammars compiled for one tokenizer, and the masks of sequences that are written under them.

A compiled grammar is kept for the next sequence; a sequence has a copy of it. Nothing here knows
models, samplers or engines.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cache
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..sampling.mask import n_words
from ..tokenizer import Tokenizer
from ..util.cores import usable_cores
from .errors import GrammarError, GrammarUntried, library, reason
from .lark import to_lark
from .trial import STACK, Trial

MAX_KEPT = 64  # compiled grammars of a tokenizer
ENOUGH_CORES = 4  # for threads that make masks
MAX_THREADS = 8  # that make masks: 64 masks of strings take less than a millisecond then
ENOUGH_SEEN = 4  # masks whose time says how long the others will take
WORTH_THREADS = 1.5e-3  # seconds: below it, waking threads costs more than they save

_trial = Trial()
_stack_lock = threading.Lock()


class GrammarMask:
    """The tokens that a grammar allows next in one sequence: a `TokenMask`."""

    def __init__(self, matcher: Any, n_vocab: int) -> None:
        self._matcher, self._n = matcher, n_words(n_vocab)

    @property
    def finished(self) -> bool:
        """Whether the text is complete and nothing but an end token may follow."""
        return bool(self._matcher.is_stopped() and not self._matcher.is_error())

    def fill(self, row: NDArray[np.int32]) -> None:
        """Writes the bits of the tokens that may follow; GrammarError where llguidance gives up."""
        if len(row) < self._n:
            raise ValueError(f"a mask has {self._n} words, the row {len(row)}")
        row[self._n :] = 0
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, 4 * self._n)
        if self._matcher.is_error():  # its mask then allows to end, which the grammar may not
            raise _too_complex(self._matcher.get_error())

    @staticmethod
    def fill_many(masks: Sequence[GrammarMask], rows: NDArray[np.int32]) -> list[Exception | None]:
        """Writes rows[k, n_words(V)] of k masks; the error of each, or None.

        Most masks take some 10 microseconds, those of bounded strings 100. One thread makes them,
        unless the others would take it more than WORTH_THREADS at the pace of the first ones.
        """
        if rows.shape[1] != masks[0]._n or not rows.flags.c_contiguous:
            raise ValueError(f"masks have {masks[0]._n} words each, the rows {rows.shape}")
        matchers, nbytes = [mask._matcher for mask in masks], 4 * masks[0]._n
        begin = perf_counter()
        for i, (matcher, row) in enumerate(zip(matchers, rows, strict=True)):
            slow = (
                i >= ENOUGH_SEEN and (perf_counter() - begin) / i * (len(masks) - i) > WORTH_THREADS
            )
            if slow and (executor := _executor()) is not None:
                places = [(other, i + j) for j, other in enumerate(matchers[i:])]
                executor.unsafe_compute_mask_ptr(places, rows.ctypes.data, nbytes, len(masks))
                break
            matcher.unsafe_compute_mask_ptr(row.ctypes.data, nbytes)
        return [_too_complex(m.get_error()) if m.is_error() else None for m in matchers]

    def accept(self, token: int) -> None:
        """Takes the next token of the sequence; GrammarError if the grammar does not allow it."""
        if not self._matcher.consume_token(token):
            wrong = self._matcher.get_error()
            if "doesn't satisfy" in wrong or "parser stopped" in wrong:
                raise GrammarError(f"the grammar does not allow token {token} here")
            raise _too_complex(wrong)


@cache
def _executor() -> Any:
    """The threads that make masks, or None where cores are few. Two cores are left, for the engine
    and for the server. They are counted once: counting reads a file for each CPU.
    """
    cores = usable_cores()
    if cores < ENOUGH_CORES:
        return None
    return library().LLExecutor(num_threads=min(MAX_THREADS, cores - 2))


def _too_complex(message: str) -> GrammarError:
    return GrammarError(f"the grammar became too complex: {reason(message)}")


class TokenTable:
    """What llguidance asks of a tokenizer."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, end_ids: list[int]) -> None:
        ids = range(tokenizer.n_vocab)
        self.tokens = [tokenizer.piece(id, special=True) for id in ids]
        hidden = (id for id in ids if self.tokens[id] and not tokenizer.piece(id))
        self.special_token_ids = sorted({*hidden, *end_ids})
        self.eos_token_id = end_ids[0]
        self._encode = tokenizer.encode

    def __call__(self, text: str | bytes) -> list[int]:
        """Ids of a text. No grammar forces tokens, so llguidance has little use for them."""
        return self._encode(text if isinstance(text, str) else text.decode(), add_special=False)


class Grammars:
    """Compiles grammars for the tokens of one tokenizer; any thread may use it.

    llguidance is imported, and the table of tokens made, when the first grammar comes.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._lock = threading.Lock()  # of what is kept; nobody who has it waits
        self._compiling = threading.Lock()
        self._ll_tokenizer: Any = None
        self._kept: OrderedDict[tuple[str, str], Any] = OrderedDict()  # matchers, or errors

    def compile(self, kind: str, text: str = "") -> GrammarMask:
        """The mask of a new sequence, for a grammar `text` of one of KINDS.

        "json_schema": JSON of a schema. "json_object": any object, without a text. "gbnf":
        llama.cpp's notation. "lark": Lark as llguidance reads it. "regex": of the whole text.

        GrammarError, a ValueError, says what is wrong with the grammar or not supported; it also is
        an ImportError without llguidance. GrammarUntried, one of its kinds, is worth another try.
        """
        mask = self.known(kind, text)
        if mask is None:
            with self._compiling:
                mask = self.known(kind, text)  # another thread may have compiled it meanwhile
                return mask or self._mask(self._keep(kind, text, self._compiled(kind, text)))
        return mask

    def known(self, kind: str, text: str = "") -> GrammarMask | None:
        """`compile`, if the grammar is kept: in microseconds, and nobody waits. Else None."""
        with self._lock:
            found = self._kept.get((kind, text))
            if found is not None:
                self._kept.move_to_end((kind, text))
        return None if found is None else self._mask(found)

    def _keep(self, kind: str, text: str, compiled: Any) -> Any:
        with self._lock:
            self._kept[kind, text] = compiled
            if len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        return compiled

    def _mask(self, compiled: Any) -> GrammarMask:
        """The mask of a new sequence; GrammarError where there is a text in place of a matcher."""
        if isinstance(compiled, str):
            raise GrammarError(compiled)
        with self._lock:
            return GrammarMask(compiled.deep_copy(), self.tokenizer.n_vocab)

    def _compiled(self, kind: str, text: str) -> Any:
        """A matcher, or what is wrong as a text: a grammar that takes long is tried once."""
        library()
        try:
            lark = to_lark(kind, text)
            _trial.check(lark)
            return _on_deep_stack(lambda: self._matcher(lark))
        except GrammarUntried:
            raise
        except GrammarError as error:
            told = str(error)
            names_it = kind != "json_schema" or "schema" in told
            return told if names_it else f"JSON schema: {told}"

    def _matcher(self, lark: str) -> Any:
        ll = library()
        if self._ll_tokenizer is None:
            self._ll_tokenizer = self._make_tokenizer(ll)
        limits = ll.LLParserLimits(verbose_errors=False)
        matcher = ll.LLMatcher(self._ll_tokenizer, lark, log_level=0, limits=limits)
        wrong = [matcher.get_error()] if matcher.is_error() else matcher.get_grammar_warnings()
        if wrong:
            raise GrammarError(reason(wrong[0]))
        return matcher

    def _make_tokenizer(self, ll: Any) -> Any:
        end_ids = sorted(self.tokenizer.end_ids)
        if not end_ids:
            raise GrammarError("the model has no token that ends a text: no grammar can be used")
        table = ll.TokenizerWrapper(TokenTable(self.tokenizer, end_ids))
        return ll.LLTokenizer(table, eos_token=end_ids)


def _on_deep_stack(work: Callable[[], Any]) -> Any:
    """The result of work(), done by a thread with twice the stack that was enough in the trial."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=run)
    with _stack_lock:
        before = threading.stack_size(2 * STACK)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    if isinstance(results[0], BaseException):
        raise results[0]
    return results[0]
