"""Chat templates: what they are given, how their mistakes are told, and that hostile ones stop."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ggpy.tokenizer import chat, renderer
from ggpy.tokenizer.chat import MAX_TEMPLATE, ChatTemplateError, render

HI = [{"role": "user", "content": "hi"}]
TALK = [
    {"role": "system", "content": "Be brief."},
    *HI,
    {"role": "assistant", "content": "hello"},
    {"role": "user", "content": "bye"},
]
CHATML = """{{ bos_token }}{% for message in messages %}
    {%- if loop.first and message.role != 'system' %}
        {{- '<|im_start|>system\\nBe kind.<|im_end|>\\n' }}
    {%- endif %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""


@pytest.fixture
def cold() -> Iterator[None]:
    """No process waits with a template, before and after."""
    chat._RENDERER.close()
    yield
    chat._RENDERER.close()


def test_a_conversation_is_rendered() -> None:
    assert render(CHATML, HI, bos="<s>") == (
        "<s><|im_start|>system\nBe kind.<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert render(CHATML, TALK, add_generation_prompt=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>assistant\nhello<|im_end|>\n<|im_start|>user\nbye<|im_end|>\n"
    )


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ bos_token ~ eos_token }}", "<s></s>"),
        ("{{ tools is none }}", "True"),
        ("{% for m in messages %}\n  {% if true %}\nx\n  {% endif %}\n{% endfor %}", "x\n"),
        ("{% for i in range(9) %}{% if i > 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "012"),
        ("{{ {'b': '<\u00e9>', 'a': 1}|tojson }}", '{"b": "<\u00e9>", "a": 1}'),
        ("{{ [1]|tojson(indent=2) }}", "[\n  1\n]"),
        ("{{ [{'a': 1}]|map(attribute='a')|tojson }}", "[1]"),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}!", "hi!"),
        ("{{ messages[0].content|trim|upper }} {{ 'a b'.split()[1] }}", "HI b"),
        ("{{ strftime_now('%Y') | int > 2000 }}", "True"),
        ("{{ missing is defined }}{{ missing }}", "False"),
    ],
)
def test_what_templates_may_expect(template: str, expected: str) -> None:
    assert render(template, HI, bos="<s>", eos="</s>") == expected


def test_tools_and_odd_text_arrive_unharmed() -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    assert render("{{ tools[0].function.name }}", HI, tools=tools) == "f"
    text = "\u00e9\u4f60\U0001f600\0\n\t\"'{{ 1 }}"
    assert render("{{ messages[0].content }}", [{"role": "user", "content": text}]) == text


@pytest.mark.parametrize(
    ("template", "message", "line"),
    [
        ("\n\n{{ raise_exception('no system role') }}", "no system role", 3),
        ("a\n{{ missing.field }}", "'missing' is undefined", 2),
        ("a\n\n{% if %}", "Expected an expression", 3),
        ("{{ 1|nope }}", "No filter named 'nope'", 1),
        ("\n{{ 1 + 'a' }}", "TypeError: unsupported operand", 2),
        ("\n{{ ''.__class__.__mro__ }}", "unsafe", 2),
        ("{% macro m() %}\n{{ [].append.__self__.x }}{% endmacro %}{{ m() }}", "unsafe", 2),
        ("{% include '/etc/passwd' %}", "no loader", 1),
        ("{% macro m() %}{{ m() }}{% endmacro %}\n{{ m() }}", "calls itself too deeply", 1),
    ],
)
def test_mistakes_are_told_with_their_line(template: str, message: str, line: int) -> None:
    with pytest.raises(ChatTemplateError, match=message) as caught:
        render(template, HI)
    assert caught.value.line == line
    assert str(caught.value).startswith(f"chat template, line {line}: ")
    assert "\n" not in str(caught.value)


