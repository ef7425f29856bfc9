"""The interactive chat: through a pipe, and on a pseudo-terminal."""

from __future__ import annotations

import asyncio
import gc
import io
import json
import logging
import os
import re
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from ggpy.cli import run
from ggpy.cli.line_editor import Editor, Lines
from ggpy.util import paths
from ggpy.util.outcome import Stopped

ROOT = paths.data_dir("tools").parent
MODEL = (str(ROOT / "models" / "tiny" / "llama.gguf"), "--device", "cpu")
GREEDY = ("--temp", "0", "--ignore-eos")
PROMPTED = b"\x1b[?2004h"  # what the editor begins with: the terminal is to mark pasted text
posix = pytest.mark.skipif(os.name != "posix", reason="pseudo-terminals and signals")


class Result(NamedTuple):
    status: int
    out: str
    err: str


Talk = Callable[..., Result]


@pytest.fixture
def talk(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Talk:
    """Runs a chat in this process, in which `said` comes through a pipe; 6 tokens an answer."""

    def call(said: bytes, *options: str) -> Result:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(said), encoding="utf-8"))
        status = run.main([*MODEL, *GREEDY, "-cnv", "-n", "6", *options])
        return Result(status, *capsys.readouterr())

    return call


def errors(result: Result) -> list[str]:
    prefix = "ggpy run: error: "
    lines = result.err.splitlines()
    return [line.removeprefix(prefix) for line in lines if line.startswith(prefix)]


# Questions


def test_each_line_is_answered(talk: Talk) -> None:
    result = talk(b"hello\n\nworld\n/exit\nnever\n")
    assert result.status == 0
    assert len(re.findall(r"\n", result.out)) >= 2
    assert "answer: 12 tokens" in result.err
    assert re.search(r"prompt: \d+ tokens \(\d+ more reused\)", result.err)


