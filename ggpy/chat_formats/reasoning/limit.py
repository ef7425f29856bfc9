"""How the answers to prompts of one chat template reason: how long, and before which form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from ..chat_format import ChatFormat
from ..deltas import ReasoningPart, TextPart
from ..detect import detect
from ..parser import ChatParser
from .budget import reasoning_budget
from .forms import FormsAfterReasoning, leave_half

if TYPE_CHECKING:
    from ...generate_options import Compile, Form, Limiter
    from ...sampling import Split, TokenMask
    from ...tokenizer import Tokenizer

LONGEST_OPENER = 64  # tokens

# The last template of a tokenizer, and its format: probing one takes some 40 milliseconds.
_detected: WeakKeyDictionary[Tokenizer, tuple[str, ChatFormat]] = WeakKeyDictionary()


@dataclass(frozen=True)
class ReasoningLimit:
    """The reasoning of all answers to prompts of one chat template; `of` detects its format.

    n_tokens: of reasoning at most, after which the model is made to say the message; -1 is no
    limit. form: what an answer must match. JSON follows the reasoning, where `precedes_form`; any
    other answer of a form has no reasoning.
    """

    chat_format: ChatFormat
    tokenizer: Tokenizer
    n_tokens: int
    message: str = ""
    template: str = ""
    form: Form | None = None

    @classmethod
    def of(
        cls, tokenizer: Tokenizer, template: str | None, n_tokens: int, message: str = ""
    ) -> ReasoningLimit:
        """The limit for a template, which is Jinja; None is the model's own."""
        written = (tokenizer.chat_template if template is None else template) or ""
        known, found = _detected.get(tokenizer, ("", None))
        if found is None or known != written:
            found = _format_of(tokenizer, template)
            _detected[tokenizer] = written, found
        return cls(found, tokenizer, n_tokens, message, written)

    def fitted(self, form: Form | None, max_tokens: int | None) -> ReasoningLimit:
        """The limit for answers of a form with so many tokens at most: half of them for the form,
        as in the server.
        """
        found = replace(self, form=form)
        if not found.precedes_form:
            return found
        return replace(found, n_tokens=leave_half(self.n_tokens, max_tokens))

    @property
    def precedes_form(self) -> bool:
        """Whether there is a form, and reasoning may come before it."""
        return self.form is not None and self.n_tokens != 0 and self._forms.may_follow(self.form[0])

    @property
    def variables(self) -> dict[str, Any]:
        """What the chat template is told of it."""
        if self.n_tokens == 0 or self._is_plain:
            return {"enable_thinking": False}
        return {"thinking_budget": self.n_tokens} if self.n_tokens > 0 else {}

    def closed(self, rendered: str) -> str:
        """The rendered prompt; reasoning at its end is closed if the answer is a form alone."""
        return self.chat_format.without_reasoning(rendered) if self._is_plain else rendered

    def mask(self, prompt: Sequence[int], compile: Compile) -> TokenMask | None:
        """What an answer to the ids of a prompt must match: the form, the limit, or both.

        compile: makes the mask of a form (`Grammars.compile`), whose errors are raised.
        """
        opened = self._opened(prompt)
        mask = None if self.form is None else self._compiled(self.form, opened, compile)
        if self.n_tokens < 0:
            return mask
        limits = self.n_tokens, self.message
        budget = reasoning_budget(
            self.chat_format, self.tokenizer, *limits, opened=opened, mask=mask
        )
        return budget or mask

    def prompt(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The ids of a conversation to be answered; ChatTemplateError, ValueError."""
        variables, template = self.variables, self.template or None
        rendered = self.tokenizer.apply_chat_template(messages, template, variables=variables)
        return self.tokenizer.encode_chat(self.closed(rendered))

    def split(self, prompt: Sequence[int]) -> Split | None:
        """What tells reasoning from the text of one answer to a prompt, a `Sequence.split`; None
        where no reasoning precedes a form. The text must have control tokens.
        """
        if not self.precedes_form:
            return None
        return partial(_split, self.chat_format.parser(reasoning_open=self._opened(prompt)))

    @cached_property
    def _forms(self) -> FormsAfterReasoning:
        markers = self.chat_format.control_markers(self.tokenizer)
        return FormsAfterReasoning(self.chat_format, markers, self.template)

    @property
    def _is_plain(self) -> bool:
        return self.form is not None and not self.precedes_form

    def _opened(self, prompt: Sequence[int]) -> bool:
        end = self.tokenizer.decode(prompt[-LONGEST_OPENER:], special=True)
        return self.chat_format.opens_reasoning(end)

    def _compiled(self, form: Form, opened: bool, compile: Compile) -> TokenMask:
        if not self.precedes_form:
            return compile(*form)
        try:
            return compile(*self._forms.after_reasoning(form, opened))
        except ValueError:
            compile(*form)  # what is wrong with the form is told in its own terms
            raise


def mask_and_split(
    prompt: Sequence[int], form: Form | None, limit: Limiter | None, compile: Compile
) -> tuple[TokenMask | None, Split | None]:
    """What an answer to the ids of a prompt must match, and what tells its reasoning apart. Without
    a limit a form holds from the first token on.
    """
    if limit is not None:
        return limit.mask(prompt, compile), limit.split(prompt)
    return None if form is None else compile(*form), None


def _split(parser: ChatParser, text: str, last: bool) -> tuple[str, str]:
    """The reasoning and the text that are certain with this piece of an answer."""
    deltas = parser.feed(text) + (parser.finish() if last else [])
    thought = "".join(delta.text for delta in deltas if isinstance(delta, ReasoningPart))
    return thought, "".join(delta.text for delta in deltas if isinstance(delta, TextPart))


def _format_of(tokenizer: Tokenizer, template: str | None) -> ChatFormat:
    def render(
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        options = {"tools": tools, "variables": variables}
        return tokenizer.apply_chat_template(messages, template, **options)  # type: ignore[arg-type]

    found = detect(render)
    return found.fitted(found.control_markers(tokenizer))
