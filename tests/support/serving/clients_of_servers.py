"""What the clients' tests ask: questions, tools whose calls a random model can finish, schemas."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

HELLO: list[Any] = [{"role": "user", "content": "hello"}]


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Paris", "Rome"]
    days: int = Field(ge=0, le=9)


class Clock(BaseModel):
    """The time of a zone."""

    zone: Literal["UTC", "CET"]


def schema_of(model: type[BaseModel]) -> dict[str, Any]:
    """The JSON schema of a model, without further properties."""
    return {**model.model_json_schema(), "additionalProperties": False}


def function(model: type[BaseModel]) -> dict[str, Any]:
    """A tool in OpenAI's form, whose arguments are those of a model."""
    told = {"name": model.__name__, "description": model.__doc__, "parameters": schema_of(model)}
    return {"type": "function", "function": told}


TOOLS = [function(Weather), function(Clock)]


def check(name: str, arguments: Any) -> BaseModel:
    """The arguments of a call, as its tool reads them."""
    model = {"Weather": Weather, "Clock": Clock}[name]
    if isinstance(arguments, str):
        return model.model_validate_json(arguments)
    return model.model_validate(arguments)
