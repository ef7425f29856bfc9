"""What an answer to a conversation must match: a call that is demanded, a form, or one of the two.

Nothing here knows HTTP or the engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...chat_formats import ChatFormat
from ...chat_formats.constraint import call_grammar, can_answer_instead
from ...chat_formats.reasoning.forms import (
    JSON_KINDS,
    FormsAfterReasoning,
    leave_half,
    schema_of,
)
from ..errors import ApiError
from ..events import ChatRequest, Constraint
from ..settings import ServerSettings

CHARACTERS_PER_TOKEN = 4  # about as many, in most languages and vocabularies


class ChatConstraints:
    """The constraints of one model's answers. markers: its control tokens, as the format knows
    them. template: of its conversations.
    """

    def __init__(
        self, chat_format: ChatFormat, markers: Mapping[str, int], template: str | None
    ) -> None:
        self._format, self._markers = chat_format, markers
        self._forms = FormsAfterReasoning(chat_format, markers, template)

    def of(self, request: ChatRequest, opened: bool) -> Constraint | None:
        """The grammar of an answer that must call a tool, or what the options ask for; ApiError.
        opened: whether the prompt ends inside reasoning.
        """
        if request.tool_choice in ("auto", "none"):
            return self._form(request, opened)
        if request.options.constraint is not None:
            raise ApiError(
                400,
                "tool_choice demands a call, and response_format or grammar a text: give one",
                param="tool_choice",
            )
        name = request.tool_choice.removeprefix("name:")
        tools = {n: s for n, s in schemas(request.tools).items() if name in ("required", n)}
        if not tools:
            told = "tool_choice demands a call of a tool that is not in tools"
            raise ApiError(400, told, param="tool_choice")
        try:
            text = call_grammar(
                self._format,
                tools,
                request.parallel_tool_calls and name == "required",
                special=self._markers,
                reasoning_open=opened,
                reasoning_limit=self._reasoning_limit(request, opened),
            )
        except ValueError as error:
            raise ApiError(400, str(error), param="tool_choice") from None
        return Constraint("lark", text, "tools")

    def allow_reasoning(self, request: ChatRequest) -> bool:
        """Whether the answer may begin with reasoning: without a constraint it always may. JSON
        begins after reasoning, if the model has some and the request does not turn it off. A
        grammar holds from the first token on, and an answer that has begun goes on as it is.
        """
        constraint = request.options.constraint
        if constraint is None:
            return True
        begun = request.continues and request.messages[-1]["role"] == "assistant"
        return (
            request.reasoning
            and request.reasoning_budget != 0
            and not begun
            and request.may_think
            and self._forms.may_follow(constraint.kind)
        )

    def _form(self, request: ChatRequest, opened: bool) -> Constraint | None:
        """What the options ask for, after reasoning where that is allowed."""
        constraint = request.options.constraint
        if constraint is None or not self.allow_reasoning(request):
            return constraint
        try:
            kind_and_text = self._forms.after_reasoning((constraint.kind, constraint.text), opened)
        except ValueError as error:
            raise ApiError(400, str(error), param=constraint.param) from None
        return Constraint(*kind_and_text, constraint.param)  # type: ignore[arg-type]

    def call_or_json(self, request: ChatRequest, opened: bool) -> Constraint | None:
        """The grammar of an answer that calls tools, or is the JSON that the options ask for: an
        agent gives its tools, and the form of its last answer, in each request. None where only one
        of them is given, or where the first characters do not tell them apart.
        """
        constraint, tools = request.options.constraint, schemas(request.tools)
        if constraint is None or not tools or request.tool_choice != "auto":
            return None
        if constraint.kind not in JSON_KINDS:
            return None
        schema = schema_of(constraint.kind, constraint.text)
        if not can_answer_instead(self._format, self._markers) or not isinstance(schema, dict):
            return None
        try:
            text = call_grammar(
                self._format,
                tools,
                request.parallel_tool_calls,
                special=self._markers,
                reasoning_open=opened,
                reasoning_limit=self._reasoning_limit(request, opened),
                answer=schema,
            )
        except ValueError:
            return None
        return Constraint("lark", text, constraint.param)

    def _reasoning_limit(self, request: ChatRequest, opened: bool) -> int | None:
        """Characters of reasoning before what is demanded: about half of the answer's tokens; a
        budget counts tokens instead. There is none if the template does not know it, or it is
        turned off.
        """
        allowed = (
            request.may_think and self._forms.knows_reasoning and self.allow_reasoning(request)
        )
        if not opened and not allowed:
            return 0
        n = request.options.max_tokens
        return None if n is None or request.reasoning_budget >= 0 else n * CHARACTERS_PER_TOKEN // 2


def limited(request: ChatRequest, settings: ServerSettings) -> ChatRequest:
    """The request with the server's budget of reasoning, if it has none of its own; before a call
    or a form that is demanded, half of the answer's tokens at most.
    """
    budget, asked = request.reasoning_budget, request.template_variables.get("enable_thinking")
    if budget < 0 and not (settings.reasoning_budget == 0 and asked):
        budget = settings.reasoning_budget
    n, has_form = request.options.max_tokens, request.options.constraint is not None
    demanded = has_form or request.tool_choice not in ("auto", "none")
    if (demanded and budget > 0) or (has_form and budget < 0):
        budget = leave_half(budget, n)
    message = request.reasoning_message
    message = settings.reasoning_message if message is None else message
    told_apart = request.reasoning and settings.reasoning_format != "none"
    return replace(
        request, reasoning=told_apart, reasoning_budget=budget, reasoning_message=message
    )


def schemas(tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Name -> JSON schema of the arguments, of tools in OpenAI's form."""
    functions = [tool["function"] for tool in tools]
    return {f["name"]: f.get("parameters") or {} for f in functions}
