"""Every backend has the contract's signatures; traces find the first op that differs."""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import pytest

from ggpy.backends import interface, trace
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
    """Every backend that computes attention, read without importing it."""
    nodes = [n for p in FOLDER.rglob("*.py") for n in ast.parse(p.read_text(encoding="utf-8")).body]
    found = {n.name: signatures(n) for n in nodes if isinstance(n, ast.ClassDef)}
    return {name: methods for name, methods in found.items() if "attend" in methods}


BACKENDS = classes()
CONTRACT = BACKENDS.pop("Ops")


def test_all_backends_are_looked_at():
    assert {"Reference", "Trace"} <= set(BACKENDS) and len(CONTRACT) == 15


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("method", CONTRACT)
def test_signature_is_the_contracts(backend, method):
    assert BACKENDS[backend].get(method) == CONTRACT[method]


@pytest.mark.parametrize("backend", [Reference(1), Trace(Reference(1))])
def test_attributes_are_the_contracts(backend):
    for name in ("name", "reason", "asynchronous"):
        assert hasattr(backend, name)


def traced(path, change: str | None = None) -> Trace:
    """A forward pass of a tiny model; one op of layer 1 is made wrong by a little."""
    ops = Reference(1)
    if change:
        original = getattr(ops, change)

        def wrong(*args):
            layer = args[1].layer if change in ("qkv", "attend") else 1
            return original(*args) * np.float32(1.01 if layer == 1 else 1)

        setattr(ops, change, wrong)
    tracer = Trace(ops)
    with File(path) as file:
        Model(file, Tokenizer.from_gguf(file), tracer, n_ctx=64).logits([5, 6, 7])
    return tracer


def test_trace_names_every_op_and_its_layer(tiny_path):
    records = traced(tiny_path("gemma3")).records
    layer = ["qkv", "attend", "linear_add", "ffn", "linear_add"]
    assert [r.op for r in records] == ["embed", *layer, *layer, "logits"]
    assert [r.layer for r in records] == [-1, *[0] * 5, *[1] * 5, 2]
    assert records[0].output.shape == (3, 64)


@pytest.mark.parametrize("op", ["qkv", "attend"])
def test_first_difference_is_where_the_error_is(tiny_path, op):
    path = tiny_path("llama")
    good = traced(path).records
    assert trace.first_difference(good, traced(path).records, 1e-6) is None
    found = trace.first_difference(good, traced(path, op).records, 1e-4)
    assert (found.layer, found.op) == (1, op)
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
