"""What is taken of the events of an answer, and when."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ggpy.bench.serving.http1 import ResponseReader
from ggpy.bench.serving.record import OK, StreamRecord, answer_of
from ggpy.bench.serving.requests import LoadRequest


def ok_response(status: int = 200, **headers: str) -> ResponseReader:
    response = ResponseReader()
    response.status, response.headers = status, headers
    return response


def answer(*parts: bytes, cut_at: int | None = None, status: int = 200) -> StreamRecord:
    """A record of parts that come at 11, 12, ... of a request that was sent at 10."""
    record = StreamRecord(LoadRequest(b"", 1, 9, cut_at), 10.0, is_kept=True)
    response = ok_response(status)
    for i, part in enumerate(parts):
        if not record.receive(response, part, 11.0 + i):
            return record
    record.close(response, 99.0)
    return record


def delta(**fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": None}], "usage": None}


STOP = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}


def test_text_is_stamped_and_all_else_is_not(fake: Any) -> None:
    event = fake.event
    record = answer(
        event(delta(role="assistant", content="")),
        event(delta(content="a")),
        b": ping\n\n",
        event(delta(content="b")) + event(delta(content="c")),
        event(delta(content="")),
        event({**delta(content="d"), "usage": {"prompt_tokens": 1, "completion_tokens": 4}}),
        event(STOP),
        event(
            {
                "choices": [],
                "usage": {
                    "prompt_tokens": 7,
                    "completion_tokens": 5,
                    "prompt_tokens_details": {"cached_tokens": 2},
                },
            }
        ),
        event("[DONE]"),
    )
    assert record.outcome == OK and record.finish == "stop"
    assert list(record.arrivals) == [12.0, 14.0, 16.0] and list(record.counts) == [1, 2, 1]
    assert (record.n_prompt, record.n_output, record.n_cached) == (7, 5, 2)
    assert (record.n_events, record.n_tokens, record.end) == (4, 5, 19.0)
    assert answer_of(record) == "abcd"


def test_an_event_may_be_cut_within_a_character(fake: Any) -> None:
    data = fake.event(delta(content="é🎉")) + fake.event(STOP)
    for cut in range(1, len(data)):
        record = answer(data[:cut], data[cut:])
        assert record.outcome == OK and answer_of(record) == "é🎉" and record.n_events == 1


@pytest.mark.parametrize(
    "found",
    [
        delta(reasoning_content="hm"),
        delta(reasoning_content="hm", content=""),
        delta(tool_calls=[{"index": 0, "function": {"name": "f", "arguments": ""}}]),
        {"choices": [{"text": "x", "index": 0, "finish_reason": None}]},
        {"choices": [{"text": "x", "index": 0, "finish_reason": "stop"}]},
        delta(content='"usage": {"error": "finish_reason"'),
    ],
)
def test_what_counts_as_text(fake: Any, found: dict[str, Any]) -> None:
    record = answer(fake.event(found), fake.event(found), fake.event("[DONE]"))
    assert record.outcome == OK and list(record.arrivals) == [11.0, 12.0]


def test_json_of_text_is_not_decoded_after_the_first(
    fake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded = []
    loads = json.loads
    monkeypatch.setattr(json, "loads", lambda data: decoded.append(data) or loads(data))
    events = [fake.event(delta(content="x"))] * 50
    record = answer(*events, fake.event(STOP))
    assert record.n_events == 50 and len(decoded) == 2


@pytest.mark.parametrize(
    ("parts", "kind", "detail"),
    [
        ([{"error": {"message": "no page left", "code": 500}}], "error in stream", "no page left"),
        ([delta(content="a"), {"error": "gone"}, "[DONE]"], "error in stream", "gone"),
        (["{", "[DONE]"], "malformed event", "{"),
        (["[1]", "[DONE]"], "malformed event", "[1]"),
        ([delta(content="a")], "no end of stream", "1 events"),
        ([], "no end of stream", "no type"),
    ],
)
def test_failures(fake: Any, parts: list[Any], kind: str, detail: str) -> None:
    record = answer(*map(fake.event, parts))
    assert record.is_failed and record.outcome == kind and detail in record.detail


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"error": {"message": "slow down"}}', "slow down"),
        (b'{"detail": 1}', "{'detail': 1}"),
        (b"<h1>", "<h1>"),
        (b"", ""),
    ],
)
def test_refusals(body: bytes, said: str) -> None:
    record = answer(body[:5], body[5:], status=429)
    assert (record.outcome, record.detail) == ("HTTP 429", said) and not record.has_retry_after
    record = StreamRecord(LoadRequest(b"", 1, 9), 10.0)
    record.close(ok_response(503, **{"retry-after": "1"}), 12.0)
    assert record.has_retry_after and record.end == 12.0


def test_a_request_is_cut_off_after_its_events(fake: Any) -> None:
    event = fake.event(delta(content="x"))
    assert answer(*[event] * 9, cut_at=3).n_events == 3
    assert answer(event, event, fake.event("[DONE]"), cut_at=3).outcome == OK
