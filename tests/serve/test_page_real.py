"""The page in a browser, against the real server with a tiny model."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator

import pytest
from running_server import TINY, RunningServer, running
from support.serve.browser import DONE, Browser, Tab, executable, send

from ggpy.sampling import SamplingParams
from ggpy.tokenizer import Tokenizer

pytestmark = pytest.mark.skipif(executable() is None, reason="no Chromium on this machine")

SETTINGS = {"temperature": 0, "max_tokens": 20}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    ends = Tokenizer.from_gguf(TINY / "llama.gguf").end_ids
    endless = SamplingParams(logit_bias=dict.fromkeys(ends, -math.inf))
    page = {"api_prefix": "/llm", "api_keys": ("secret",)}
    with running(n_ctx=1 << 15, n_seq=2, sampling=endless, **page) as found:
        yield found


@pytest.fixture
def tab(browser: Browser, server: RunningServer) -> Iterator[Tab]:
    made = browser.open(f"{server.url}/llm", browser.context())  # it leads to /llm/
    made.wait("document.querySelector('#key').open")
    made.type("secret")
    made.click("#key .primary")
    made.wait("document.querySelector('#about').textContent.includes('ready')")
    yield made
    made.close()


def choose(tab: Tab, **settings: float) -> None:
    """What a user sets in the dialog."""
    tab.click("#open-settings")
    for name, value in settings.items():
        tab.evaluate(f"document.querySelector('#set-{name}').select()")
        tab.type(str(value))
    tab.press("Escape")


def stored(tab: Tab) -> list[dict]:
    """The messages that the browser keeps."""
    code = """new Promise((resolve, reject) => {
        const opening = indexedDB.open("ggpy");
        opening.onerror = reject;
        opening.onsuccess = () => {
            const all = opening.result.transaction("messages").objectStore("messages").getAll();
            all.onsuccess = () => resolve(JSON.stringify(all.result));
        };
    })"""
    return json.loads(tab.evaluate(code))


def library_text(server: RunningServer, question: str) -> str:
    """What a program gets for the same question."""
    body = {"messages": [{"role": "user", "content": question}], **SETTINGS}
    answer = server.post("/llm/v1/chat/completions", **body)
    return answer.json()["choices"][0]["message"]["content"]


def test_an_answer_is_the_one_that_a_program_gets(tab: Tab, server: RunningServer) -> None:
    choose(tab, **SETTINGS)
    send(tab, "hello")
    tab.wait(DONE)
    tab.wait("document.querySelector('.stats').innerText.includes('20 tokens')")
    assert "tokens/s" in tab.text(".stats") and "first after" in tab.text(".stats")
    (answer,) = [m for m in stored(tab) if m["role"] == "assistant"]
    assert answer["content"] == library_text(server, "hello")
    assert answer["generated"] == 20 and answer["state"] == "done"
    tab.click(".reply [aria-label=Regenerate]")
    tab.wait("document.querySelector('.reply .siblings')?.innerText.includes('2/2')")
    tab.wait(DONE)
    first, second = [m["content"] for m in stored(tab) if m["role"] == "assistant"]
    assert first == second, "temperature 0"
    assert not [text for text in tab.complaints if "401" not in text]


def test_stop_frees_the_sequence_and_keeps_the_figures(tab: Tab, server: RunningServer) -> None:
    send(tab, "hello")
    tab.wait("document.querySelector('.stats')?.innerText.includes('tokens/s')")
    assert server.engine.busy
    tab.press("Escape")
    tab.wait(f"{DONE} && document.querySelector('.notice').innerText.includes('Stopped.')")
    tab.wait("!document.querySelector('#context').hidden")
    assert tab.text("#context-text").endswith(" / 32,768")
    deadline = "new Promise((resolve) => setTimeout(resolve, 20))"
    for _ in range(250):
        if not server.engine.busy:
            break
        tab.evaluate(deadline)
    assert not server.engine.busy
    tab.reload()
    tab.wait("document.querySelector('.stats')?.innerText.includes('tokens/s')")


def test_a_prompt_that_does_not_fit_is_told(tab: Tab) -> None:
    send(tab, "a b c d " * 9000)
    tab.wait("document.querySelector('.notice.error')")
    told = tab.text(".notice.error")
    assert "and the context 32768" in told and "New chat" in told
