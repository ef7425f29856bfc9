"""Whole answers under grammars: through the engine on both backends, the library and `ggpy run`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import jsonschema
import pytest

import ggpy
from ggpy import arch
from ggpy.backends.cuda import backend as cuda
from ggpy.backends.cuda import sampling
from ggpy.backends.numpy.backend import Reference
from ggpy.cli import run
from ggpy.gguf import File
from ggpy.grammar import GrammarError
from ggpy.runtime.engine import Engine
from ggpy.sampling import SamplingParams

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "size"],
    "additionalProperties": False,
}
COLORS = 'root ::= "red" | "green" | "blue"'


def conforms(text: str) -> bool:
    jsonschema.validate(json.loads(text), SCHEMA)
    return True


PARAMS = [
    SamplingParams(seed=1),
    SamplingParams(temperature=0),
    SamplingParams(seed=2, temperature=2.0, top_k=0, presence_penalty=1.0),
    SamplingParams(seed=3, typical_p=0.9),  # numpy draws it on a GPU, too
    SamplingParams(seed=4, temperature=0, repeat_penalty=1.3),
]


def answers(ops, path, tokenizer, grammars, constrained=(True,) * 5, **options):
    """The ids of sequences that are evaluated together, some of them under a schema."""
    with File(path) as file:
        decoder = arch.load(file, ops, 192)
    engine = Engine(decoder, ops, tokenizer, 192, n_batch=16, n_seq=5, **options)
    sequences = []
    for i, (params, under) in enumerate(zip(PARAMS, constrained, strict=True)):
        mask = grammars.compile("json_schema", json.dumps(SCHEMA)) if under else None
        prompt = tokenizer.encode("hello world " * (i + 1))
        most = 150 if under else 20
        sequences.append(engine.add(prompt, params, max_tokens=most, grammar=mask))
    while engine.busy:
        engine.step()
    assert [s.error for s in sequences] == [None] * 5
    ids = [[p.id for p in s.pieces] for s in sequences]
    texts = ["".join(p.text for p in s.pieces) for s in sequences]
    for s, text, under in zip(sequences, texts, constrained, strict=True):
        assert not under or (s.finish == "stop" and conforms(text))
    return ids


@pytest.mark.parametrize("ahead", [False, True])
def test_answers_conform_and_leave_the_others_alone(tiny_path, tokenizer, grammars, ahead):
    path, mixed = tiny_path("llama"), (True, False, True, False, True)
    made = answers(Reference(1), path, tokenizer, grammars, mixed, run_ahead=ahead)
    free = answers(Reference(1), path, tokenizer, grammars, (False,) * 5, run_ahead=ahead)
    assert [a == b for a, b in zip(made, free, strict=True)] == [not under for under in mixed]


SHORT = 'root ::= "{" [a-z ]{2,4} "}"'


def test_a_gpu_draws_what_numpy_draws(machine, tiny_path, tokenizer, grammars, monkeypatch):
    """Of the same logits, beside a sequence without a grammar."""

    def made():
        with File(tiny_path("llama")) as file:
            ops = cuda.Cuda(machine)
            engine = Engine(arch.load(file, ops, 64), ops, tokenizer, 64, n_batch=16, n_seq=4)
        masks = [grammars.compile("gbnf", SHORT) if i != 1 else None for i in range(3)]
        sequences = [
            engine.add([1, 287, 296 + i], params, max_tokens=9, grammar=mask)
            for i, (params, mask) in enumerate(zip(PARAMS, masks, strict=False))
        ]
        while engine.busy:
            engine.step()
        texts = ["".join(p.text for p in s.pieces) for s in sequences]
        assert re.fullmatch(r"\{[a-z ]{2,4}\}", texts[0]) and re.fullmatch(r"\{.*\}", texts[2])
        return [[p.id for p in s.pieces] for s in sequences]

    found = made()
    monkeypatch.setattr(sampling, "n_candidates", lambda sampler: 0)
    assert made() == found


def test_a_sequence_without_an_allowed_token_ends_alone(tiny_path, tokenizer, grammars):
    """Its end tokens are forbidden by biases: where the text is complete, nothing is left."""
    with ggpy.load(tiny_path("llama"), device="cpu", n_seq=2) as model:
        forbidden = dict.fromkeys(tokenizer.end_ids, -float("inf"))
        pieces = []
        with pytest.raises(ValueError, match="highest logit is -inf"):
            for piece in model.generate("hello", grammar=COLORS, logit_bias=forbidden):
                pieces.append(piece.text)
        assert "".join(pieces) in ("red", "green", "blue")
        assert len(list(model.generate("hello", max_tokens=3, seed=5))) == 3


def test_the_library_takes_grammars_and_schemas(tiny_path):
    with ggpy.load(tiny_path("llama"), device="cpu", n_seq=2) as model:
        for schema in (SCHEMA, json.dumps(SCHEMA)):
            pieces = list(model.generate("hello", json_schema=schema, seed=1, max_tokens=200))
            assert conforms("".join(map(str, pieces))) and pieces[-1].finish_reason == "stop"
        texts = ["", "", ""]
        for piece in model.generate(["a", "b", "c"], grammar=COLORS, temperature=3.0, seed=1):
            texts[piece.index] += piece.text
        assert all(text in ("red", "green", "blue") for text in texts)
        messages = [{"role": "user", "content": "which?"}]
        assert "".join(map(str, model.chat(messages, grammar=COLORS))) in ("red", "green", "blue")
        (piece,) = model.generate("x", grammar='root ::= "r"', max_tokens=1, top_logprobs=3)
        assert piece.text == "r" and len(piece.top_logprobs) == 3  # the model's own, of all tokens
        for wrong, words in [
            ({"grammar": "root ::= x"}, "no rule x"),
            ({"json_schema": {"type": "objec"}}, "Invalid type"),
            ({"json_schema": 3}, "give a dict"),
            ({"grammar": COLORS, "json_schema": {}}, "give one of them"),
        ]:
            with pytest.raises(GrammarError, match=words):
                model.generate("x", **wrong)


@pytest.fixture
def cli(capsys, tiny_path: Callable[[str], Path]):
    """Runs `ggpy run` in this process: exit status, stdout, stderr."""

    def call(*arguments: str) -> tuple[int, str, str]:
        model = [str(tiny_path("llama")), "--device", "cpu", "--no-chat", "-s", "1", "-p", "hello"]
        try:
            status = run.main([*model, *arguments])
        except SystemExit as end:
            status = int(end.code or 0)
        return (status, *capsys.readouterr())

    return call


def test_the_command_line_takes_them_as_text_and_as_files(cli, tmp_path):
    grammar, schema = tmp_path / "colors.gbnf", tmp_path / "schema.json"
    grammar.write_text(COLORS + "\n")
    schema.write_text(json.dumps(SCHEMA))
    status, text, _ = cli("--grammar", COLORS)
    assert status == 0 and text in ("red\n", "green\n", "blue\n")
    assert cli("--grammar-file", str(grammar))[1] == text
    status, text, _ = cli("-j", json.dumps(SCHEMA), "--temp", "0.5")
    assert status == 0 and conforms(text)
    assert cli("--json-schema-file", str(schema), "--temp", "0.5")[1] == text
    assert cli("--json-schema", "{ }", "-n", "1")[1] == "{\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--grammar", "root ::= a"], "GBNF, line 1: there is no rule a"),
        (["--grammar-file", "nowhere.gbnf"], "nowhere.gbnf"),
        (["-j", "{"], "the JSON schema is not JSON"),
        (["-j", '{"not": {}}'], 'JSON schema: Unimplemented keys: ["not"]'),
        (["-jf", "nowhere.json"], "nowhere.json"),
        (["-j", "{}", "--grammar", COLORS], "not allowed with"),
        (["-jf", "x", "-j", "{}"], "not allowed with"),
        (["-j", "{}", "--ignore-eos"], "--ignore-eos leaves no token"),
    ],
)
def test_mistakes_are_told_in_one_line_before_the_model_is_loaded(cli, arguments, words):
    status, out, err = cli(*arguments)
    assert (status, out) == (2, "") and words in err.splitlines()[-1]
    assert not re.search(r"^(device|model):", err, re.M)
