"""Processes that stay to render templates: reused, apart from each other, gone when they must."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ggpy.tokenizer import renderer
from ggpy.tokenizer.chat import ChatTemplateError, render
from ggpy.tokenizer.renderer import Renderer

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs a system that forks")
SECONDS, MEMORY = 1.0, 256 << 20


def request(word: str) -> bytes:
    return json.dumps({"max_chars": 99, "variables": {"word": word}}).encode()


def answer(text: str) -> str:
    return json.dumps({"text": text})


@pytest.fixture
def pool() -> Iterator[Renderer]:
    made = Renderer()
    yield made
    made.close()


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """The processes that are started."""
    processes: list[subprocess.Popen[bytes]] = []
    real = renderer._started

    def start() -> subprocess.Popen[bytes]:
        processes.append(real())
        return processes[-1]

    monkeypatch.setattr(renderer, "_started", start)
    return processes


def asked(pool: Renderer, template: str, word: str = "x", seconds: float = SECONDS) -> str:
    status, body = pool.ask(template, request(word), seconds, MEMORY)
    assert status == 0
    return body.decode()


def test_a_process_is_started_once_for_a_template(
    pool: Renderer, started: list[subprocess.Popen[bytes]]
) -> None:
    for word in "abc":
        assert asked(pool, "{{ word }}", word) == answer(word)
    assert len(started) == 1
    assert asked(pool, "{{ word }}!") == '{"text": "x!"}'
    assert len(started) == 2 and all(process.poll() is None for process in started)
    pool.close()
    assert all(process.poll() is not None for process in started)
    assert asked(pool, "{{ word }}") == '{"text": "x"}'


def test_few_processes_wait(pool: Renderer, started: list[subprocess.Popen[bytes]]) -> None:
    for number in range(renderer.MOST_IDLE + 2):
        asked(pool, f"{number}")
    assert [process.poll() is None for process in started] == [False] * 2 + [True] * 4


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads times of Linux's /proc")
def test_each_request_has_a_process_of_its_own(
    pool: Renderer, started: list[subprocess.Popen[bytes]]
) -> None:
    """So that nothing of one is left for the next: the work is that of processes that ended."""
    loops = "{% for i in range(1000) %}{% for j in range(1000) %}{% endfor %}{% endfor %}"
    asked(pool, loops, seconds=10.0)
    fields = Path(f"/proc/{started[0].pid}/stat").read_text().rpartition(")")[2].split()
    before = int(fields[11]), int(fields[13])  # ticks of it, of processes that it waited for
    for _ in range(3):
        asked(pool, loops, seconds=10.0)
    fields = Path(f"/proc/{started[0].pid}/stat").read_text().rpartition(")")[2].split()
    own, others = int(fields[11]) - before[0], int(fields[13]) - before[1]
    assert others > 3 * own + 1


def test_a_template_that_uses_too_much_ends_and_the_next_request_is_answered(
    pool: Renderer, started: list[subprocess.Popen[bytes]]
) -> None:
    loops = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    template = "{% if word == 'slow' %}" + loops + "{% endif %}{{ word }}"
    assert asked(pool, template, "a") == '{"text": "a"}'
    status, _ = pool.ask(template, request("slow"), 0.1, MEMORY)
    assert status != 0 and started[0].poll() is not None
    assert asked(pool, template, "b") == '{"text": "b"}'
    assert len(started) == 2


def test_a_process_that_was_killed_is_replaced(
    pool: Renderer, started: list[subprocess.Popen[bytes]]
) -> None:
    asked(pool, "{{ word }}")
    started[0].kill()
    started[0].wait()
    assert asked(pool, "{{ word }}") == '{"text": "x"}'


def test_threads_may_ask_at_once(pool: Renderer, started: list[subprocess.Popen[bytes]]) -> None:
    answers: dict[str, str] = {}

    def ask(number: int) -> None:
        for turn in range(4):
            word = f"{number}.{turn}"
            answers[word] = asked(pool, "{{ word }}", word)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {w: answer(w) for w in answers} and len(answers) == 32
    assert len(started) <= renderer.MOST_BUSY


def test_it_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    """Even with one that is killed, so that nothing of it can tidy up."""
    code = (
        "import os, signal\n"
        "from ggpy.tokenizer import renderer\n"
        "pool = renderer.Renderer()\n"
        "pool.ask('x', b'{\"max_chars\": 9, \"variables\": {}}', 1.0, 1 << 28)\n"
        "print(pool._idle[0]._process.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    root = Path(__file__).parents[2]
    result = subprocess.run([sys.executable, "-c", code], cwd=root, stdout=subprocess.PIPE)
    pid = int(result.stdout)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and alive(pid):
        time.sleep(0.02)
    assert not alive(pid)


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and that nobody waited for does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/stat")
    return not (status.exists() and status.read_text().rpartition(")")[2].split()[0] == "Z")


def test_limits_hold_for_every_request_of_a_process() -> None:
    hungry = "{{ 'a' * 10**messages[0].n }}"
    assert render(hungry, [{"n": 2}]) == "a" * 100
    with pytest.raises(ChatTemplateError, match="needs more than 256 MiB of memory"):
        render(hungry, [{"n": 9}])
    assert render(hungry, [{"n": 2}]) == "a" * 100
