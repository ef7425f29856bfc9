"""The page in a browser, as a user meets it, against a server whose answers are known."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from support.serve.browser import CTRL, DONE, SHIFT, Browser, Tab, executable, send
from support.serve.page_server import PageServer

pytestmark = pytest.mark.skipif(executable() is None, reason="no Chromium on this machine")

CODE = "Here:\n\n```python\nx = 1\n```\n\nand $a^2$ <b>\n"
LONG = [f"word{i} " for i in range(3000)]
SCRIPT: dict[str, list[Any]] = {
    "code": [*(CODE[i : i + 5] for i in range(0, len(CODE), 5)), "<wait>", "The end."],
    "long": LONG,
    "lines": [f"line {i}\n\n" for i in range(150)],
    "think": [{"reasoning_content": "Let me "}, {"reasoning_content": "see."}, "Yes."],
    "tool": [
        {
            "tool_calls": [
                {"index": 0, "id": "c1", "type": "function", "function": {"name": "weather"}}
            ]
        },
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"city":'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": ' "Oslo"}'}}]},
    ],
    "break": ["some ", "text", "<wait>", "<break>"],
    "error": ["begun ", "<error>"],
    "nothing": [],
    "fence": ["Look:\n\n```", "<wait>", "python\nx = 1\n", "```\n\nbehind"],
    "arabic": ["- \u0645\u0631\u062d\u0628\u0627\n\n```\ncode\n```\n"],
}


@pytest.fixture(scope="module")
def running() -> Iterator[PageServer]:
    made = PageServer(SCRIPT)
    yield made
    made.close()


@pytest.fixture
def server(running: PageServer) -> PageServer:
    running.key, running.seconds, running.render_fails, running.renderings = "", 0.01, False, 0
    running.bodies.clear()
    running.left.clear()
    running.go.set()
    return running


@pytest.fixture
def context(browser: Browser) -> str:
    return browser.context()


@pytest.fixture
def tab(browser: Browser, server: PageServer, context: str) -> Iterator[Tab]:
    made = browser.open(server.url, context)
    ready(made)
    yield made
    made.close()


def ready(tab: Tab) -> None:
    tab.wait("document.querySelector('#about').textContent.includes('ready')")
    tab.wait("!document.querySelector('#welcome').hidden || document.querySelector('.message')")


def ask(tab: Tab, text: str) -> str:
    """Asks, and returns the visible text of the complete answer."""
    send(tab, text)
    tab.wait(DONE)
    ended = ":scope > .prose > *, .call, .notice:not([hidden])"
    tab.wait(f"{DONE}.querySelector('{ended}')")
    return tab.text(".message:last-child")


def texts(tab: Tab) -> list[str]:
    """The questions and answers that are shown, without what stands around them."""
    code = "[...document.querySelectorAll('.message')].map((m) => "
    return list(tab.evaluate(code + "m.querySelector('.text, :scope > .prose').innerText.trim())"))


def test_an_answer_streams_and_is_rendered(tab: Tab, server: PageServer) -> None:
    server.go.clear()
    send(tab, "code")
    tab.wait("document.querySelector('.reply[aria-busy=true] .prose math')")
    assert "The end." not in tab.text(".reply .prose")
    assert tab.text(".stats"), "the speed is known while the answer grows"
    server.go.set()
    tab.wait(f"{DONE} && document.querySelector('.reply .prose').innerText.includes('The end.')")
    assert tab.text(".code code") == "x = 1"
    assert tab.count(".code .mi") == 1, "highlighted"
    assert "<b>" in tab.text(".reply .prose")
    assert "80.0 tokens/s" in tab.text(".stats") and "first after" in tab.text(".stats")
    assert tab.text("#context-text").endswith(" / 8,192")
    assert tab.text("#conversations .name") == "code"
    body = server.bodies[0]
    assert body["stream"] is True and body["stream_options"] == {"include_usage": True}
    assert body["messages"] == [{"role": "user", "content": "code"}]
    assert not {"temperature", "top_k", "seed", "max_tokens"} & body.keys()


def test_a_question_may_come_before_the_page_is_ready(tab: Tab, server: PageServer) -> None:
    """The key is pressed in the very task that begins to open the storage."""
    code = """document.addEventListener("DOMContentLoaded", () => {
        const area = document.querySelector("#question");
        area.value = "early";
        area.dispatchEvent(new Event("input"));
        document.querySelector("#composer").requestSubmit();
    });"""
    tab.call("Page.addScriptToEvaluateOnNewDocument", source=code)
    tab.reload()
    tab.wait(DONE)
    assert "You said: early" in tab.text(".message:last-child")
    assert tab.text("#conversations .name") == "early" and not tab.complaints


def test_a_conversation_is_sent_whole(tab: Tab, server: PageServer) -> None:
    ask(tab, "one")
    assert "You said: two" in ask(tab, "two")
    sent = [(m["role"], m["content"]) for m in server.bodies[1]["messages"]]
    assert sent == [("user", "one"), ("assistant", "You said: one"), ("user", "two")]


def test_nothing_foreign_is_asked_for_and_no_policy_is_broken(tab: Tab, server: PageServer) -> None:
    ask(tab, "code")
    ask(tab, "think")
    ask(tab, "tool")
    tab.click("#open-settings")
    assert len(tab.requests) > 15
    foreign = [url for url in tab.requests if not url.startswith((server.url, "blob:"))]
    assert not foreign and not tab.complaints
    tab.evaluate("document.body.insertAdjacentHTML('beforeend', '<p style=\"color:red\">x</p>')")
    tab.evaluate("fetch('http://127.0.0.2:1/').catch(() => 0)")
    assert len(tab.complaints) >= 2, "the policy is in force, and this test sees it"


def test_the_renderer_is_asked_at_most_five_times_a_second(tab: Tab, server: PageServer) -> None:
    send(tab, "long")
    tab.wait("document.querySelector('.reply .prose').innerText.includes('word20')")
    before = server.renderings
    tab.evaluate("new Promise((resolve) => setTimeout(resolve, 1000))")
    assert 1 <= server.renderings - before <= 6
    tab.press("Escape")
    tab.wait(DONE)


def test_without_a_renderer_the_text_is_plain(tab: Tab, server: PageServer) -> None:
    server.render_fails = True
    send(tab, "code")
    tab.wait(f"{DONE} && document.querySelector('.prose.plain')")
    assert tab.text(".reply .prose").startswith("Here:\n\n```python\nx = 1")
    server.render_fails = False
    tab.complaints.clear()
    tab.reload()
    tab.wait("document.querySelector('.code')")


def test_code_that_is_not_rendered_yet_is_code_alone(tab: Tab, server: PageServer) -> None:
    server.go.clear()
    send(tab, "fence")
    tab.wait("document.querySelector('.code')")
    tab.evaluate(
        "void (fetch = new Proxy(fetch, { apply: (f, self, [path, ...more]) => "
        "path === 'render' ? new Promise(() => 0) : f(path, ...more) }))"
    )
    server.go.set()
    tab.wait(DONE)
    assert tab.text(".code code").strip() == "x = 1"


def test_escape_stops_and_keeps_the_text(tab: Tab, server: PageServer) -> None:
    send(tab, "long")
    tab.wait("document.querySelector('.reply .prose').innerText.includes('word20')")
    assert not tab.evaluate("document.querySelector('#stop').hidden")
    tab.press("Escape")
    tab.wait(DONE)
    assert server.left.wait(5), "the server sees that the client left"
    assert "Stopped." in tab.text(".notice") and "word20" in tab.text(".reply .prose")
    assert tab.evaluate("document.querySelector('#stop').hidden")
    shown = texts(tab)
    tab.reload()
    tab.wait("document.querySelector('.reply .prose p')")
    assert [text.split() for text in texts(tab)] == [text.split() for text in shown]


def test_regenerate_makes_a_second_version(tab: Tab, server: PageServer) -> None:
    ask(tab, "one")
    tab.click(".reply [aria-label=Regenerate]")
    tab.wait(f"document.querySelector('.reply .siblings') && {DONE}")
    tab.wait("document.querySelector('.reply .siblings').innerText.includes('2/2')")
    assert [len(body["messages"]) for body in server.bodies] == [1, 1]
    tab.click(".reply [aria-label='Previous version']")
    tab.wait("document.querySelector('.reply .siblings').innerText.includes('1/2')")
    assert tab.evaluate("document.querySelector('[aria-label=\"Previous version\"]').disabled")


def test_an_edited_question_is_a_branch(tab: Tab, server: PageServer) -> None:
    ask(tab, "one")
    ask(tab, "two")
    tab.press("ArrowUp")
    tab.wait("document.querySelector('.edit textarea') === document.activeElement")
    tab.evaluate("document.activeElement.select()")
    tab.type("three")
    tab.press("Enter")
    tab.wait(f"{DONE} && document.querySelectorAll('.message')[3]?.innerText.includes('three')")
    assert [m["content"] for m in server.bodies[2]["messages"]] == ["one", "You said: one", "three"]
    tab.wait("document.querySelectorAll('.message')[2].innerText.includes('2/2')")
    tab.click(".question [aria-label='Previous version']")
    tab.wait("document.querySelectorAll('.message')[3].innerText.includes('You said: two')")
    tab.reload()
    tab.wait("document.querySelectorAll('.message')[3]?.innerText.includes('You said: two')")


def test_a_reload_keeps_what_had_arrived(tab: Tab, server: PageServer) -> None:
    send(tab, "long")
    tab.wait("document.querySelector('.reply .prose').innerText.includes('word40')")
    tab.evaluate("document.querySelector('#question').focus()")
    tab.type("half a question")
    tab.reload()
    tab.wait("document.querySelector('#question').value === 'half a question'")
    tab.wait(f"{DONE} && document.querySelector('.notice').innerText.includes('closed before')")
    tab.wait("document.querySelector('.reply .prose p')")
    assert "word40" in tab.text(".reply .prose")
    assert server.left.wait(5)
    tab.click(".notice .link")
    tab.wait("document.querySelector('.reply .siblings').innerText.includes('2/2')")
    tab.press("Escape")
    tab.wait(DONE)


def test_two_tabs_are_in_step_and_lose_nothing(
    browser: Browser, server: PageServer, context: str, tab: Tab
) -> None:
    ask(tab, "one")
    other = browser.open(tab.evaluate("location.href"), context)
    other.wait("document.querySelectorAll('.message').length === 2")
    other.wait("document.querySelector('#conversations a')?.innerText.includes('one')")
    other.evaluate("void (globalThis.link = document.querySelector('#conversations a'))")
    send(tab, "long")
    other.wait("document.querySelectorAll('.message').length === 4")
    other.wait("document.querySelector('.message:last-child').innerText.includes('word30')")
    assert other.evaluate("link.isConnected"), "the list stays as long as nothing in it changes"
    assert other.count(".message[aria-busy=true]") == 1, "it is not taken for an orphan"
    tab.evaluate("document.querySelector('#stop').click()")
    other.wait(DONE)
    # Both ask at the same place at the same time: two branches.
    for page in (tab, other):
        page.evaluate("document.querySelector('#question').value = 'both'")
        page.evaluate("document.querySelector('#question').dispatchEvent(new Event('input'))")
    for page in (tab, other):
        page.evaluate("document.querySelector('#send').click()")
    for page in (tab, other):
        page.wait(f"{DONE} && document.querySelectorAll('.message').length === 6")
        page.wait("document.querySelectorAll('.message')[4].innerText.includes('/2')")
    other.evaluate("document.querySelector('#conversations li .icon').click()")
    other.wait("document.activeElement.matches('#conversations input')")
    other.evaluate("document.activeElement.select()")
    other.type("Renamed")
    other.press("Enter")
    tab.wait("document.querySelector('#conversations .name').innerText === 'Renamed'")
    other.close()


def test_a_tab_that_is_gone_leaves_an_interrupted_answer(
    browser: Browser, server: PageServer, context: str, tab: Tab
) -> None:
    other = browser.open(server.url, context)
    ready(other)
    send(other, "long")
    other.wait("document.querySelector('.reply .prose').innerText.includes('word30')")
    tab.click("#conversations a")
    tab.wait("document.querySelector('.reply[aria-busy=true]')")
    other.close()
    tab.wait(f"{DONE} && document.querySelector('.notice').innerText.includes('closed before')")


def test_deleting_stops_the_answer(
    browser: Browser, server: PageServer, context: str, tab: Tab
) -> None:
    send(tab, "long")
    other = browser.open(server.url, context)
    other.wait("document.querySelector('#conversations a')")
    other.click("#conversations [aria-label^=Delete]")
    tab.wait("!document.querySelector('#welcome').hidden && !location.hash")
    assert server.left.wait(5)
    other.close()


def test_delete_can_be_undone(tab: Tab) -> None:
    ask(tab, "one")
    tab.click("#conversations [aria-label^=Delete]")
    tab.wait("document.querySelector('#conversations .none')")
    tab.wait("!document.querySelector('#welcome').hidden")
    tab.click(".toast .link")
    tab.click("#conversations a")
    tab.wait("document.querySelectorAll('.message').length === 2")


def test_search_finds_words_of_answers(tab: Tab) -> None:
    ask(tab, "code")
    tab.press("k", CTRL)
    tab.wait("!document.querySelector('#welcome').hidden")
    ask(tab, "something else")
    tab.evaluate("document.querySelector('#search').focus()")
    tab.type("PYTHON")
    tab.wait("document.querySelectorAll('#conversations li').length === 1")
    assert "x = 1" in tab.text("#conversations small")
    tab.press("Escape")
    tab.wait("document.querySelectorAll('#conversations li').length === 2")


CAUGHT = """
    globalThis.saved = [];
    URL.createObjectURL = (blob) => (blob.text().then((text) => saved.push(text)), "blob:x");
    HTMLAnchorElement.prototype.click = () => {};