def test_the_first_answer_is_that_of_a_single_prompt(
    talk: Talk, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.main([*MODEL, *GREEDY, "-p", "hello", "-n", "6"]) == 0
    alone = capsys.readouterr().out
    assert talk(b"hello\n").out == alone
    assert talk(b"", "-p", "hello").out == alone


def test_a_chat_ends_where_nothing_can_be_read(talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the terminal is gone: it would be so again and again."""

    def read(lines: Lines) -> str:
        raise EOFError("Input/output error")

    monkeypatch.setattr(Lines, "read", read)
    assert errors(talk(b"hello\n")) == ["Input/output error"]


@posix
def test_a_chat_ends_where_nobody_reads_the_answers() -> None:
    """However many questions come."""
    reading, writing = os.pipe()
    os.close(reading)
    process = subprocess.Popen(
        [sys.executable, "-m", "ggpy.run", *MODEL, *GREEDY, "-cnv", "-n", "2"],
        cwd=ROOT, stdin=subprocess.PIPE, stdout=writing, stderr=subprocess.PIPE,
    )  # fmt: skip
    os.close(writing)
    try:
        assert process.stdin and process.stderr
        process.stdin.write(b"hello\n")  # and more may come: it is open
        process.stdin.flush()
        assert process.wait(timeout=60) == 0
        assert b"Broken pipe" not in process.stderr.read()
    finally:
        process.kill()
        process.communicate()


def test_a_backslash_goes_on_in_the_next_line(talk: Talk) -> None:
    several = talk(b"hello\\\nworld\n")
    assert several.out == talk(b"", "-p", r"hello\nworld").out


def test_reusing_pages_does_not_change_a_chat(talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    from ggpy.runtime.scheduler import Scheduler

    said = b"hello\nthe world\none two three\n"
    reused = talk(said).out
    monkeypatch.setattr(Scheduler, "_take_over", lambda *_: None)
    monkeypatch.setattr(Scheduler, "_share", lambda *_: None)
    assert talk(said).out == reused


def test_what_cannot_be_asked_is_taken_back(talk: Talk) -> None:
    once = talk(b"hello\n").out
    result = talk(b"hello " * 300 + b"\nhello\n")
    [error] = errors(result)
    assert error.startswith("the question has 311 tokens, the context 256: ask a shorter one, or")
    assert result.out == once
    broken = talk(b"\xff\nhello\n")
    assert "is not UTF-8" in errors(broken)[0] and broken.out == once


def test_a_full_conversation_says_what_helps(talk: Talk) -> None:
    said = b"hello " * 40 + b"\n"
    stuck = talk(said * 8)
    assert len(errors(stuck)) == 4
    for words in ("the conversation has 303 tokens, the context 256", "/clear", "--context-shift"):
        assert words in errors(stuck)[0]
    cleared = talk(said * 5 + b"/clear\n" + said)
    assert len(errors(cleared)) == 1 and "answer: 30 tokens" in cleared.err
    shifting = talk(said * 8, "--context-shift")
    assert not errors(shifting) and "answer: 48 tokens" in shifting.err


def test_an_answer_that_fills_the_context_says_what_helps(talk: Talk) -> None:
    result = talk(b"hello\n", "-n", "-1", "-c", "48")
    [line] = [line for line in result.err.splitlines() if line.startswith("(")]
    for words in ("the context of 48 tokens is full", "/clear", "-c", "--context-shift"):
        assert words in line


# Commands


def test_commands(talk: Talk) -> None:
    once = talk(b"hello\n").out
    for word in ("/regen", "/regenerate"):
        assert talk(f"hello\n{word}\n".encode()).out == once * 2
    assert talk(b"hello\n/clear\nhello\n").out == once * 2
    assert talk(b"hello\nhello\n").out != once * 2
    assert talk(b"hello\n/quit\nhello\n").out == once


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("/foo bar", "unknown command /foo; /help lists the commands"),
        ("/foo", "unknown command /foo; /help lists the commands"),
        ("/", "unknown command /; /help lists the commands"),
        ("/clear now", "nothing may follow /clear; /help lists the commands"),
        ("/save", "/save needs a FILE; /help lists the commands"),
        ("/load nowhere.json", "nowhere.json: No such file or directory"),
        ("/load .", ". is not a conversation that /save wrote"),
        ("/regenerate", "there is no question yet"),
    ],
)
def test_a_command_that_cannot_be_obeyed_is_no_question(talk: Talk, line: str, error: str) -> None:
    result = talk(line.encode() + b"\n")
    assert (errors(result), result.out, result.status) == ([error], "", 0)


@pytest.mark.parametrize("line", ["/etc/passwd is what", " /foo bar", "a /foo"])
def test_what_is_no_command_is_a_question(talk: Talk, line: str) -> None:
    result = talk(line.encode() + b"\n")
    assert not errors(result) and "answer: 6 tokens" in result.err


def test_help(talk: Talk) -> None:
    page = talk(b"/help\n").err
    for words in ("/system [TEXT]", "/save FILE", "/load FILE", "/regenerate", "/clear", "/exit"):
        assert re.search(f"^{re.escape(words)} +[a-z]", page, re.M)
    assert "Alt-Enter" in page and max(map(len, page.splitlines())) < 80
    assert "/clear  " in talk(b"/help me\n").err
    about = talk(b"/help save\n").err
    assert "/save FILE" in about and "/clear  " not in about


def test_the_system_message(talk: Talk) -> None:
    given = talk(b"hello\n", "-sys", "the model").out
    assert given != talk(b"hello\n").out
    assert talk(b"/system the model\nhello\n").out == given
    shown = talk(b"/system\n/system none\n/system\n", "-sys", "the model").err
    assert re.findall(r"^system message: (.*)$", shown, re.M) == ["the model", "none"]
    assert talk(b"/system none\nhello\n", "-sys", "the model").out == talk(b"hello\n").out
    later = talk(b"hello\n/system the model\n/regen\n")
    assert later.out == talk(b"hello\n").out + given


def test_a_system_message_that_the_template_refuses(talk: Talk) -> None:
    template = (
        "{% for m in messages %}{% if m['content'] == 'x' %}{{ raise_exception('no x here') }}"
        "{% endif %}{{ m['content'] }}{% endfor %}"
    )
    result = talk(b"/system x\nhello\n", "--chat-template", template)
    assert len(errors(result)) == 1 and "no x here" in errors(result)[0]
    assert result.out == talk(b"hello\n", "--chat-template", template).out


def test_the_first_question_has_the_words_of_a_system_that_the_template_does_not_know(
    talk: Talk,
) -> None:
    refuses = "{% if m['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    template = "{% for m in messages %}" + refuses + "{{ m['content'] }}{% endfor %}"
    given = talk(b"/system the model\nhello\n", "--chat-template", template)
    assert errors(given) == [] and given.out != talk(b"hello\n", "--chat-template", template).out
    whole = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    joined = "{% if messages[0].role == 'system' %}{{ messages[0].content }}\n\n{% endif %}"
    rest = "{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}"
    assert given.out != talk(b"/system the model\nhello\n", "--chat-template", whole).out
    assert given.out == talk(b"/system the model\nhello\n", "--chat-template", joined + rest).out


def test_a_conversation_is_saved_and_loaded(talk: Talk, tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    whole = talk(b"hello\nworld\n", "-sys", "the model").out
    first = talk(f"hello\n/save {path}\n/save {path}\n".encode(), "-sys", "the model")
    assert first.err.count(f"(3 messages saved in {path})") == 2
    saved = json.loads(path.read_text())["messages"]
    assert [m["role"] for m in saved] == ["system", "user", "assistant"]
    assert saved[1] == {"role": "user", "content": "hello"}
    second = talk(f'x\n/load "{path}"\nworld\n'.encode())  # quotes as in a shell
    assert "(3 messages loaded; " in second.err
    assert second.out.endswith(whole.removeprefix(first.out))


@pytest.mark.parametrize(
    "content",
    [
        b"GGUF\x03\x00",
        b"[1, 2]",
        b'{"messages": 5}',
        b'{"messages": [{"role": "user"}]}',
        b'{"messages": [{"role": "wizard", "content": "x"}]}',
        b'{"messages": [{"role": "user", "content": 5}]}',
        b"[" * 100_000,
    ],
)
def test_another_file_is_neither_loaded_nor_overwritten(
    talk: Talk, tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / "precious"
    path.write_bytes(content)
    result = talk(f"/load {path}\n/save {path}\n".encode())
    assert errors(result) == [f"{path} is not a conversation that /save wrote"] * 2
    assert path.read_bytes() == content


def test_a_failed_regeneration_leaves_the_conversation(talk: Talk, tmp_path: Path) -> None:
    """The question fitted once, and does not any more under a longer system message."""
    path = tmp_path / "talk.json"
    long = b"/system " + b"hello " * 300
    result = talk(b"hello\n" + long + f"\n/regenerate\n/save {path}\n".encode())
    assert len(errors(result)) == 1
    saved = json.loads(path.read_text())["messages"]
    assert [m["role"] for m in saved] == ["system", "user", "assistant"]


# A terminal


class Screen:
    """What a program shows on a pseudo-terminal, and its keyboard."""

    def __init__(self, terminal: int):
        self.terminal = terminal
        self.shown = b""

    def wait_for(self, text: bytes) -> bytes:
        """Read on until the text comes, and forget it and what is before; what was before."""
        while text not in self.shown:
            self.shown += os.read(self.terminal, 1000)
        before, _, self.shown = self.shown.partition(text)
        return before

    def wait_for_more(self, n: int) -> None:
        """Read on until there are n more bytes."""
        while len(self.shown) < n:
            self.shown += os.read(self.terminal, 1000)

    def type(self, keys: bytes) -> None:
        os.write(self.terminal, keys)


@contextmanager
def on_terminal(
    tmp_path: Path, *options: str, **environment: str
) -> Iterator[tuple[subprocess.Popen[bytes], Screen]]:
    """A chat on a pseudo-terminal, but for stderr; it has to end by itself."""
    import pty

    terminal, end = pty.openpty()
    settings = {"XDG_CACHE_HOME": str(tmp_path), "PROMPT_TOOLKIT_NO_CPR": "1", "TERM": "xterm"}
    inherited = {k: v for k, v in os.environ.items() if k != "NO_COLOR"}
    process = subprocess.Popen(
        [sys.executable, "-m", "ggpy.run", *MODEL, *GREEDY, *options],
        cwd=ROOT,
        env={**inherited, **settings, **environment},
        stdin=end,
        stdout=end,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    os.close(end)
    try:
        screen = Screen(terminal)
        screen.wait_for(PROMPTED)
        yield process, screen
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        process.communicate()
        os.close(terminal)


def said_on_stderr(process: subprocess.Popen[bytes]) -> str:
    assert process.stderr
    return process.stderr.read().decode()


@posix
def test_ctrl_c_stops_the_answer_and_not_the_program(tmp_path: Path) -> None:
    with on_terminal(tmp_path, "--context-shift") as (process, screen):
        screen.type(b"hello\r")
        screen.wait_for(b"hello")
        screen.wait_for_more(200)  # an answer is coming, and would never end
        process.send_signal(signal.SIGINT)
        screen.wait_for(PROMPTED)
        screen.type(b"\x04")
        assert "answer: " in said_on_stderr(process)


@posix
def test_a_pasted_text_is_one_question(tmp_path: Path, talk: Talk) -> None:
    with on_terminal(tmp_path, "-n", "6") as (process, screen):
        screen.type(b"\x1b[200~hello\rworld\x1b[201~\r")
        screen.wait_for(PROMPTED)
        screen.type(b"/exit\r")
        told = said_on_stderr(process)
    expected = talk(b"", "-p", r"hello\nworld").err
    assert "answer: 6 tokens" in told
    n_prompt = r"^prompt: (\d+) tokens"
    assert re.findall(n_prompt, told, re.M) == re.findall(n_prompt, expected, re.M)


@posix
@pytest.mark.parametrize(("no_color", "green"), [("", True), ("1", False)])
def test_questions_are_marked_unless_colours_are_unwanted(
    tmp_path: Path, no_color: str, green: bool
) -> None:
    with on_terminal(tmp_path, "-n", "2", NO_COLOR=no_color) as (_, screen):
        screen.type(b"hello\r")
        question = screen.wait_for(b"\r\n\r\n")  # an empty line ends the answer
        screen.wait_for(PROMPTED)
        screen.type(b"\x04")
    assert b"> " in question
    assert bool(re.search(rb"\x1b\[[\d;]*\b32[;m]", question)) is green


def test_a_signal_before_the_editor_awaits_a_coroutine_leaves_no_warning() -> None:
    async def key() -> None: ...

    class Session:
        def prompt(self) -> str:
            self.waiting = key()
            raise Stopped(signal.SIGTERM)

    editor = Editor.__new__(Editor)
    editor.session = Session()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with pytest.raises(Stopped):
            editor.read()
        del editor.session  # and with it the coroutine
    assert not warned


def test_a_signal_while_a_task_of_the_editor_waits_leaves_no_message(monkeypatch, caplog) -> None:
    monkeypatch.setattr(logging.getLogger("asyncio"), "disabled", False)

    class Session:
        def prompt(self) -> str:
            self.loop = asyncio.new_event_loop()
            self.task = self.loop.create_task(asyncio.sleep(9))
            raise Stopped(signal.SIGTERM)

    editor = Editor.__new__(Editor)
    editor.session = session = Session()
    with pytest.raises(Stopped), warnings.catch_warnings():
        editor.read()
    session.loop.close()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        del editor.session, session
        gc.collect()
    assert not caplog.records


@posix
def test_a_program_that_is_ended_leaves_the_terminal_as_it_was(tmp_path: Path) -> None:
    import pty
    import termios

    terminal, end = pty.openpty()
    before = termios.tcgetattr(end)
    process = subprocess.Popen(
        [sys.executable, "-m", "ggpy.run", *MODEL],
        cwd=ROOT,
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path), "PROMPT_TOOLKIT_NO_CPR": "1"},
        stdin=end,
        stdout=end,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    Screen(terminal).wait_for(PROMPTED)
    assert termios.tcgetattr(end) != before
    process.terminate()
    _, told = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert told.decode().splitlines()[-1] == "ggpy run: ended by SIGTERM"
    assert termios.tcgetattr(end) == before
    os.close(terminal)
    os.close(end)
