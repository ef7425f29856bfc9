"""OpenAI's embeddings API over given vectors: through its SDK, and body by body."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from running_server import RunningServer, metric, running
from scripted_service import ScriptedService, serving

from ggpy.serve.api import embeddings as api
from ggpy.serve.errors import ApiError
from ggpy.serve.fields import Fields

sdk = pytest.importorskip("openai")


@pytest.fixture(scope="module")
def service() -> ScriptedService:
    return ScriptedService()


@pytest.fixture(scope="module")
def client(service: ScriptedService) -> Iterator[Any]:
    with (
        serving(service) as address,
        sdk.OpenAI(base_url=address + "/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


def read(input: Any, **more: Any) -> api.EmbeddingsCall:
    return api.read(Fields({"input": input, **more}), ScriptedService())


def test_the_sdk_asks_for_base64_and_gets_the_same_bits(
    client: Any, service: ScriptedService
) -> None:
    """Its default is base64, which it turns into numbers itself."""
    packed = client.embeddings.create(model="tiny", input=["ab", "c"])
    plain = client.embeddings.create(model="tiny", input=["ab", "c"], encoding_format="float")
    for answer in (packed, plain):
        assert [e.index for e in answer.data] == [0, 1]
        assert [e.embedding for e in answer.data] == service.vectors[:2].tolist()
        assert (answer.model, answer.object) == ("tiny", "list")
        assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (3, 3)


def test_base64_is_little_endian_float32() -> None:
    vector = np.array([1.5, -2.25, 1e-30], np.float32)
    told = api.answer([(vector, 1)], read("x", encoding_format="base64"), "tiny")
    packed = b64decode(told["data"][0]["embedding"])
    assert np.array_equal(np.frombuffer(packed, "<f4"), vector)


def test_fewer_dimensions_have_length_one(client: Any) -> None:
    answer = client.embeddings.create(model="tiny", input="x", dimensions=2)
    assert answer.data[0].embedding == pytest.approx([0.6, 0.8]), "(3, 4, 0, 0) cut and divided"
    assert client.embeddings.create(model="tiny", input="x", dimensions=4).data[0].embedding == [
        3,
        4,
        0,
        0,
    ]
    with pytest.raises(sdk.BadRequestError, match="dimensions is 5: the model has 4") as caught:
        client.embeddings.create(model="tiny", input="x", dimensions=5)
    assert caught.value.param == "dimensions"


def test_a_vector_of_zeros_stays_one() -> None:
    zeros = np.zeros(4, np.float32)
    assert api.cut(zeros, 2).tolist() == [0, 0]


@pytest.mark.parametrize(
    ("input", "inputs"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        (["a", [1]], ["a", [1]]),
        ([1, "a", 2], [[1, "a", 2]]),
        (["a", -1], [["a", -1]]),
        ([[1, "a"], "b"], [[1, "a"], "b"]),
        ({"prompt_string": "a"}, ["a"]),
        ({"content": [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]}, ["a b"]),
        (["a", {"prompt_string": [1, "b"]}], ["a", [1, "b"]]),
    ],
)
def test_texts_and_ids(input: Any, inputs: list[Any]) -> None:
    assert read(input).inputs == inputs


@pytest.mark.parametrize(
    ("body", "path"),
    [
        ({}, "input"),
        ({"input": 3}, "input"),
        ({"input": {}}, "input.content"),
        ({"input": {"content": "a"}}, "input.content"),
        ({"input": {"content": []}}, "input.content"),
        ({"input": ["a", {"content": [{"type": "image_url"}]}]}, "input[1].content[0].type"),
        ({"input": {"prompt_string": ""}}, "input"),
        ({"input": {"prompt_string": {"content": []}}}, "input.prompt_string"),
        (
            {"input": {"prompt_string": "a", "multimodal_data": ["AAAA"]}},
            "input.multimodal_data",
        ),
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": ["a", None]}, "input[1]"),
        ({"input": [1, None]}, "input"),
        ({"input": ["a", [1, 1.5]]}, "input[1]"),
        ({"input": [True]}, "input[0]"),
        ({"input": [[]]}, "input[0]"),
        ({"input": [["a", "b"]]}, "input[0]"),
        ({"input": [[[1]]]}, "input[0]"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": "a", "model": 1}, "model"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": "4"}, "dimensions"),
    ],
)
def test_a_wrong_value_is_told_with_its_field(body: dict[str, Any], path: str) -> None:
    with pytest.raises(ApiError) as caught:
        api.read(Fields(body), ScriptedService())
    assert (caught.value.status, caught.value.param) == (400, path)
    assert path in caught.value.message


def test_a_vector_that_is_not_finite_is_an_error() -> None:
    for form in ("float", "base64"):
        with pytest.raises(ApiError, match="not a finite number"):
            vector = np.array([1, np.nan], np.float32)
            api.answer([(vector, 1)], read("x", encoding_format=form), "tiny")


def test_an_input_that_is_too_long_is_named(server: RunningServer) -> None:
    """By its place among all inputs, which are evaluated in groups."""
    answer = server.post("/v1/embeddings", input=["one two " * 9] * 5 + ["one " * 300])
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["n_ctx"]) == (400, "input", 256)
    assert error["message"].startswith("input 5 of the list: context is 256 tokens")


def test_inputs_of_one_text_have_one_vector(server: RunningServer) -> None:
    """llama.cpp's objects, and ids with texts between them."""
    ids = server.post("/tokenize", content="world").json()["tokens"]
    parts = [{"type": "text", "text": "hello "}, {"type": "text", "text": "world"}]
    inputs = ["hello world", {"content": parts}, {"prompt_string": "hello world"}, ["hello", *ids]]
    found = server.post("/v1/embeddings", input=inputs).json()["data"]
    first, *others = [e["embedding"] for e in found]
    (native,) = server.post("/v1/embeddings", content="hello world").json()
    for other in (*others, *native["embedding"]):
        assert other == pytest.approx(first, abs=1e-5)
    assert len(others) == 3


def test_without_pooling_each_token_has_a_vector(server: RunningServer) -> None:
    before = metric(server, "llamacpp:prompt_tokens_total")
    n = server.post("/v1/embeddings", input="hello world").json()["usage"]["prompt_tokens"]
    assert metric(server, "llamacpp:prompt_tokens_total") == before + n
    with running(pooling="none") as found:
        (answer, other) = found.post("/embeddings", input=["hello world", "b"]).json()
        assert (len(answer["embedding"]), other["index"]) == (n, 1)
        last = np.array(answer["embedding"][-1])
        refused = found.post("/v1/embeddings", input="a")
        assert refused.status_code == 400 and "/embeddings" in refused.json()["error"]["message"]
    (pooled,) = server.post("/embeddings", input="hello world", embd_normalize=-1).json()
    assert pooled["embedding"][0] == pytest.approx(last, abs=1e-4), "the last one's, as it is"
    assert abs(np.linalg.norm(last) - 1) > 0.01