"""
OTHER = {
    "format": "ggpy-conversations",
    "version": 1,
    "conversations": [
        {
            "id": "other",
            "messages": [
                {"role": "user", "content": "a", "id": "a"},
                {"role": "assistant", "content": "**b**", "id": "b", "parent": "a"},
            ],
        }
    ],
}
IMPORT = """
    (() => {
        const files = new DataTransfer();
        files.items.add(new File([%s], "x.json"));
        const input = document.querySelector("#import-file");
        input.files = files.files;
        input.dispatchEvent(new Event("change"));
    })()
"""


def test_what_is_exported_can_be_imported(browser: Browser, server: PageServer, tab: Tab) -> None:
    ask(tab, "think")
    tab.click(".reply [aria-label=Regenerate]")
    tab.wait(f"document.querySelector('.reply .siblings').innerText.includes('2/2') && {DONE}")
    tab.evaluate(CAUGHT)
    tab.click("#export")
    tab.wait("saved.length")
    text = tab.evaluate("saved[0]")
    data = json.loads(text)
    assert [len(c["messages"]) for c in data["conversations"]] == [3]
    assert "<b>" not in text
    fresh = browser.open(server.url, browser.context())
    ready(fresh)
    for _ in range(2):  # again: nothing doubles
        fresh.evaluate(IMPORT % json.dumps(text))
        fresh.wait("document.querySelectorAll('#conversations li').length === 1")
    fresh.click("#conversations a")
    fresh.wait("document.querySelector('.reply .prose p')")
    assert texts(fresh) == texts(tab)
    assert "2/2" in fresh.text(".reply .siblings")
    fresh.evaluate(IMPORT % json.dumps('{"format": "other"}'))
    fresh.wait("document.querySelector('#toasts').innerText.includes('no conversations')")
    fresh.close()


def test_settings_are_sent_and_kept(tab: Tab, server: PageServer) -> None:
    tab.click("#open-settings")
    given = {"system": "Be brief.", "temperature": "0.3", "top_k": "7", "seed": "5"}
    wrong = {"top_p": "9", "max_tokens": "2.5"}
    for name, value in {**given, **wrong}.items():
        tab.evaluate(f"document.querySelector('#set-{name}').focus()")
        tab.type(value)
    tab.press("Escape")
    tab.reload()
    ready(tab)
    ask(tab, "one")
    body = server.bodies[0]
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert (body["temperature"], body["top_k"], body["seed"]) == (0.3, 7, 5)
    assert not {*wrong, "min_p", "repeat_penalty"} & body.keys()


def test_reasoning_is_folded_and_tool_calls_are_shown(tab: Tab) -> None:
    ask(tab, "think")
    assert not tab.evaluate("document.querySelector('.thought').open")
    assert tab.text(".thought summary").startswith("Thought for ")
    tab.click(".thought summary")
    tab.wait("document.querySelector('.thought .prose').innerText.includes('Let me see.')")
    assert texts(tab)[-1] == "Yes."
    ask(tab, "tool")
    assert tab.text(".call summary") == "Calls weather"
    assert json.loads(tab.text(".call pre")) == {"city": "Oslo"}


def test_errors_are_shown_in_place_with_a_second_try(tab: Tab, server: PageServer) -> None:
    send(tab, "too long")
    tab.wait("document.querySelector('.notice.error')")
    assert "the prompt has 9000 tokens, the context 8192" in tab.text(".notice.error")
    assert "New chat" in tab.text(".notice.error")
    tab.press("k", CTRL)
    tab.wait("!document.querySelector('#welcome').hidden")
    ask(tab, "error")
    assert "the GPU failed" in tab.text(".notice.error") and "begun" in tab.text(".reply .prose")
    server.script["error"] = ["all well"]
    tab.click(".notice .link")
    tab.wait(f"{DONE} && document.querySelector('.reply .prose').innerText.includes('all well')")
    server.script["error"] = SCRIPT["error"]
    assert "1024 requests wait (try again in 5 s)" in ask(tab, "busy")


def test_another_model_is_seen(tab: Tab, server: PageServer) -> None:
    name, server.model = server.model, "another"
    ask(tab, "one")
    tab.wait("document.querySelector('#model').innerText === 'another'")
    server.model = name


def test_a_lost_connection_is_told(tab: Tab, server: PageServer) -> None:
    server.go.clear()
    send(tab, "break")
    tab.wait("document.querySelector('.reply .prose')?.innerText.includes('some text')")
    server.go.set()  # what the page has not read is lost with the connection
    tab.wait(f"{DONE}?.querySelector('.error')")
    assert "connection was lost" in tab.text(".notice.error")
    assert "some text" in tab.text(".reply .prose")
    assert tab.text(".notice .link") == "Try again"


@pytest.mark.parametrize("keep", [True, False])
def test_a_key_is_asked_for_and_kept_as_chosen(
    browser: Browser, server: PageServer, context: str, keep: bool
) -> None:
    server.key = "secret \u043a\u043b\u044e\u0447"
    tab = browser.open(server.url, context)
    tab.wait("document.querySelector('#key').open")
    tab.type("wrong \u043a\u043b\u044e\u0447")
    tab.press("Enter")
    tab.wait(
        "document.querySelector('#key').open && "
        "document.querySelector('#key-note').innerText.includes('does not know')"
    )
    tab.type(server.key)
    if keep:
        tab.click("#key-keep")
    tab.click("#key .primary")
    ready(tab)
    assert "You said: one" in ask(tab, "one")
    stored = tab.evaluate("[localStorage['ggpy.key'] ?? null, sessionStorage['ggpy.key'] ?? null]")
    assert stored == ([server.key, None] if keep else [None, server.key])
    tab.close()


def test_who_gives_no_key_is_not_asked_for_each_answer(tab: Tab, server: PageServer) -> None:
    opened = "document.querySelector('#key').open"
    for text in ("one", "two", "three", "four"):
        ask(tab, text)
    server.key = "secret"
    tab.reload()
    tab.wait(opened)
    tab.press("Escape")
    tab.wait("document.querySelectorAll('.prose.plain').length === 4")
    tab.evaluate("new Promise((resolve) => setTimeout(resolve, 200))")
    assert not tab.evaluate(opened) and "Invalid API key" in tab.text("#banner")
    send(tab, "five")
    tab.wait(opened)
    tab.type("secret")
    tab.press("Enter")
    tab.wait("document.querySelector('#banner').hidden")
    tab.wait("!document.querySelector('.prose.plain')")


def test_the_page_follows_only_a_reader_at_its_end(tab: Tab) -> None:
    send(tab, "lines")
    end = (
        "((s) => s.scrollHeight - s.scrollTop - s.clientHeight)(document.querySelector('#scroll'))"
    )
    tab.wait("document.querySelector('.reply .prose').innerText.includes('line 60')")
    tab.wait(f"{end} < 48")
    tab.evaluate("document.querySelector('#scroll').scrollTop = 0")
    tab.wait("!document.querySelector('#to-end').hidden")
    tab.wait(f"{DONE} && document.querySelector('.reply .prose').innerText.includes('line 149')")
    assert tab.evaluate("document.querySelector('#scroll').scrollTop") == 0
    tab.click("#to-end")
    tab.wait(f"{end} < 48 && document.querySelector('#to-end').hidden")


def test_a_narrow_window_has_a_drawer_and_no_sideways_scroll(tab: Tab, server: PageServer) -> None:
    formula = "$" + "+".join("abcdefghij" * 4) + "$"
    code, table = "```\n" + "y" * 300 + "\n```", "|a|b|\n|-|-|\n|" + "z" * 200
    parts = ["x" * 300, code, formula, f"- {formula}", f"# {formula}", table]
    server.script["wide"] = ["\n\n".join(parts)]
    tab.resize(360, 640)
    ask(tab, "wide")
    wide = "[document.documentElement, document.querySelector('#scroll')]"
    wide += ".some((x) => x.scrollWidth > x.clientWidth)"
    assert not tab.evaluate(wide)
    assert tab.evaluate("document.querySelector('#sidebar').inert")
    tab.click("#open-sidebar")
    tab.wait("document.body.classList.contains('drawer')")
    assert not tab.evaluate(f"document.querySelector('#sidebar').inert || {wide}")
    assert tab.evaluate("document.querySelector('main').inert"), "the keyboard stays in the list"
    tab.press("Escape")
    tab.wait("document.activeElement.id === 'open-sidebar'")
    tab.click("#open-settings")
    assert not tab.evaluate(
        "((d) => d.scrollWidth > d.clientWidth)(document.querySelector('#settings'))"
    )


def test_keys_and_roles(tab: Tab) -> None:
    tab.type("a")
    tab.press("Enter", SHIFT)
    tab.call("Input.insertText", text="b")
    tab.call("Input.imeSetComposition", text="\u306b", selectionStart=1, selectionEnd=1)
    tab.press("Enter")
    after = "new KeyboardEvent('keydown', {key: 'Enter', keyCode: 229, bubbles: true})"
    tab.evaluate(f"document.activeElement.dispatchEvent({after})")  # Safari's, after the last one
    assert tab.count(".message") == 0
    unnamed = """[...document.querySelectorAll('button, input, textarea')].filter((x) =>
        !(x.ariaLabel || x.labels?.length || x.textContent.trim() || x.hidden)).length"""
    assert tab.evaluate(unnamed) == 0
    log = "document.querySelector('#thread')"
    assert tab.evaluate(f"[{log}.role, {log}.ariaLive]") == ["log", "off"]
    tab.evaluate("document.activeElement.select()")
    ask(tab, "one")
    assert tab.evaluate(f"{log}.ariaLive") == "polite"
    tab.reload()
    tab.wait(DONE)
    assert tab.evaluate(f"{log}.ariaLive") == "off", "what was said long ago is not told again"


def test_the_focus_stays_where_the_keyboard_works(tab: Tab) -> None:
    def press(selector: str) -> None:
        tab.evaluate(f"document.querySelector({json.dumps(selector)}).focus()")
        tab.press("Enter")

    focus = "document.activeElement"
    ask(tab, "one")
    press(".reply [aria-label=Regenerate]")
    tab.wait(f"document.querySelector('.reply .siblings').innerText.includes('2/2') && {DONE}")
    assert tab.evaluate(f"{focus}.id") == "question"
    press(".reply [aria-label='Previous version']")
    tab.wait(f"{focus}.ariaLabel === 'Next version'")
    tab.press("k", CTRL)
    tab.wait("!document.querySelector('#welcome').hidden")
    ask(tab, "two")
    tab.evaluate("document.querySelectorAll('#conversations a')[1].focus()")
    tab.press("Tab")
    tab.press("Enter")
    tab.wait(f"{focus}.matches('#conversations input')")
    tab.type("first")
    tab.press("Enter")
    tab.wait(f"{focus}.matches('#conversations a') && {focus}.innerText === 'first'")
    for key in ("Tab", "Tab", "Enter"):
        tab.press(key)
    tab.wait(f"{focus}.matches('#conversations a') && {focus}.innerText === 'two'")


def test_copying_tells_how_it_went(tab: Tab) -> None:
    ask(tab, "code")
    tab.wait("document.querySelector('.reply math')")
    tab.evaluate(
        "void (navigator.clipboard.writeText = async (text) => (globalThis.copied = text))"
    )
    for _ in range(2):
        tab.click(".copy-code")
        tab.wait("document.querySelector('.copy-code').innerText === 'Copied'")
    assert tab.evaluate("copied") == "x = 1"
    tab.evaluate("new Promise((resolve) => setTimeout(resolve, 1600))")
    assert tab.text(".copy-code") == "Copy"
    refuse = "async () => { throw new DOMException('forbidden'); }"
    tab.evaluate(f"void (navigator.clipboard.writeText = {refuse})")
    tab.click(".copy-code")
    tab.wait("document.querySelector('#toasts').innerText.includes('Not copied: forbidden')")
    assert not tab.complaints


def test_an_empty_answer_is_told_and_roles_alternate(tab: Tab, server: PageServer) -> None:
    title = "a" * 59 + "\U0001f600"
    assert "empty" in ask(tab, "nothing")
    ask(tab, "and?")
    assert server.bodies[-1]["messages"] == [{"role": "user", "content": "nothing\n\nand?"}]
    tab.press("k", CTRL)
    tab.wait("!document.querySelector('#welcome').hidden")
    ask(tab, title + "b")
    assert tab.text("#conversations .name") == title, "no half of a character"


def test_arabic_begins_at_the_right_and_code_at_the_left(tab: Tab) -> None:
    ask(tab, "arabic")
    tab.wait("document.querySelector('.reply pre')")
    directions = "['.reply ul', '.reply pre', '.question .text'].map((name) => "
    directions += "getComputedStyle(document.querySelector(name)).direction)"
    assert tab.evaluate(directions) == ["rtl", "ltr", "ltr"]


BLOCKED = """
    for (const name of ["localStorage", "sessionStorage", "indexedDB"])
        Object.defineProperty(window, name, { get() { throw new DOMException("blocked"); } });
