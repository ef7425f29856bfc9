"""llama.cpp's own endpoints: /completion, /infill, /tokenize, /detokenize and /apply-template.

Reads requests and writes answers. Nothing here knows HTTP or how an answer is made.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...sampling import SamplingParams
from ...tokenizer import Tokenizer
from ..errors import ApiError, openai_error
from ..events import AnswerOptions, AnswerToken, Event, Finished, TextDelta
from ..fields import Fields
from .chat import ChoiceText, sse
from .options import MAX_TOP_LOGPROBS, answer_options
from .timings import timings_of

STOPS = {"stop": "eos", "length": "limit", "tool_calls": "eos"}
FIM = ("pre", "suf", "mid")  # roles of tokens without which there is no infill
MISSING = object()  # no value of a field


def read_options(
    body: Fields, tokenizer: Tokenizer, defaults: SamplingParams, max_tokens: int | None
) -> AnswerOptions:
    """The options of /completion and /infill."""
    options = answer_options(body, tokenizer, defaults, max_tokens)
    n_probs = body.integer("n_probs", 0, 0, MAX_TOP_LOGPROBS)
    tokens = body.flag("return_tokens", False) or body.flag("stream", False)
    return replace(options, top_logprobs=n_probs or None, tokens=tokens)


def selected(answer: Mapping[str, Any], paths: Sequence[str]) -> dict[str, Any]:
    """The fields of an answer that response_fields names, each under its path ("timings/prompt_n");
    all fields where it names none.
    """
    if not paths:
        return dict(answer)
    found: dict[str, Any] = {}
    for path in paths:
        value: Any = answer
        for name in path.split("/"):
            value = value.get(name, MISSING) if isinstance(value, Mapping) else MISSING
        if value is not MISSING:
            found[path] = value
    return found


async def whole_answer(
    events: AsyncIterator[tuple[int, Event]],
    model: str,
    prompt: str,
    paths: Sequence[str] = (),
    tokens: bool = False,
) -> dict[str, Any]:
    """The answer of /completion as one object; paths: response_fields, tokens: return_tokens."""
    found = ChoiceText()
    async for _, event in events:
        found.add(event)
    assert found.end is not None
    whole = {
        "index": 0,
        "content": found.text,
        "tokens": [piece.id for piece in found.pieces] if tokens else [],
        "prompt": prompt,
        "completion_probabilities": _probabilities(found.pieces),
        **_end(found.end, model, "\n" in found.text),
    }
    return selected(whole, paths)


async def answer_chunks(
    events: AsyncIterator[tuple[int, Event]], model: str, paths: Sequence[str] = ()
) -> AsyncIterator[bytes]:
    """The answer of /completion as server-sent events; paths: response_fields, of the last one."""
    has_new_line = False
    try:
        async for i, event in events:
            if isinstance(event, TextDelta):
                has_new_line |= "\n" in event.text
                ids = [piece.id for piece in event.pieces]
                chunk = {"index": i, "content": event.text, "tokens": ids, "stop": False}
                if scored := _probabilities(event.pieces):
                    chunk["completion_probabilities"] = scored
                yield sse(chunk)
            elif isinstance(event, Finished):
                last = {"index": i, "content": "", "tokens": [], **_end(event, model, has_new_line)}
                yield sse(selected(last, paths))
    except ApiError as error:
        yield sse(openai_error(error))


def _end(end: Finished, model: str, has_new_line: bool) -> dict[str, Any]:
    usage = end.usage
    return {
        "stop": True,
        "model": model,
        "tokens_predicted": usage.n_generated,
        "tokens_evaluated": usage.n_prompt,
        "tokens_cached": usage.n_cached,
        "has_new_line": has_new_line,
        "truncated": False,
        "stop_type": "word" if end.stop else STOPS[end.reason],
        "stopping_word": end.stop or "",
        "timings": timings_of(end),
    }


def _probabilities(pieces: Iterable[AnswerToken]) -> list[dict[str, Any]]:
    """The log probabilities of those tokens that have one."""
    return [
        {**_probability(p), "top_logprobs": [_probability(t) for t in p.best]}
        for p in pieces
        if p.logprob is not None
    ]


def _probability(token: AnswerToken) -> dict[str, Any]:
    return {
        "id": token.id,
        "token": token.text,
        "bytes": list(token.data),
        "logprob": token.logprob,
    }


# Tokens


def tokenized(body: Fields, tokenizer: Tokenizer) -> dict[str, Any]:
    """The answer of /tokenize."""
    text = body.text("content", "") or ""
    add, parse = body.flag("add_special", False), body.flag("parse_special", True)
    ids = tokenizer.encode(text, add_special=add, parse_special=parse)
    if not body.flag("with_pieces", False):
        return {"tokens": ids}
    return {"tokens": [{"id": id, "piece": _piece(tokenizer.piece(id, True))} for id in ids]}


def _piece(data: bytes) -> str | list[int]:
    """A text, or bytes that are not UTF-8, as llama.cpp gives them."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)


def detokenized(body: Fields, tokenizer: Tokenizer) -> dict[str, Any]:
    """The answer of /detokenize."""
    ids = body.raw("tokens", [])
    in_range = isinstance(ids, list) and all(
        isinstance(id, int) and not isinstance(id, bool) and 0 <= id < tokenizer.n_vocab
        for id in ids
    )
    if not in_range:
        raise body.error("tokens", f"a list of ids from 0 to {tokenizer.n_vocab - 1}")
    return {"content": tokenizer.decode(ids, special=True)}


# Infill


class Infill:
    """Makes fill-in-the-middle prompts, for a model that has the tokens for it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._tokens = tokenizer, tokenizer.infill_ids

    @property
    def supported(self) -> bool:
        """Whether the vocabulary has the tokens."""
        return self._tokens.keys() >= {*FIM}

    def prompt(self, body: Fields, most: int) -> list[int]:
        """Ids of a request's prompt; ApiError 501 where the model has no tokens for it. The
        beginning of other files is left out where the prompt has more than `most` tokens.
        """
        if not self.supported:
            raise ApiError(501, "this model has no fill-in-the-middle tokens: /infill needs them")
        prefix = body.text("input_prefix", "") or ""
        suffix = body.text("input_suffix", "") or ""
        prompt = body.text("prompt", "") or ""
        bos = self._tokenizer.bos_id
        begin = [bos] if self._tokenizer.add_bos and bos is not None else []
        ids = [self._tokens["pre"], *self._plain(prefix)]
        ids += [self._tokens["suf"], *self._plain(suffix)]
        ids += [self._tokens["mid"], *self._plain(prompt)]
        context = self._context(body)
        kept = max(0, most - len(begin) - len(ids))
        return [*begin, *context[max(0, len(context) - kept) :], *ids]

    def _context(self, body: Fields) -> list[int]:
        """Ids of other files, which editors send as input_extra, and of a name for this one."""
        repository, separator = self._tokens.get("rep"), self._tokens.get("sep")
        ids = [] if repository is None else [repository, *self._plain("myproject\n")]
        for file in body.items("input_extra"):
            name, text = file.text("filename", "") or "tmp", file.text("text", "") or ""
            if separator is not None:
                ids += [separator, *self._plain(f"{name}\n"), *self._plain(text)]
            else:
                ids += self._plain(f"\n\n--- {name}\n{text}")
        if separator is not None:
            ids += [separator, *self._plain("filename\n")]
        return ids

    def _plain(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special=False)
