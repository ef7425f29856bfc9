"""The rerank API: over given relevances, over HTTP and body by body; and over a reranker."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from checkpoints import to_gguf
from embedder_checkpoints import reranker
from running_server import RunningServer, calls_apart, eventually, idle, running, settled
from scripted_service import ScriptedService, serving

from ggpy.runtime.embedding.relevance import document_prompts, relevance
from ggpy.serve.api import rerank as api
from ggpy.serve.errors import ApiError
from ggpy.serve.fields import Fields

DOCUMENTS = ["a cat", "a red dog", "a red cat"]
BODY: dict[str, Any] = {"model": "tiny", "query": "red cat", "documents": DOCUMENTS}


def ranked(**more: Any) -> Any:
    """The answer to relevances of 0.5, 0.25 and 1."""
    call = api.read(Fields({**BODY, **more}), ScriptedService())
    return api.answer([(0.5, 2), (0.25, 3), (1.0, 4)], call, "tiny")


def test_over_http() -> None:
    with serving(ScriptedService()) as address:
        answer = httpx.post(f"{address}/v1/rerank", json=BODY).json()
        refused = httpx.post(f"{address}/v1/rerank", json={**BODY, "documents": "a"})
    found = [(r["index"], r["relevance_score"]) for r in answer["results"]]
    assert found == [(2, 1.0), (0, 0.5), (1, 0.5)]
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "documents")


def test_the_most_relevant_is_first() -> None:
    answer = ranked()
    assert [r["index"] for r in answer["results"]] == [2, 0, 1]
    assert [r["relevance_score"] for r in answer["results"]] == [1.0, 0.5, 0.25]
    assert (answer["model"], answer["usage"]) == ("tiny", {"prompt_tokens": 9, "total_tokens": 9})
    assert all("document" not in r for r in answer["results"])


def test_equals_stay_in_order() -> None:
    call = api.read(Fields(BODY), ScriptedService())
    results = api.answer([(0.0, 1), (1.0, 1), (1.0, 1)], call, "tiny")["results"]
    assert [r["index"] for r in results] == [1, 2, 0]


@pytest.mark.parametrize(("top_n", "indexes"), [(1, [2]), (2, [2, 0]), (9, [2, 0, 1])])
def test_top_n(top_n: int, indexes: list[int]) -> None:
    assert [r["index"] for r in ranked(top_n=top_n)["results"]] == indexes


def test_documents_come_back_where_they_are_wanted() -> None:
    objects = [{"text": text, "title": "x"} for text in DOCUMENTS]
    for documents in (DOCUMENTS, objects):
        results = ranked(documents=documents, return_documents=True)["results"]
        assert results[0]["document"] == {"text": "a red cat"}


def test_texts_are_answered_with_a_bare_list() -> None:
    """The form of Text Embeddings Inference."""
    bare = {"documents": None, "texts": DOCUMENTS}
    assert ranked(**bare, top_n=2) == [{"index": 2, "score": 1.0}, {"index": 0, "score": 0.5}]
    assert ranked(**bare, return_text=True)[0]["text"] == "a red cat"


@pytest.mark.parametrize(
    ("more", "path"),
    [
        ({"query": None}, "query"),
        ({"query": 1}, "query"),
        ({"model": 1}, "model"),
        ({"documents": None}, "documents"),
        ({"documents": {}}, "documents"),
        ({"documents": []}, "documents"),
        ({"documents": ["a"] * 2049}, "documents"),
        ({"documents": ["a", 1]}, "documents[1]"),
        ({"documents": ["a", {}]}, "documents[1].text"),
        ({"documents": [{"text": 1}]}, "documents[0].text"),
        ({"documents": None, "texts": [1]}, "texts[0]"),
        ({"top_n": 0}, "top_n"),
        ({"top_n": "1"}, "top_n"),
        ({"return_documents": "yes"}, "return_documents"),
    ],
)
def test_a_wrong_value_is_told_with_its_field(more: dict[str, Any], path: str) -> None:
    with pytest.raises(ApiError) as caught:
        api.read(Fields({**BODY, **more}), ScriptedService())
    assert (caught.value.status, caught.value.param) == (400, path)
    assert path in caught.value.message


def test_a_relevance_that_is_not_finite_is_an_error() -> None:
    call = api.read(Fields(BODY), ScriptedService())
    with pytest.raises(ApiError, match=r"documents\[1\]"):
        api.answer([(0.5, 1), (float("nan"), 1), (1.0, 1)], call, "tiny")


# A converted checkpoint


@pytest.fixture(scope="module", params=["tied", "untied"])
def ranker(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server of a Qwen3-Reranker with random weights, whose output matrix is its table or not."""
    folder = tmp_path_factory.mktemp("reranker")
    reranker(folder / "checkpoint", tied=request.param == "tied")
    path = to_gguf(folder / "checkpoint", folder / "x.gguf", reranker=True)
    with running(path=path, n_ctx=1024, n_seq=2) as found:
        yield found


def test_a_converted_reranker_ranks(ranker: RunningServer) -> None:
    """More documents than are ranked between two steps of the engine."""
    documents = [f"{text} {i}" for i, text in enumerate(DOCUMENTS * 4)]
    body = ranker.post("/v1/rerank", query="red cat", documents=documents).json()
    service = ranker.process.server.service
    assert service is not None
    model = service.model
    wanted = relevance(model.engine, model.tokenizer, model.metadata, "red cat", documents)
    got = {result["index"]: result["relevance_score"] for result in body["results"]}
    assert [got[i] for i in range(len(documents))] == pytest.approx(wanted, rel=1e-5)
    assert list(got.values()) == sorted(got.values(), reverse=True)
    assert max(wanted) > min(wanted) * 1.01
    prompts = document_prompts(model.engine, model.tokenizer, model.metadata, "red cat", documents)
    assert body["usage"]["prompt_tokens"] == sum(map(len, prompts))
    assert eventually(lambda: idle(ranker))


def test_a_document_that_is_too_long_is_named(ranker: RunningServer) -> None:
    documents = ["a"] * 9 + ["cat " * 2000]
    answer = ranker.post("/v1/rerank", query="cat", documents=documents)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "documents")
    assert (error["code"], error["n_ctx"]) == ("context_length_exceeded", 1024)
    assert error["message"].startswith("document 9 of the list: context is 1024 tokens")


def test_a_client_that_leaves_ends_the_ranking(
    ranker: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = calls_apart(ranker, monkeypatch)
    body = {"query": "cat", "documents": ["a red cat " * 20] * 400}
    ranker.leave("/v1/rerank", body, lambda: len(calls) > 0)
    assert settled(lambda: len(calls)) < 400


def test_a_model_that_is_no_reranker_says_so(server: RunningServer) -> None:
    answer = server.post("/v1/rerank", query="cat", documents=["a"])
    assert answer.status_code == 400
    assert "cannot rank documents" in answer.json()["error"]["message"]