"""
FULL = "IDBObjectStore.prototype.put = () => { throw new DOMException('full'); };"


@pytest.mark.parametrize(("storage", "told"), [(BLOCKED, "blocked"), (FULL, "Not stored: full")])
def test_a_browser_that_stores_nothing_shows_answers(tab: Tab, storage: str, told: str) -> None:
    ask(tab, "old")
    tab.call("Page.addScriptToEvaluateOnNewDocument", source=storage)
    tab.reload()
    ready(tab)
    assert "You said: one" in ask(tab, "one")
    assert "You said: two" in ask(tab, "two")
    assert tab.text("#toasts").count(told) == 1
    if storage == BLOCKED:  # then memory has it
        assert tab.text("#conversations .name") == "one"
        tab.click("#theme")
        tab.wait("document.querySelector('#theme').ariaLabel === 'Theme: light'")
    else:
        assert texts(tab)[:2] == ["old", "You said: old"]
        tab.click("#conversations [aria-label^=Delete]")
        tab.wait("document.querySelector('#conversations .none')")
    assert not tab.complaints


def test_what_could_not_be_rendered_is_when_the_server_is_back(tab: Tab) -> None:
    ask(tab, "code")
    rates = {"latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
    tab.call("Network.emulateNetworkConditions", offline=True, **rates)
    tab.press("k", CTRL)
    tab.wait("!document.querySelector('#welcome').hidden")
    tab.evaluate(IMPORT % json.dumps(json.dumps(OTHER)))
    tab.wait("document.querySelectorAll('#conversations li').length === 2")
    tab.click("#conversations a[href='#c=other']")
    tab.wait("document.querySelector('#banner').innerText.includes('does not answer')")
    tab.wait("document.querySelector('.reply .prose')?.innerText === '**b**'")
    tab.call("Network.emulateNetworkConditions", offline=False, **rates)
    tab.wait("document.querySelector('.reply strong') && document.querySelector('#banner').hidden")


def test_the_theme_is_chosen_and_kept(tab: Tab) -> None:
    back = "getComputedStyle(document.body).backgroundColor"
    tab.prefer("light")
    light = tab.evaluate(back)
    tab.prefer("dark")
    dark = tab.evaluate(back)
    assert light != dark
    tab.click("#theme")
    assert tab.evaluate(back) == light
    tab.reload()
    assert tab.evaluate(back) == light
    tab.click("#theme")
    assert tab.evaluate(back) == dark
    assert tab.evaluate("document.querySelector('#theme').ariaLabel") == "Theme: dark"
