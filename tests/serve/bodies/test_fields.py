"""Fields of a body: types, ranges, and errors that name the field."""

from __future__ import annotations

from typing import Any

import pytest

from ggpy.serve.errors import ApiError, anthropic_error, openai_error
from ggpy.serve.fields import Fields


def error_of(call: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        call()
    return caught.value


def test_values_of_the_right_type_are_read() -> None:
    body = Fields({"a": "x", "n": 3.0, "t": 0.5, "f": True, "s": ["x", "y"], "o": {"k": 1}})
    assert body.text("a") == "x"
    assert body.integer("n", None) == 3
    assert body.number("t", None, 0, 1) == 0.5
    assert body.flag("f", False)
    assert body.texts("s") == ("x", "y")
    assert body.texts("a") == ("x",)
    assert body.object("o").raw("k") == 1


def test_values_are_told_as_json_has_them() -> None:
    told = {True: "true", False: "false", 5: "5"}
    for value, text in told.items():
        error = error_of(lambda value=value: Fields({"x": value}).text("x"))
        assert str(error) == f"x is {text}: it must be a string"


def test_null_counts_as_missing() -> None:
    body = Fields(dict.fromkeys(("a", "n", "f", "s", "o")))
    assert body.text("a", "d") == "d"
    assert body.integer("n", 7) == 7
    assert body.flag("f", True)
    assert body.texts("s") == ()
    assert body.object("o") is None
    assert "a" not in body


@pytest.mark.parametrize(
    "read",
    [
        lambda b: b.text("x"),
        lambda b: b.needed_text("x"),
        lambda b: b.flag("x", True),
        lambda b: b.texts("x"),
        lambda b: b.integer("x", None, 0, 5),
        lambda b: b.number("x", None, 0, 1),
        lambda b: b.object("x"),
        lambda b: list(b.items("x")),
        lambda b: b.one_of("x", ("a", "b"), "a"),
    ],
)
@pytest.mark.parametrize("value", [-1, 1e300, float("nan"), [1], [[]], True, {"k": 1}, "zzz"])
def test_a_wrong_value_is_named_or_read(read: Any, value: Any) -> None:
    body = Fields({"x": value}, "messages[3]")
    try:
        found = read(body)
    except ApiError as error:
        assert error.status == 400
        assert error.param is not None
        assert error.param.startswith("messages[3].x")
        assert "messages[3].x" in error.message
    else:
        assert found is not None


def test_true_is_no_number() -> None:
    assert error_of(lambda: Fields({"n": True}).integer("n", None)).param == "n"
    assert error_of(lambda: Fields({"n": True}).number("n", None, 0, 1)).param == "n"


def test_long_values_are_cut_in_messages() -> None:
    error = error_of(lambda: Fields({"n": "x" * 10_000}).integer("n", None))
    assert len(error.message) < 200


def test_errors_have_the_form_of_each_api() -> None:
    error = ApiError(400, "n is 0: it must be 1", param="n")
    assert openai_error(error)["error"] == {
        "message": "n is 0: it must be 1",
        "type": "invalid_request_error",
        "param": "n",
        "code": 400,
    }
    told = anthropic_error(ApiError(503, "wait", param="model"))
    assert told == {
        "type": "error",
        "error": {"type": "overloaded_error", "message": "model: wait"},
    }
