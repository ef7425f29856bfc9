"""LangChain, instructor, `llm` and LiteLLM against a server of a tiny model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest
from clients_of_servers import HELLO, TOOLS, Clock, Weather, check
from running_server import RunningServer

pytestmark = pytest.mark.filterwarnings("ignore")  # of the frameworks about themselves
OPTIONS: dict[str, Any] = {"temperature": 0, "max_tokens": 200}
SHORT = {**OPTIONS, "max_tokens": 8}


def plain_text(server: RunningServer) -> str:
    """The answer to HELLO in eight tokens."""
    answer = server.post("/v1/chat/completions", messages=HELLO, **SHORT)
    return str(answer.json()["choices"][0]["message"]["content"])


# LangChain


def chat_model(server: RunningServer, **options: Any) -> Any:
    found = pytest.importorskip("langchain_openai")
    return found.ChatOpenAI(
        model="tiny", base_url=f"{server.url}/v1", api_key="sesame", max_retries=0, **options
    )


def test_langchain_invokes_and_streams(roomy: RunningServer) -> None:
    model = chat_model(roomy, **SHORT)
    message = model.invoke("hello")
    assert message.content == plain_text(roomy)
    assert message.usage_metadata["output_tokens"] == 8
    assert "".join(chunk.content for chunk in model.stream("hello")) == message.content
    assert [m.content for m in model.batch(["hello"] * 3)] == [message.content] * 3


def test_langchain_binds_tools(roomy: RunningServer) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage

    model = chat_model(roomy, **OPTIONS)
    asking = model.bind_tools(
        [Weather, Clock], tool_choice="any", strict=True, parallel_tool_calls=False
    )
    question = HumanMessage("hello")
    message = asking.invoke([question])
    (call,) = message.tool_calls
    check(call["name"], call["args"])
    result = ToolMessage("sunny", tool_call_id=call["id"])
    assert chat_model(roomy, **SHORT).invoke([question, message, result]).content


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_reads_structured_output(roomy: RunningServer, method: str) -> None:
    model = chat_model(roomy, **OPTIONS)
    found = model.with_structured_output(Weather, method=method).invoke("hello")
    assert isinstance(found, Weather)


def test_langchain_embeds(roomy: RunningServer) -> None:
    found = pytest.importorskip("langchain_openai")
    model = found.OpenAIEmbeddings(
        model="tiny",
        base_url=f"{roomy.url}/v1",
        api_key="sesame",
        check_embedding_ctx_length=False,
    )
    one, two = model.embed_documents(["hello", "world"])
    assert one == pytest.approx(model.embed_query("hello"), abs=1e-6)
    assert one != pytest.approx(two, abs=1e-3)


# instructor


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA"])
def test_instructor_reads_a_model(roomy: RunningServer, mode: str) -> None:
    instructor = pytest.importorskip("instructor")
    plain = openai.OpenAI(base_url=f"{roomy.url}/v1", api_key="sesame", max_retries=0)
    client = instructor.from_openai(plain, mode=instructor.Mode[mode])
    found, answer = client.chat.completions.create_with_completion(
        model="tiny", messages=HELLO, response_model=Weather, max_retries=0, **OPTIONS
    )
    assert isinstance(found, Weather)
    assert answer.usage.completion_tokens < 200


# llm


def test_llm_asks_a_model_of_its_configuration(
    roomy: RunningServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = pytest.importorskip("llm")
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    (tmp_path / "extra-openai-models.yaml").write_text(
        f"- model_id: mine\n  model_name: tiny\n  api_base: {roomy.url}/v1\n"
        "  supports_schema: true\n  api_key_name: mine\n"
    )
    (tmp_path / "keys.json").write_text('{"mine": "sesame"}')
    model = llm.get_model("mine")
    expected = plain_text(roomy)
    assert model.prompt("hello", stream=False, **SHORT).text() == expected
    assert "".join(model.prompt("hello", stream=True, **SHORT)) == expected
    told = model.prompt("hello", schema=Weather, stream=False, **OPTIONS)
    assert Weather.model_validate_json(told.text())


# LiteLLM


@pytest.fixture
def litellm(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it asks the internet
    found = pytest.importorskip("litellm")
    found.telemetry = False
    return found


def test_litellm(roomy: RunningServer, litellm: Any) -> None:
    where: dict[str, Any] = {"api_base": f"{roomy.url}/v1", "api_key": "sesame"}
    told: dict[str, Any] = {"model": "openai/tiny", "messages": HELLO, **where}
    expected = plain_text(roomy)
    assert litellm.completion(**told, **SHORT).choices[0].message.content == expected
    chunks = litellm.completion(**told, **SHORT, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected
    asked = litellm.completion(
        **told, **OPTIONS, tools=TOOLS, tool_choice="required", parallel_tool_calls=False
    )
    (call,) = asked.choices[0].message.tool_calls
    check(call.function.name, call.function.arguments)
    embedded = litellm.embedding(
        model="openai/tiny", input=["hello", "world"], encoding_format="float", **where
    )
    assert len(embedded.data) == 2
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(**told, top_p=2)


def test_litellm_speaks_anthropic_s_api(roomy: RunningServer, litellm: Any) -> None:
    answer = litellm.completion(
        model="anthropic/tiny", messages=HELLO, api_base=roomy.url, api_key="sesame", **SHORT
    )
    assert answer.choices[0].message.content == plain_text(roomy)
