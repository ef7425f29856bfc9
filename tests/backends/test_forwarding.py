"""Ops that forward: every member of the contract reaches the ops that are wrapped, unchanged."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from ggpy.backends.forwarding import Forwarding, chained
from ggpy.backends.interface import Ops

METHODS = {name: f for name, f in vars(Ops).items() if inspect.isfunction(f) and name[0] != "_"}


class Noting:
    """Ops that note each call, and return something of their own for it."""

    name, reason, asynchronous, activations = "noting", "a test", True, "f16"

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.results: dict[str, object] = {name: object() for name in METHODS}

    def __getattr__(self, name: str) -> Any:
        if name not in METHODS:
            raise AttributeError(name)

        def call(*args: Any) -> object:
            self.calls.append((name, args))
            return self.results[name]

        return call


def test_the_contract_is_walked() -> None:
    assert {"mix", "feed_forward", "run", "plan_memory", "clear_pages"} <= set(METHODS)
    assert set(Ops.__annotations__) == {"name", "reason", "asynchronous", "activations"}


@pytest.mark.parametrize("name", METHODS)
def test_every_op_is_forwarded(name: str) -> None:
    ops = Noting()
    own, theirs = getattr(Forwarding(ops), name), inspect.signature(METHODS[name])  # type: ignore[arg-type]
    parameters = list(theirs.parameters.values())[1:]
    assert [(p.name, p.default) for p in inspect.signature(own).parameters.values()] == [
        (p.name, p.default) for p in parameters
    ]
    given = tuple(object() for _ in parameters)
    returned = own(*given)
    assert ops.calls == [(name, given)]
    assert returned is (None if theirs.return_annotation == "None" else ops.results[name])


def test_what_a_backend_says_of_itself_is_forwarded() -> None:
    ops = Forwarding(Noting())  # type: ignore[arg-type]
    assert (ops.name, ops.reason, ops.asynchronous) == ("noting", "a test", True)
    assert ops.activations == "f16"


def test_chained_probes_are_told_in_turn() -> None:
    told: list[tuple[str, int]] = []

    def first(layer: int, name: str, array: Any) -> None:
        told.append(("first", layer))

    assert chained(first, None) is first
    chained(first, lambda layer, name, array: told.append((name, layer)))(3, "qkv", None)
    assert told == [("first", 3), ("qkv", 3)]
