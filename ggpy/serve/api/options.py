"""Reads an answer's options from a body: OpenAI's fields, and llama.cpp's beside them.

A field that is missing keeps the server's default. Nothing here knows endpoints or messages.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from math import inf
from typing import Any

from ...grammar import grammar_kind
from ...runtime.sequence import MAX_STOP_CHARS
from ...sampling import DRY_SEQUENCE_BREAKERS, SamplingParams
from ...sampling.order import BY_LETTER, sampler_of
from ...tokenizer import Tokenizer
from ...tokenizer.breakers import dry_breakers
from ..errors import ApiError
from ..events import AnswerOptions, Constraint
from ..fields import Fields, is_whole

NAMES = [f.name for f in fields(SamplingParams) if f.metadata]
MAX_TOP_LOGPROBS = 20
MAX_PROBS = 1000  # of llama.cpp's n_probs
MAX_TEXT = 1 << 20  # characters of a grammar or a schema
ID = re.compile(r"-?[0-9]{1,18}")  # as a key of logit_bias
ALIASES = {
    "typ_p": "typical_p",
    "top_nsigma": "top_n_sigma",
    "repetition_penalty": "repeat_penalty",
}


def are_quick(body: Fields) -> bool:
    """Whether no option needs a search in the vocabulary, or text that becomes tokens."""
    return not any(
        name in body for name in ("logit_bias", "dry_multiplier", "dry_sequence_breakers")
    )


def answer_options(
    body: Fields,
    tokenizer: Tokenizer,
    defaults: SamplingParams,
    max_tokens: int | None,
    form: Constraint | None = None,
) -> AnswerOptions:
    """The options of a body; ApiError 400 names the field that is wrong.

    defaults, max_tokens: the server's, for what is missing. form: of the answer, where a field that
    only one API has asks for it.
    """
    return AnswerOptions(
        params=sampling_params(body, tokenizer, defaults),
        max_tokens=_max_tokens(body, max_tokens),
        stop=tuple(text for text in body.texts("stop", longest=MAX_STOP_CHARS) if text),
        constraint=constraint(body, form),
        line_timeout=_line_timeout(body),
        min_indent=body.integer("n_indent", 0, 0, 1 << 31) or 0,
        post_sampling=body.flag("post_sampling_probs", False),
        progress=body.flag("stream", False) and body.flag("return_progress", False),
        cache_prompt=body.flag("cache_prompt", True),
    )


def sampling_params(body: Fields, tokenizer: Tokenizer, defaults: SamplingParams) -> SamplingParams:
    """The sampling parameters of a body."""
    given: dict[str, Any] = {}
    for name in [*NAMES, *ALIASES]:
        if name in body:
            given[ALIASES.get(name, name)] = _number(body, name)
    biases = dict(defaults.logit_bias)
    if body.flag("ignore_eos", False):
        biases |= dict.fromkeys(tokenizer.end_ids, -inf)
    biases |= _biases(body, tokenizer)
    if biases:
        given["logit_bias"] = biases
    if "samplers" in body:
        given["samplers"] = _samplers(body)
    try:
        params = replace(defaults, **given)
    except ValueError as error:
        name = str(error).split(" ", 1)[0]
        raise ApiError(400, str(error), param=body.path(name)) from None
    if params.uses_dry and (not params.dry_breakers or "dry_sequence_breakers" in body):
        params = replace(params, dry_breakers=_breakers(body, tokenizer))
    return params


def constraint(body: Fields, form: Constraint | None = None) -> Constraint | None:
    """What the answer must match: form, response_format, json_schema or grammar."""
    found = [c for c in (form, _response_format(body), _json_schema(body), _grammar(body)) if c]
    if len(found) > 1:
        names = " and ".join(c.param for c in found)
        raise ApiError(400, f"{names}: give one of them, not several", param=found[1].param)
    return found[0] if found else None


def json_constraint(schema: Any, path: str) -> Constraint:
    """The constraint of a JSON schema; ApiError 400 if it is none."""
    if not isinstance(schema, (dict, bool)):
        raise ApiError(400, f"{path} must be a JSON schema: an object", param=path)
    text = json.dumps(schema)
    if len(text) > MAX_TEXT:
        raise ApiError(400, f"{path} has {len(text)} characters: at most {MAX_TEXT}", param=path)
    return Constraint("json_schema", text, path)


def _response_format(body: Fields) -> Constraint | None:
    form = body.object("response_format")
    if form is None:
        return None
    kind = form.one_of("type", ("text", "json_object", "json_schema", "grammar"), "text")
    if kind == "text":
        return None
    if kind == "grammar":
        text = form.needed_text("grammar")
        return Constraint(grammar_kind(text), text, form.path("grammar"))
    if kind == "json_object":
        schema = form.raw("schema")  # llama.cpp takes a schema here
        if schema is None:
            return Constraint("json_object")
        return json_constraint(schema, form.path("schema"))
    inner = form.object("json_schema")
    if inner is None and "schema" in form:  # llama.cpp's short form
        inner = form
    if inner is None:
        raise form.error("json_schema", "an object with a schema")
    if "schema" not in inner:
        raise inner.error("schema", "a JSON schema")
    return json_constraint(inner.raw("schema"), inner.path("schema"))


def _json_schema(body: Fields) -> Constraint | None:
    schema = body.raw("json_schema")
    return None if schema is None else json_constraint(schema, body.path("json_schema"))


def _grammar(body: Fields) -> Constraint | None:
    text = body.text("grammar")
    if not text:
        return None
    if len(text) > MAX_TEXT:
        path = body.path("grammar")
        raise ApiError(400, f"{path} has {len(text)} characters: at most {MAX_TEXT}", param=path)
    return Constraint(grammar_kind(text), text, body.path("grammar"))


def _max_tokens(body: Fields, default: int | None) -> int | None:
    """The tokens of an answer at most; -1 is no limit, as in llama.cpp."""
    for name in ("max_completion_tokens", "max_tokens", "n_predict"):
        if name in body:
            n = body.integer(name, None, -1, 1 << 31)
            return None if n is None or n < 0 else n
    return default


def _line_timeout(body: Fields) -> float | None:
    milliseconds = body.number("t_max_predict_ms", None, -1, 1e12)
    return None if milliseconds is None or milliseconds <= 0 else milliseconds / 1000


def _samplers(body: Fields) -> tuple[str, ...]:
    """Names in a list, or letters in a text; llama-server, too, ignores those that it has not."""
    given = body.texts("samplers")
    if isinstance(body.raw("samplers"), str):
        found = [BY_LETTER.get(letter) for letter in given[0]]
    else:
        found = [sampler_of(name) for name in given]
    return tuple(name for name in found if name)


def _number(body: Fields, name: str) -> int | float:
    value = body.raw(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise body.error(name, "a number")
    whole = isinstance(value, float) and value.is_integer()
    return int(value) if whole and abs(value) < 1 << 53 else value


def _biases(body: Fields, tokenizer: Tokenizer) -> dict[int, float]:
    """logit_bias: OpenAI's object, or llama.cpp's list of [token or text, bias or false]."""
    given = body.raw("logit_bias")
    if given is None:
        return {}
    path = body.path("logit_bias")
    if isinstance(given, Mapping):
        pairs: Iterable[Sequence[Any]] = [(_key(token), bias) for token, bias in given.items()]
    elif isinstance(given, list) and all(isinstance(p, list) and len(p) == 2 for p in given):
        pairs = given
    else:
        told = f"{path} must be an object of token ids and numbers, or a list of pairs"
        raise ApiError(400, told, param=path)
    found: dict[int, float] = {}
    for token, bias in pairs:
        value = -inf if bias is False else bias
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ApiError(
                400, f"{path} of {token!r:.40} is {bias!r:.40}: give a number", param=path
            )
        found.update(dict.fromkeys(_tokens(token, tokenizer, path), value))
    return found


def _key(token: str) -> str | int:
    """The id that a key of the object is, or a text."""
    return int(token) if ID.fullmatch(token) else token


def _tokens(token: Any, tokenizer: Tokenizer, path: str) -> list[int]:
    """The ids that logit_bias means: an id, or all tokens of a text."""
    if isinstance(token, str):
        return tokenizer.encode(token, add_special=False)
    if not is_whole(token):
        raise ApiError(400, f"{path} names {token!r:.40}: give ids of tokens", param=path)
    if not 0 <= token < tokenizer.n_vocab:
        told = f"{path} names token {token}: ids go from 0 to {tokenizer.n_vocab - 1}"
        raise ApiError(400, told, param=path)
    return [token]


def _breakers(body: Fields, tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    texts = body.texts("dry_sequence_breakers") or DRY_SEQUENCE_BREAKERS
    try:
        return dry_breakers(texts, tokenizer)
    except ValueError as error:
        path = body.path("dry_sequence_breakers")
        raise ApiError(400, f"{path}: {error}", param=path) from None
