"""What the clients' tests ask: questions, tools whose calls a random model can finish, schemas."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

HELLO: list[Any] = [{"role": "user", "content": "hello"}]


class Weather(BaseModel):
    """The weather of a city."""

    model_config = ConfigDict(extra="forbid")  # a random model would add properties for ever

    city: Literal["Paris", "Rome"]
    days: int = Field(ge=0, le=9)


class Clock(BaseModel):
    """The time of a zone."""

    model_config = ConfigDict(extra="forbid")

    zone: Literal["UTC", "CET"]


def function(model: type[BaseModel]) -> dict[str, Any]:
    """A tool in OpenAI's form, whose arguments are those of a model."""
    schema = model.model_json_schema()
    told = {"name": model.__name__, "description": model.__doc__, "parameters": schema}
    return {"type": "function", "function": told}


TOOLS = [function(Weather), function(Clock)]


def check(name: str, arguments: Any) -> BaseModel:
    """The arguments of a call, as its tool reads them."""
    model = {"Weather": Weather, "Clock": Clock}[name]
    if isinstance(arguments, str):
        return model.model_validate_json(arguments)
    return model.model_validate(arguments)
