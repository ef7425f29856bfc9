"""Every backend has the contract's signatures; traces find the first op that differs."""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import pytest

from ggpy.backends import interface, trace
from ggpy.backends.interface import INNER
from ggpy.backends.numpy.backend import Reference
from ggpy.backends.trace import Trace
from ggpy.gguf import File
from ggpy.model import Model
from ggpy.tokenizer import Tokenizer
from tools import diff_backends

FOLDER = Path(interface.__file__).parent


def signatures(node: ast.ClassDef) -> dict[str, str]:
    """Method -> its arguments and defaults; a backend annotates them in its own types."""
    found = {}
    for f in node.body:
        if isinstance(f, ast.FunctionDef) and not f.name.startswith("_"):
            for argument in [*f.args.args, *f.args.kwonlyargs]:
                argument.annotation = None
            found[f.name] = ast.unparse(f.args)
    return found


def classes() -> dict[str, dict[str, str]]:
    """Every class with ops of layers, read without importing it."""
    nodes = [n for p in FOLDER.rglob("*.py") for n in ast.parse(p.read_text(encoding="utf-8")).body]
    found = {n.name: signatures(n) for n in nodes if isinstance(n, ast.ClassDef)}
    return {name: methods for name, methods in found.items() if {"embed", "logits"} <= set(methods)}


CLASSES = classes()
CONTRACT = CLASSES.pop("Ops")
WHOLE = ["Reference", "Cuda", "Forwarding"]  # the others inherit from one of these


def test_all_backends_are_looked_at():
    assert set(WHOLE) <= set(CLASSES) and {"mix", "feed_forward"} <= set(CONTRACT)


@pytest.mark.parametrize("backend", CLASSES)
def test_signatures_are_the_contracts(backend):
    found = CLASSES[backend]
    assert {name: x for name, x in found.items() if name in CONTRACT}.items() <= CONTRACT.items()
    assert backend not in WHOLE or found.keys() >= CONTRACT.keys()


@pytest.mark.parametrize("backend", [Reference(1), Trace(Reference(1))])
def test_attributes_are_the_contracts(backend):
    for name in interface.Ops.__annotations__:
        assert hasattr(backend, name)


def traced(path, name: str | None = None) -> Trace:
    """A forward pass of a tiny model; what layer 1 computes inside is made wrong by a little."""

    class Wrong(Reference):
        def run(self, step, forward, probe=None):
            def change(layer, inner, array):
                if (layer, inner) == (1, name):
                    array *= np.float32(1.01)
                probe(layer, inner, array)

            return super().run(step, forward, change)

    tracer = Trace(Wrong(1))
    with File(path) as file:
        Model(file, Tokenizer.from_gguf(file), tracer, n_ctx=64).logits([5, 6, 7])
    return tracer


def test_trace_names_every_op_and_its_layer(tiny_path):
    records = traced(tiny_path("gemma3")).records
    assert [r.op for r in records] == ["embed", *INNER, *INNER, "logits"]
    assert [r.layer for r in records] == [-1, *[0] * 5, *[1] * 5, 2]
    shapes = [r.output.shape for r in records[:6]]
    assert shapes == [(3, 64), (3, 4, 32), (3, 128), (3, 64), (3, 96), (3, 64)]


def test_trace_records_samples_and_tells_another_probe(tiny_path):
    told: list[str] = []
    with File(tiny_path("llama")) as file:
        model = Model(file, Tokenizer.from_gguf(file), Trace(Reference(1)), n_ctx=64)
    ops, decoder = model.ops, model.decoder
    decoder.run = lambda step: ops.run(step, decoder.forward, lambda *x: told.append(x[1]))
    (piece,) = model.generate([5, 6], max_tokens=1, temperature=0)
    assert told == [*INNER, *INNER]
    assert ops.records[-1].op == "sample" and ops.records[-1].output.tolist() == [piece.id]


@pytest.mark.parametrize("name", INNER)
def test_first_difference_is_where_the_error_is(tiny_path, name):
    path = tiny_path("llama")
    good = traced(path).records
    assert trace.first_difference(good, traced(path).records, 1e-6) is None
    found = trace.first_difference(good, traced(path, name).records, 1e-4)
    assert (found.layer, found.op) == (1, name)
    assert found.error == pytest.approx(0.01, rel=0.1)


def test_not_a_number_is_a_difference(tiny_path):
    good = traced(tiny_path("llama")).records
    bad = [*good[:-1], trace.Record(2, "logits", good[-1].output * np.nan)]
    assert trace.first_difference(good, bad, 1e9).op == "logits"
    with pytest.raises(ValueError, match="not of the same step"):
        trace.errors(good, good[1:])


def test_tool_compares_backends(tiny_path, capsys):
    arguments = [str(tiny_path("qwen2")), "--prompt", "hello world", "cpu", "cpu"]
    assert diff_backends.main(arguments) == 0
    assert "no op differs" in capsys.readouterr().out
    assert diff_backends.main([*arguments, "--tolerance", "-1"]) == 1
    assert "first at layer -1, embed" in capsys.readouterr().out
