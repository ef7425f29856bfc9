"""What an answer consists of while it is made: the events that every API renders in its own form.

A request of any API becomes a ChatRequest or a list of ids, the service answers it with events, and
the API writes each event as it wants. Nothing here knows HTTP, JSON or the engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ..sampling import SamplingParams

ConstraintKind = Literal["json_object", "json_schema", "gbnf", "lark", "regex"]


@dataclass(frozen=True)
class Constraint:
    """What a whole answer must match. `text`: a grammar, a regular expression, or JSON of a schema;
    "" for json_object. param: the field that says it, for errors.
    """

    kind: ConstraintKind
    text: str = ""
    param: str = field(default="response_format", compare=False)


@dataclass(frozen=True)
class AnswerOptions:
    """How an answer is sampled and where it ends.

    max_tokens: None is until the model ends it or the context is full. top_logprobs: None is no
    log probabilities, 0 those of the sampled tokens alone. tokens: whether events carry their
    tokens even without log probabilities. post_sampling: whether log probabilities are those of the
    sampler chain, not the model's. progress: whether events tell how much of the prompt is read.
    min_indent: the answer ends at a further line with fewer blanks at its beginning. timeout:
    seconds, None is the server's. line_timeout: seconds from the first token, after which the next
    end of a line ends the answer.
    """

    params: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    top_logprobs: int | None = None
    tokens: bool = False
    post_sampling: bool = False
    progress: bool = False
    min_indent: int = 0
    constraint: Constraint | None = None
    timeout: float | None = None
    line_timeout: float | None = None
    cache_prompt: bool = True  # whether pages of other requests with the same beginning are reused


@dataclass(frozen=True)
class ChatRequest:
    """A conversation to be answered.

    messages: in OpenAI's form, checked: "role", "content" (a text or None), and for tools
    "tool_calls" and "tool_call_id". tools: in OpenAI's form, {"type": "function", "function":
    {"name", "description", "parameters", "strict"}}. tool_choice: "auto", "none", "required", or
    the name of a tool after "name:". template_variables: for the chat template (enable_thinking,
    ...). reasoning: whether reasoning is told apart from the answer. reasoning_budget: tokens of
    reasoning at most; -1 is the server's. reasoning_message: said where it is cut short; None is
    the server's. reasoning_control: whether a later request may end the reasoning. continues:
    whether the answer goes on with a last message of the assistant. generation_prompt: whether the
    prompt ends with what the template writes before an answer.
    """

    messages: Sequence[Mapping[str, Any]]
    options: AnswerOptions = field(default_factory=AnswerOptions)
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: str = "auto"
    parallel_tool_calls: bool = True
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    reasoning: bool = True
    reasoning_budget: int = -1
    reasoning_message: str | None = None
    reasoning_control: bool = False
    continues: bool = True
    generation_prompt: bool = True

    @property
    def may_think(self) -> bool:
        """Whether the template's variables leave reasoning on."""
        return self.template_variables.get("enable_thinking") is not False


@dataclass(frozen=True, slots=True)
class AnswerToken:
    """A token: its own bytes, which may be a part of a character, and ln of its probability where
    that was asked for. n_chars: of the text that came with it. best: the most probable tokens in
    its place.
    """

    id: int
    data: bytes
    logprob: float | None = None
    n_chars: int = 0
    best: tuple[AnswerToken, ...] = ()

    @property
    def text(self) -> str:
        """The token as a text, with U+FFFD for bytes that are not UTF-8."""
        return self.data.decode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More of the answer's text. pieces: its tokens, where they were asked for."""

    text: str
    pieces: tuple[AnswerToken, ...] = ()


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """The model calls a tool. index: 0 for the first call of an answer."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallDelta:
    """More of the JSON text of a call's arguments."""

    index: int
    arguments: str


@dataclass(frozen=True, slots=True)
class PromptProgress:
    """Tokens of the prompt: those that were read so far, and of these, those that a cache had.
    seconds: since the first of the others was begun.
    """

    n_prompt: int
    n_cached: int
    n_read: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a request. n_cached: of the prompt, taken from the prefix cache. n_reasoning: of
    the answer.
    """

    n_prompt: int = 0
    n_cached: int = 0
    n_generated: int = 0
    n_reasoning: int = 0


@dataclass(frozen=True, slots=True)
class AnswerTimings:
    """Seconds of a request: its wait in the queue, its prefill, its decode."""

    queued: float = 0.0
    prefill: float = 0.0
    decode: float = 0.0


AnswerEnd = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event. stop: the stop string that ended the answer, None where the model did.
    context_full: whether the end of the context ended it.
    """

    reason: AnswerEnd
    usage: Usage
    timings: AnswerTimings
    stop: str | None = None
    context_full: bool = False


Event = TextDelta | ReasoningDelta | CallStart | CallDelta | PromptProgress | Finished
