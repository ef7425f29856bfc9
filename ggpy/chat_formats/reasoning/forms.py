"""Which answers of a form may begin with reasoning, and the grammar of those that do.

JSON of a schema begins where reasoning ends. A grammar says all of the answer: it holds from the
first token on. The server, `ggpy run` and the library all ask here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..chat_format import ChatFormat
from ..constraint import can_answer_after_reasoning, json_grammar

if TYPE_CHECKING:
    from ...generate_options import Form

JSON_KINDS = ("json_schema", "json_object")


class FormsAfterReasoning:
    """The forms of answers in one chat format. markers: its control tokens, with their ids.
    template: of the conversations.
    """

    def __init__(
        self, chat_format: ChatFormat, markers: Mapping[str, int], template: str | None
    ) -> None:
        self._format, self._markers, self._template = chat_format, markers, template or ""

    @property
    def knows_reasoning(self) -> bool:
        """Whether the template has reasoning."""
        closer = self._format.reasoning_close
        written = bool(closer) and closer in self._template
        return written or self._format.reasoning_opened or self._format.channels is not None

    def may_follow(self, kind: str) -> bool:
        """Whether an answer of this kind of grammar may begin with reasoning."""
        follows = self.knows_reasoning and can_answer_after_reasoning(self._format, self._markers)
        return kind in JSON_KINDS and follows

    def after_reasoning(self, form: Form, opened: bool) -> Form:
        """A form that `may_follow`, with the reasoning before it; ValueError. A schema that will be
        refused stays as it is. opened: the prompt ends inside reasoning.
        """
        schema = {} if (read := schema_of(*form)) is True else read
        if not isinstance(schema, dict):
            return form
        options: dict[str, Any] = {"special": self._markers, "reasoning_open": opened}
        return "lark", json_grammar(self._format, schema, **options)


def schema_of(kind: str, text: str) -> Any:
    """The schema of a form that is JSON; None for a text that is none."""
    try:
        return json.loads(text) if kind == "json_schema" else {"type": "object"}
    except (ValueError, RecursionError):
        return None


def leave_half(budget: int, max_tokens: int | None) -> int:
    """A budget of reasoning that leaves half of an answer's tokens for the form. -1 is no limit."""
    if max_tokens is None:
        return budget
    return max_tokens // 2 if budget < 0 else min(budget, max_tokens // 2)