def test_lists_may_grow_for_one_request() -> None:
    """Templates that are written for llama.cpp queue the ids of calls so."""
    queue = "{% set q = namespace(ids=[]) %}{% set _ = q.ids.append(1) %}{{ q.ids.pop(0) }}"
    for _ in range(2):
        assert render(queue + "{% set _ = messages.append(2) %}{{ messages|length }}", HI) == "12"


HUNGRY = {  # for memory: refused at once, whatever the time limit
    "string product": "{{ 'a' * 10**9 }}",
    "product of a variable": "{{ messages[0].content * 10**9 }}",
    "centred": "{{ 'a'|center(10**9) }}",
    "printf width": "{{ '%1000000000d' % 1 }}",
    "printf filter": "{{ '%1000000000d'|format(1) }}",
    "format width": "{{ '{:>1000000000}'.format(1) }}",
    "zfill": "{{ 'a'.zfill(10**10) }}",
    "batch": "{{ range(99999)|batch(10**9, 'x')|list }}",
    "join": "{{ range(99999)|join('x' * 99999) }}",
    "indent": "{{ ('x\\n' * 10**5)|indent(10**9) }}",
    "replace": "{{ ('a' * 10**6)|replace('a', 'b' * 10**6) }}",
    "list growth": (  # 3 * 8 ** 9 bytes are refused: what is before takes no time
        "{% set ns = namespace(l=[1, 2, 3]) %}"
        "{% for i in range(99) %}{% set ns.l = ns.l * 8 %}{% endfor %}"
    ),
    "string growth": (
        "{% set ns = namespace(s='aaa') %}"
        "{% for i in range(99) %}{% set ns.s = ns.s * 8 %}{% endfor %}"
    ),
}
SLOW = {  # these run until they are stopped
    "nested loops": (
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    ),
    "lorem ipsum": "{{ lipsum(n=10**7) }}",
    "sorting": "{% for i in range(99999) %}{{ range(99999)|sort|length }}{% endfor %}",
    "powers": "{{ (7 ** (10**7)) % 10 }}{{ (9 ** (10**7)) % 10 }}{{ (11 ** (10**8)) % 10 }}",
    "deep json": "{{ ([['a' * 1000] * 1000] * 1000)|tojson(indent=1000) }}",
    "slices": "{{ range(99999)|slice(10**9)|list }}",
}
HUGE = {
    "range": ("{% for i in range(10**9) %}x{% endfor %}", "Range too big"),
    "output": ("{% for i in range(99999) %}{{ 'a' * 9999 }}{% endfor %}", "more than 8000000 char"),
    "nesting": ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "calls itself too deeply"),
    "blocks": ("{% if 1 %}" * 3000 + "{% endif %}" * 3000, "calls itself too deeply"),
    "itself": ("x" * (MAX_TEMPLATE + 1), "has 1000001 characters, the limit is 1000000"),
}


def processor_seconds() -> float:
    """Processor time of the processes that have ended."""
    resource = pytest.importorskip("resource", reason="this system does not limit processes")
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux enforces the limit on memory")
@pytest.mark.parametrize("case", HUNGRY)
def test_memory_is_limited(case: str) -> None:
    before = processor_seconds()
    with pytest.raises(ChatTemplateError, match="needs more than 256 MiB of memory"):
        render(HUNGRY[case], HI)
    assert processor_seconds() - before < 2


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux enforces the limit on memory")
def test_the_error_names_the_limit_for_long_messages() -> None:
    long = [{"role": "user", "content": "a" * (2 << 20)}]
    with pytest.raises(ChatTemplateError, match="needs more than 320 MiB of memory"):
        render("{{ 'a' * 10**9 }}", long)


@pytest.mark.parametrize("case", SLOW)
def test_time_is_limited(case: str) -> None:
    before = processor_seconds()
    with pytest.raises(ChatTemplateError, match=r"needs more than 0\.3 s of processor time"):
        render(SLOW[case], HI, timeout=0.3)
    assert processor_seconds() - before < 1


