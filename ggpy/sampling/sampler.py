"""Logits -> token id: the chain that a sequence's parameters turn on, and its draws.

A draw depends on the seed and its number alone. The links and their order are in `links`. This
module knows no single link, no tokenizer, no model and no backend.

Letters: V vocabulary, k candidates.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from functools import cache
from math import inf, isfinite

import numpy as np
from numpy.typing import NDArray

from .filters import Candidates
from .infill import TokenTexts
from .links import (
    ADJUSTMENTS,
    FEEDBACKS,
    FILTERS,
    TOKEN_FILTERS,
    Adjustment,
    Filter,
    Link,
    State,
    TokenFilter,
)
from .mask import (
    TokenMask,
    allowed_tokens,
    fill_checked,
    forced_ids,
    in_force,
    n_words,
    waits,
)
from .order import SAMPLERS
from .params import MASK64, SamplingParams, in_effect, with_bans, without_bans
from .ranking import Ids, Logits, Probabilities, crossing, weights

NO_TOKEN = -1  # the id of a row from which none can be chosen
NOT_FINITE = (
    "the highest logit is NaN or infinite: no token can be chosen; "
    "`ggpy run --check` finds the op where that begins"
)


def uniform(seed: int, counter: int) -> float:
    """A number in [0, 1) of (seed, counter) alone: the draws of a sequence need no other state.

    SplitMix64 (Steele, Lea, Flood 2014) of seed + (counter + 1) * 0x9E3779B97F4A7C15, all modulo
    2^64; then its upper 24 bits times 2^-24, so that a float32 holds the number exactly.
    """
    z = (seed + (counter + 1) * 0x9E3779B97F4A7C15) & MASK64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK64
    z ^= z >> 31
    return (z >> 40) * 2.0**-24


Chained = Adjustment | Filter | TokenFilter


class NothingAllowed(ValueError):
    """A mask and biases of -inf forbid all tokens."""


class Chain:
    """The links that parameters turn on, in order: `adjustments`; `filters` of both kinds, with the
    adjustments that come after one; and a `feedback`, or None.

    params: those in effect. greedy: the chain comes down to the highest adjusted logit. Then no
    draw matters, and links that always keep the best candidate are left out. has_kernels: every
    link has a kernel, and none is in another place than the default one.
    """

    def __init__(self, params: SamplingParams) -> None:
        default: list[Chained] = [*ADJUSTMENTS, *FILTERS, *TOKEN_FILTERS]
        links = [x for x in _in_order(default, params.samplers) if x.active(params)]
        n = next((i for i, x in enumerate(links) if not isinstance(x, Adjustment)), len(links))
        self.adjustments = [x for x in links[:n] if isinstance(x, Adjustment)]
        rest = links[n:]
        filters = [link for link in rest if isinstance(link, Filter)]
        last = [link for link in filters if link.leaves_one(params)]
        self.greedy = bool(last) and all(isinstance(x, Filter) and x.keeps_best for x in rest)
        self.filters = last[:1] if self.greedy else rest
        feedbacks = [link for link in FEEDBACKS if link.active(params) and not self.greedy]
        self.feedback = feedbacks[0] if feedbacks else None
        used: list[Link] = [*self.adjustments, *self.filters, *feedbacks]
        in_order = used == [link for link in (*default, *feedbacks) if link in used]
        self.has_kernels = in_order and all(link.fits_kernel(params) for link in used)


class Sampler:
    """One sequence's chain, the tokens it has seen, and how many draws it has made.

    Draw i uses uniform(seed, 2 i) for the token and uniform(seed, 2 i + 1) for filters that apply
    by chance, so a backend that samples by itself needs `seed` and `n_drawn` and adds to the
    latter. The state of a feedback is kept for each draw, so that draws can be repeated. `params`
    are those in effect. `history` is the prompt and every accepted token; a last one ~r is what the
    step under way samples at its row r. `mask` drops tokens before everything else, and sees every
    accepted token but not the prompt. `tokens` is a tokenizer: its suppressed tokens are never
    drawn, and some links need it. ValueError where a biased id is not in the vocabulary, or such a
    link has no tokenizer.
    """

    def __init__(
        self,
        params: SamplingParams,
        n_vocab: int,
        history: Iterable[int] = (),
        mask: TokenMask | None = None,
        tokens: TokenTexts | None = None,
    ):
        beyond = [token for token in params.logit_bias if not 0 <= token < n_vocab]
        if beyond:
            raise ValueError(f"logit_bias names token {beyond[0]}: ids go from 0 to {n_vocab - 1}")
        if tokens is not None:
            params = with_bans(params, tokens.suppressed_ids)
        if mask is not None:
            params = without_bans(params, forced_ids(mask))
        self.params = in_effect(params)
        self.chain = Chain(self.params)
        self.tokens = tokens
        if tokens is None and any(isinstance(x, TokenFilter) for x in self.chain.filters):
            raise ValueError("samplers has infill: it needs a tokenizer")
        self._states: list[State] = []  # of the feedback before each draw
        if self.chain.feedback:
            self._states.append(self.chain.feedback.start(self.params))
        self.n_vocab = n_vocab
        self.history = list(map(int, history))
        self.mask = mask
        self.n_drawn = 0
        self.seed = params.seed if params.seed >= 0 else int.from_bytes(os.urandom(4), "little")
        self.error: Exception | None = None  # why `try_sample` chose no token
        self._expects = False  # whether the last of the history is not accepted yet

    @property
    def masked(self) -> bool:
        """Whether the mask may forbid a token now."""
        return self.mask is not None and in_force(self.mask)

    @property
    def waits(self) -> bool:
        """Whether the draw after the next one must wait until the next token is accepted."""
        return self.mask is not None and waits(self.mask)

    def accept(self, token: int) -> None:
        """Append a token to the history, or put it where one is expected.

        ValueError, and nothing is appended, where the mask does not allow the token.
        """
        if self.mask is not None:
            self.mask.accept(int(token))
        if self._expects:
            self.history[-1] = int(token)
            self._expects = False
        else:
            self.history.append(int(token))

    def expect(self, row: int) -> None:
        """The next token to be accepted is the one that the step under way samples at `row`."""
        if not self._expects:
            self.history.append(~row)
            self._expects = True

    def settle(self, sampled: Sequence[int] | NDArray[np.integer]) -> None:
        """Look the expected token up in the ids of the step that samples it."""
        if self._expects and self.history[-1] < 0:
            self.history[-1] = int(sampled[~self.history[-1]])

    def recent(self, n: int) -> list[int]:
        """Returns the last n tokens of the history; -1 is all."""
        return self.history if n < 0 else self.history[max(0, len(self.history) - n) :]

    def adjust(self, logits: Logits) -> Logits:
        """Returns logits[V] after the adjustments; the same array when none is on."""
        for link in self.chain.adjustments:
            recent = self.recent(link.look_back(self.params))
            logits = link.apply(logits, self.params, recent)
        return logits

    def candidates(self, logits: Logits, draw: int | None = None) -> Candidates:
        """Returns (ids[k], scaled logits[k]) that the chain leaves of logits[V], in rising id.

        draw: its number; None is the next.
        """
        draw = self.n_drawn if draw is None else draw
        return self._fed_back(self._filtered(logits, draw), draw)

    def probabilities(self, logits: Logits, draw: int | None = None) -> tuple[Ids, Probabilities]:
        """Returns (ids[k], p[k]) of a draw, most probable first, ties by id; None is the next."""
        ids, kept = self.candidates(logits, draw)
        order = np.argsort(-kept, kind="stable")
        w = weights(kept[order])
        return ids[order], w / w.sum()

    def sample(self, logits: Logits) -> int:
        """Draw an id from logits[V] and count the draw; the id is not accepted.

        The first candidate in falling probability, ties by id, at which the sum of weights exceeds
        `uniform` times their total. ValueError where logits are NaN or all -inf, or no token is
        allowed.
        """
        if self.chain.greedy:
            token = int(np.argmax(self._adjusted(logits, self._allowed())))
        else:
            token = self._draw(logits)
        self.n_drawn += 1
        return token

    def try_sample(self, logits: Logits) -> int:
        """`sample`, or NO_TOKEN where that raises: then `error` is why, and nothing is counted."""
        try:
            return self.sample(logits)
        except Exception as error:
            self.error = error
            return NO_TOKEN

    def _draw(self, logits: Logits) -> int:
        before = self._filtered(logits, self.n_drawn)
        ids, kept = self._fed_back(before, self.n_drawn)
        w = weights(kept)
        mass = uniform(self.seed, 2 * self.n_drawn) * float(w.sum())
        token = int(ids[crossing(kept, w, mass, side="right")])
        if feedback := self.chain.feedback:
            state = self._states[self.n_drawn]
            learnt = feedback.after(before, (ids, kept), token, self.params, state)
            self._states[self.n_drawn + 1 :] = [learnt]
        return token

    def _filtered(self, logits: Logits, draw: int) -> Candidates:
        """Returns what the adjustments and filters leave of logits[V]."""
        allowed = self._allowed()
        logits = self._adjusted(logits, allowed)
        found = _all_ids(self.n_vocab), logits
        if allowed is not None:
            found = np.flatnonzero(allowed), logits[allowed]
        chance = uniform(self.seed, 2 * draw + 1)
        for link in self.chain.filters:
            if isinstance(link, Filter):
                found = link.apply(found, self.params, chance)
            elif isinstance(link, TokenFilter):
                found = self._token_filtered(found, link, allowed)
            else:
                found = self._adjusted_few(found, link)
        return found

    def _token_filtered(
        self, found: Candidates, link: TokenFilter, allowed: NDArray[np.bool_] | None
    ) -> Candidates:
        """Returns what a filter leaves that may choose the end; all, if the mask forbids that."""
        assert self.tokens is not None
        left = link.apply(found, self.tokens)
        return left if allowed is None or allowed[left[0]].all() else found

    def _fed_back(self, found: Candidates, draw: int) -> Candidates:
        """Returns what the feedback leaves of candidates."""
        if feedback := self.chain.feedback:
            return feedback.apply(found, self.params, self._states[draw], self.n_vocab)
        return found

    def _adjusted_few(self, found: Candidates, link: Adjustment) -> Candidates:
        """Returns candidates after an adjustment that follows a filter."""
        ids, kept = found
        logits = np.full(self.n_vocab, -inf, np.float32)
        logits[ids] = kept
        recent = self.recent(link.look_back(self.params))
        return ids, link.apply(logits, self.params, recent)[ids]

    @property
    def why_none(self) -> Exception:
        """Why the last draw, on the host or on a device, was NO_TOKEN."""
        if self.error is not None:
            return self.error
        if self._forbids_all():
            return NothingAllowed("the highest logit is -inf: no token can be chosen")
        return ValueError(NOT_FINITE)

    def _forbids_all(self) -> bool:
        """Whether the mask and biases of -inf leave no token."""
        allowed = self._allowed()
        left = np.ones(self.n_vocab, bool) if allowed is None else allowed.copy()
        left[[id for id, bias in self.params.logit_bias.items() if bias == -inf]] = False
        return not left.any()

    def _allowed(self) -> NDArray[np.bool_] | None:
        """Returns allowed[V] of the next token; None without a mask that forbids any."""
        if self.mask is None or not in_force(self.mask):
            return None
        row = np.empty(n_words(self.n_vocab), np.int32)
        fill_checked(self.mask, row)
        return allowed_tokens(row, self.n_vocab)

    def _adjusted(self, logits: Logits, allowed: NDArray[np.bool_] | None) -> Logits:
        if logits.shape != (self.n_vocab,):
            raise ValueError(f"logits have shape {logits.shape}, the vocabulary {self.n_vocab} ids")
        if allowed is not None:  # not even NaN counts where a token is not allowed
            logits = np.where(allowed, logits, np.float32(-inf))
        logits = self.adjust(logits)
        if not isfinite(best := logits.max()):
            kind = NothingAllowed if best == -inf else ValueError
            raise kind(f"the highest logit is {best}: no token can be chosen")
        return logits


def _in_order(links: Iterable[Chained], samplers: Sequence[str]) -> list[Chained]:
    """The links in the order of their names; without one, at their place in llama.cpp's order, or
    first in any other.
    """
    links = list(links)
    if list(samplers) == [name for name in SAMPLERS if name in samplers]:
        return links
    named = [link for name in samplers for link in links if link.name == name]
    return [link for link in links if not link.name] + named


@cache
def _all_ids(n_vocab: int) -> Ids:
    ids = np.arange(n_vocab)
    ids.flags.writeable = False  # of all samplers
    return ids
