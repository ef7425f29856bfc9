"""llama.cpp's own endpoints: /completion, /infill, /tokenize, /detokenize and /apply-template.

Reads requests and writes answers. Nothing here knows HTTP or how an answer is made.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...sampling import SamplingParams
from ...tokenizer import Tokenizer
from ..errors import ApiError, openai_error
from ..events import AnswerOptions, AnswerToken, Event, Finished, PromptProgress, TextDelta
from ..fields import Fields, is_whole
from .chat import MAX_N, ChoiceText, drawn, sse
from .completions import prompts_of
from .generation_settings import settings_of
from .options import MAX_PROBS, answer_options
from .prompts import Prompt
from .timings import progress_of, timings_of

STOPS = {"stop": "eos", "length": "limit", "tool_calls": "eos"}
FIM = ("pre", "suf", "mid")  # roles of tokens without which there is no infill
MISSING = object()  # no value of a field


@dataclass(frozen=True)
class NativeCall:
    """A request of /completion or /infill, and how its answer is wanted. n: answers to each
    prompt. paths: response_fields.
    """

    prompts: Sequence[Prompt]
    options: AnswerOptions
    n: int = 1
    stream: bool = False
    paths: Sequence[str] = ()
    tokens: bool = False
    timings_per_token: bool = False


def read_options(
    body: Fields, tokenizer: Tokenizer, defaults: SamplingParams, max_tokens: int | None
) -> AnswerOptions:
    """The options of /completion and /infill."""
    options = answer_options(body, tokenizer, defaults, max_tokens)
    n_probs = body.integer("n_probs", 0, 0, MAX_PROBS)
    tokens = body.flag("return_tokens", False) or body.flag("stream", False)
    return replace(options, top_logprobs=n_probs or None, tokens=tokens)


def read_native(
    body: Fields, tokenizer: Tokenizer, options: AnswerOptions, prompt: Prompt | None = None
) -> NativeCall:
    """The request of a body; ApiError 400 names the field that is wrong. prompt: that of /infill,
    None is the body's own.
    """
    name = "n_cmpl" if "n_cmpl" in body else "n"
    return NativeCall(
        prompts=prompts_of(body, tokenizer) if prompt is None else [prompt],
        options=options,
        n=body.integer(name, 1, 1, MAX_N) or 1,
        stream=body.flag("stream", False),
        paths=body.texts("response_fields"),
        tokens=body.flag("return_tokens", False),
        timings_per_token=body.flag("timings_per_token", False),
    )


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
    events: AsyncIterator[tuple[int, Event]], call: NativeCall, server: AnsweredBy
) -> dict[str, Any] | list[dict[str, Any]]:
    """The answer of /completion as one object, or a list where there are several."""
    found = [ChoiceText() for _ in range(call.n * len(call.prompts))]
    async for i, event in events:
        found[i].add(event)
    answers = []
    for i, choice in enumerate(found):
        assert choice.end is not None
        whole = {
            "index": i,
            "content": choice.text,
            "tokens": [piece.id for piece in choice.pieces] if call.tokens else [],
            "prompt": server.prompt(i) if not call.paths or "prompt" in call.paths else "",
            "completion_probabilities": _probabilities(choice.pieces, call.options),
            **_end(choice.end, call, server, "\n" in choice.text),
        }
        answers.append(selected(whole, call.paths))
    return answers if len(answers) > 1 else answers[0]


async def answer_chunks(
    events: AsyncIterator[tuple[int, Event]],
    call: NativeCall,
    server: AnsweredBy,
    so_far: Callable[[int], Finished],
) -> AsyncIterator[bytes]:
    """The answers of /completion as server-sent events; response_fields are those of the last.
    so_far(i): what answer i has cost until now.
    """
    has_new_line = [False] * (call.n * len(call.prompts))
    try:
        async for i, event in events:
            chunk: dict[str, Any] = {"index": i, "content": "", "tokens": [], "stop": False}
            if isinstance(event, TextDelta):
                has_new_line[i] |= "\n" in event.text
                chunk |= {"content": event.text, "tokens": [piece.id for piece in event.pieces]}
                if scored := _probabilities(event.pieces, call.options):
                    chunk["completion_probabilities"] = scored
                if call.timings_per_token:
                    chunk["timings"] = timings_of(so_far(i))
                yield sse(chunk)
            elif isinstance(event, PromptProgress):
                yield sse({**chunk, **progress_of(event, call.timings_per_token)})
            elif isinstance(event, Finished):
                last = {**chunk, **_end(event, call, server, has_new_line[i])}
                yield sse(selected(last, call.paths))
    except ApiError as error:
        yield sse(openai_error(error))


@dataclass(frozen=True)
class AnsweredBy:
    """What answers say of the server: the model's name, the positions of the context, the prompt
    of each answer with its special tokens.
    """

    model: str
    n_ctx: int
    prompt: Callable[[int], str]


def verbose(
    i: int, written: tuple[Sequence[int], str], end: Finished, call: NativeCall, server: AnsweredBy
) -> dict[str, Any]:
    """llama.cpp's __verbose: answer i of another API in the form of /completion, with its ids and
    its text as the model wrote it.
    """
    ids, text = written
    told = {"index": i, "content": text, "tokens": list(ids), "prompt": server.prompt(i)}
    return {**told, **_end(end, call, server, "\n" in text)}


def _end(end: Finished, call: NativeCall, server: AnsweredBy, has_new_line: bool) -> dict[str, Any]:
    usage = end.usage
    return {
        "stop": True,
        "model": server.model,
        "tokens_predicted": usage.n_generated,
        "tokens_evaluated": usage.n_prompt,
        "tokens_cached": usage.n_cached,
        "has_new_line": has_new_line,
        "truncated": end.context_full,
        "stop_type": "word" if end.stop else STOPS[end.reason],
        "stopping_word": end.stop or "",
        "timings": timings_of(end),
        "generation_settings": {
            **settings_of(call.options),
            "stream": call.stream,
            "timings_per_token": call.timings_per_token,
            "n_ctx": server.n_ctx,
            "model": server.model,
        },
    }


def _probabilities(pieces: Iterable[AnswerToken], options: AnswerOptions) -> list[dict[str, Any]]:
    """The log probabilities of those tokens that have one, or the probabilities of their draws."""
    scored = [p for p in pieces if p.logprob is not None]
    if options.post_sampling:
        return [{**drawn(p), "top_probs": [drawn(t) for t in p.best]} for p in scored]
    return [{**_probability(p), "top_logprobs": [_probability(t) for t in p.best]} for p in scored]


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
    if not isinstance(ids, list) or not all(
        is_whole(id) and 0 <= id < tokenizer.n_vocab for id in ids
    ):
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