def test_a_second_is_the_limit_unless_told() -> None:
    before = processor_seconds()
    with pytest.raises(ChatTemplateError, match="needs more than 1 s of processor time"):
        render(SLOW["nested loops"], HI)
    assert processor_seconds() - before < 2


@pytest.mark.parametrize("case", HUGE)
def test_size_is_limited(case: str) -> None:
    template, message = HUGE[case]
    with pytest.raises(ChatTemplateError, match=message):
        render(template, HI)


def test_the_output_limit_is_the_callers() -> None:
    assert render("{{ 'a' * 10 }}", HI, max_chars=10) == "a" * 10
    with pytest.raises(ChatTemplateError, match="writes more than 9 characters"):
        render("{{ 'a' * 10 }}", HI, max_chars=9)


def test_long_conversations_have_room() -> None:
    text = "word " * 400_000
    assert render("{{ messages[0].content }}", [{"role": "user", "content": text}]) == text


def test_messages_that_are_no_data_are_refused() -> None:
    with pytest.raises(ChatTemplateError, match="cannot take these messages"):
        render("x", [{"role": "user", "content": object()}])


def test_the_clock_stops_what_uses_no_processor(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cold: None
) -> None:
    asleep = tmp_path / "asleep.py"
    asleep.write_text("import time\ntime.sleep(60)\n")
    monkeypatch.setattr("ggpy.tokenizer.renderer._CHILD", asleep)
    with pytest.raises(ChatTemplateError, match=r"was not done after 1\.\d* s"):
        render("x", HI, timeout=0.05)


def test_a_renderer_that_dies_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cold: None
) -> None:
    dying = tmp_path / "dying.py"
    dying.write_text("raise SystemExit(3)\n")
    monkeypatch.setattr("ggpy.tokenizer.renderer._CHILD", dying)
    with pytest.raises(ChatTemplateError, match="ended with status 3"):
        render("x", HI)


def test_a_template_finds_nothing_of_the_user_s_environment(
    monkeypatch: pytest.MonkeyPatch, cold: None
) -> None:
    """Not even one that leaves the sandbox: the process it runs in has none."""
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    environments = []
    real = subprocess.Popen

    def start(command: list[str], **options: Any) -> Any:
        environments.append(options["env"])
        code = "import os; print(sorted(os.environ))"
        seen = real([sys.executable, "-I", "-S", "-c", code], env=options["env"],
                    stdout=subprocess.PIPE, text=True)  # fmt: skip
        environments.append(seen.communicate()[0])
        return real(command, **options)

    monkeypatch.setattr(renderer.subprocess, "Popen", start)
    assert render("{{ 'a' }}", []) == "a"
    if os.name == "posix":
        assert environments[0] == {}
    assert "HF_TOKEN" not in environments[1]


@pytest.mark.parametrize(("version", "good"), [
    ("3.1.5", False), ("2.11.3", False), ("3.1", False), ("3.1.6", True), ("3.1.6.post1", True),
    ("3.2.0rc1", True), ("4.0", True), ("", True),
])  # fmt: skip
def test_a_sandbox_with_a_hole_is_not_used(
    version: str, good: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import jinja2

    from ggpy.tokenizer import chat_child

    monkeypatch.setattr(jinja2, "__version__", version)
    assert (chat_child.too_old() == "") == good


def test_an_old_jinja_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cold: None) -> None:
    (tmp_path / "jinja2").mkdir()
    (tmp_path / "jinja2" / "__init__.py").write_text("__version__ = '3.1.5'")
    folders = [str(tmp_path), *renderer._library_folders()]
    monkeypatch.setattr(renderer, "_library_folders", lambda: folders)
    with pytest.raises(ChatTemplateError, match=r"jinja2 3\.1\.5 has a hole in its sandbox"):
        render("a", [])


def test_the_requirements_have_no_known_holes() -> None:
    text = (Path(chat.__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    assert '"jinja2>=3.1.6"' in text and '"sentencepiece>=0.2.1"' in text
