"""The command line: what goes to stdout and stderr, exit statuses, bad input, and the chat."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from ggpy import __main__ as dispatcher
from ggpy.cli import options as command_line
from ggpy.cli import run
from ggpy.cli.answer import Figures, Thoughts
from ggpy.cli.options import unescape
from ggpy.cli.prompts import PromptError, decode
from ggpy.cli.sampling_options import SAMPLING, sampling
from ggpy.sampling import SamplingParams

ROOT = Path(__file__).resolve().parents[2]
LLAMA = str(ROOT / "models" / "tiny" / "llama.gguf")
MODEL = (LLAMA, "--device", "cpu")
RAW = (*MODEL, "--no-chat", "-s", "1", "--ignore-eos")
CHAT = (*MODEL, "-cnv", "-n", "6", "--temp", "0", "--ignore-eos")
FOREVER = (*RAW, "-p", "hello", "--context-shift")
posix = pytest.mark.skipif(os.name != "posix", reason="signals and pipes of POSIX")


class Result(NamedTuple):
    status: int
    out: str
    err: str


Cli = Callable[..., Result]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Runs `ggpy run` in this process; stdin is a pipe with `stdin` in it."""

    def call(*arguments: str, stdin: bytes = b"") -> Result:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
        try:
            status = run.main([*arguments])
        except SystemExit as end:
            status = int(end.code or 0)
        return Result(status, *capsys.readouterr())

    return call


def start(*arguments: str) -> subprocess.Popen[bytes]:
    """`ggpy run` in a process of its own."""
    command = [sys.executable, "-m", "ggpy.run", *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe)


# One answer


def test_stdout_has_the_text_and_stderr_the_rest(cli: Cli) -> None:
    import ggpy

    result = cli(*RAW, "-p", "hello world", "-n", "12")
    with ggpy.load(LLAMA, device="cpu") as model:
        ends = dict.fromkeys(model.tokenizer.end_ids, float("-inf"))
        pieces = model.generate("hello world", max_tokens=12, seed=1, logit_bias=ends)
        assert result.out == "".join(piece.text for piece in pieces) + "\n"
    assert result.status == 0
    for line in (r"device: cpu \(.+\)", r"model: llama\.gguf, ", r"prompt: 3 tokens, [\d.]+ tok/s"):
        assert re.search(f"^{line}", result.err, re.M)
    assert re.search(r"^answer: 12 tokens, [\d.]+ tok/s$", result.err, re.M)
    assert re.search(r"^memory: \d+ MB", result.err, re.M)
    assert re.search(r"^of it: file \d+ MB, KV cache \d+ MB, all else \d+ MB$", result.err, re.M)


def test_a_seed_repeats_the_text(cli: Cli) -> None:
    texts = [cli(*MODEL, "--no-chat", "-p", "hello", "-n", "12", "-s", s).out for s in "112"]
    assert texts[0] == texts[1] != texts[2]


def test_minus_n_0_evaluates_the_prompt_and_prints_nothing(cli: Cli) -> None:
    result = cli(*RAW, "-p", "hello world", "-n", "0")
    assert (result.status, result.out) == (0, "")
    assert "prompt: 3 tokens" in result.err and "answer:" not in result.err


def test_no_perf_leaves_the_figures_out(cli: Cli) -> None:
    assert "tok/s" not in cli(*RAW, "-p", "hello", "-n", "3", "--no-perf").err


def test_verbose_tells_about_the_model_and_the_prompt(cli: Cli) -> None:
    result = cli(*RAW, "-p", "hello", "-n", "1", "-v", "--verbose-prompt")
    for words in ("architecture: llama", "tensors: ", "context: 256 tokens", "b' hello'"):
        assert words in result.err


def test_the_chat_template_is_used_unless_told_otherwise(cli: Cli) -> None:
    def n_prompt(*more: str) -> int:
        err = cli(*MODEL, "-p", "hello", "-n", "1", *more).err
        return int(re.findall(r"prompt: (\d+) tokens", err)[0])

    assert n_prompt("--no-chat") == 2  # BOS and a word
    assert n_prompt() > 6
    assert n_prompt("-sys", "the model") > n_prompt()
    assert n_prompt("--chat-template", "{{ messages[0].content }}") == 2
    assert n_prompt("--no-chat", "--chat-template", "nonsense") == 2
    assert (
        n_prompt("--chat-template", "chatml") == n_prompt() != n_prompt("--chat-template", "phi3")
    )


def test_a_template_from_a_file(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "template.jinja"
    path.write_text("{{ messages[0].content }} world")
    result = cli(*MODEL, "-p", "hello", "-n", "1", "--chat-template-file", str(path))
    assert "prompt: 3 tokens" in result.err


def test_generation_stops_before_a_reverse_prompt(cli: Cli) -> None:
    text = cli(*RAW, "-p", "hello", "-n", "20").out
    middle = text[5:8]
    assert (
        cli(*RAW, "-p", "hello", "-n", "20", "-r", middle).out == text[: text.index(middle)] + "\n"
    )


def test_a_full_context_ends_the_text_and_says_so(cli: Cli) -> None:
    result = cli(*RAW, "-p", "hello", "-c", "32")
    assert result.status == 0
    assert "context of 32 tokens is full: raise -c or use --context-shift" in result.err
    shifted = cli(*RAW, "-p", "hello", "-c", "32", "--context-shift", "-n", "50")
    assert "answer: 50 tokens" in shifted.err


def test_sampling_options_reach_the_sampler(cli: Cli) -> None:
    greedy = cli(*RAW, "-p", "hello", "-n", "16", "--temp", "0").out
    assert greedy == cli(*RAW, "-p", "hello", "-n", "16", "--top-k", "1").out
    penalty = ("--repeat-penalty", "5", "--repeat-last-n", "-1")
    assert greedy != cli(*RAW, "-p", "hello", "-n", "16", "--temp", "0", *penalty).out
    assert greedy == cli(*RAW, "-p", "hello", "-n", "16", "--mirostat", "2", "--temp", "0").out
    last = ("--samplers", "top_k;penalties", *penalty)  # after a filter that leaves one
    assert greedy == cli(*RAW, "-p", "hello", "-n", "16", "--top-k", "1", *last).out


def test_logit_bias_and_dry_reach_the_sampler(cli: Cli) -> None:
    biased = cli(*RAW, "-p", "hello", "-n", "3", "-l", "40+1000")  # a byte token: <0x23>
    assert biased.out == "###\n"
    repeating = (*RAW, "-p", "hello hello hello hello", "-n", "8", "-l", "40+9", "--temp", "0")
    assert cli(*repeating, "--dry-multiplier", "40").out.count("#") < 8
    spared = cli(*repeating, "--dry-multiplier", "40", "--dry-sequence-breaker", "#")
    assert spared.out == cli(*repeating).out == "########\n"


def test_an_answer_without_a_token_is_one_line(cli: Cli) -> None:
    nothing = [part for id in range(453) for part in ("-l", f"{id}-inf")]
    result = cli(*RAW, "-p", "hello", "-n", "3", *nothing)
    line = "ggpy run: error: the highest logit is -inf: no token can be chosen"
    assert (result.status, result.out, result.err.splitlines()[-1]) == (2, "", line)
    chat = cli(*CHAT, *nothing, stdin=b"hello\nworld\n")
    assert chat.status == 0 and chat.err.count(line) == 2


def test_stops_are_checked_before_the_model_is_loaded(cli: Cli) -> None:
    many = [part for _ in range(65) for part in ("-r", "x")]
    result = cli(*RAW, "-p", "hello", *many)
    assert result.status == 2 and result.err.count("\n") == 1
    assert "stop has more than 64 texts: give at most 64" in result.err


def test_the_context_may_be_the_model_s_own_or_larger(cli: Cli) -> None:
    told = cli(*RAW, "-p", "a", "-n", "1", "-v", "-c", "0").err
    assert "context: 256 tokens" in told and "steps: 256 tokens at most" in told
    assert "steps: 7 tokens at most" in cli(*RAW, "-p", "a", "-n", "1", "-v", "-ub", "7").err
    assert "the model knows 256" in cli(*RAW, "-p", "a", "-n", "1", "-c", "300").err


def test_the_command_line_loads_as_the_library_does(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ggpy import model

    load, loaded = model.load, []
    monkeypatch.setattr(model, "load", lambda *a, **k: (loaded.append(a), load(*a, **k))[1])
    assert cli(*RAW, "-p", "a", "-n", "1").status == 0
    assert len(loaded) == 1


# Where prompts come from


def test_prompts_of_files_and_pipes(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "prompt.txt"
    path.write_text("hello world\n")
    expected = cli(*RAW, "-n", "8", "-p", "hello world").out
    assert cli(*RAW, "-n", "8", "-f", str(path)).out == expected
    assert cli(*RAW, "-n", "8", "-f", "-", stdin=b"hello world\n").out == expected
    assert cli(*RAW, "-n", "8", stdin=b"hello world").out == expected


def test_escapes_are_replaced_in_arguments_only(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "prompt.txt"
    path.write_bytes(rb"a\nb")
    literal = cli(*RAW, "-n", "8", "-f", str(path)).out
    assert cli(*RAW, "-n", "8", "-p", r"a\nb", "--no-escape").out == literal
    assert cli(*RAW, "-n", "8", "-p", r"a\nb").out == cli(*RAW, "-n", "8", "-p", "a\nb").out
    assert unescape(r"\n\t\\n\x41\q\"" + "\\") == '\n\t\\nA\\q"\\'


def test_text_that_is_no_utf8_is_refused_with_its_place() -> None:
    with pytest.raises(PromptError, match="x is not UTF-8: byte 0xff at offset 3"):
        decode(b"abc\xff", "x")


# Bad input: one line, status 2


def bad_file(folder: Path, name: str) -> str:
    content = Path(LLAMA).read_bytes()
    damaged = {
        "truncated.gguf": content[: len(content) // 2],
        "short.gguf": content[:100],
        "no.gguf": b"not a model",
        "empty.gguf": b"",
        "alien.gguf": content.replace(b"llama", b"alien"),  # its tokenizer, too
    }
    path = folder / name
    path.write_bytes(damaged[name])
    return str(path)


@pytest.mark.parametrize("name", ["truncated.gguf", "short.gguf", "no.gguf", "empty.gguf"])
def test_a_bad_file_is_one_line(cli: Cli, tmp_path: Path, name: str) -> None:
    check_refusal(cli(bad_file(tmp_path, name), "-p", "x"), name)


def test_an_unknown_architecture_lists_what_exists(cli: Cli, tmp_path: Path) -> None:
    check_refusal(cli(bad_file(tmp_path, "alien.gguf"), "-p", "x"), "'alien'", "llama", "gemma3")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["missing.gguf", "-p", "x"], ["there is no file missing.gguf", "smollm2"]),
        (["missing.gguf"], ["there is no file missing.gguf"]),  # before standard input is read
        ([str(ROOT), "-p", "x"], ["is a directory"]),
        ([*RAW, "-p", "hello " * 500], ["context is 256 tokens", "the prompt has 502", "raise -c"]),
        ([*RAW, "-p", "x", "--top-p", "2"], ["top_p is 2.0"]),
        ([*RAW, "-p", "x", "-l", "99999+1"], ["logit_bias names token 99999"]),
        ([*RAW, "-p", "x", "-l", "nonsense"], ["--logit-bias", "nonsense"]),
        ([*RAW, "-p", "x", "-n", "-5"], ["-n is -5"]),
        ([*RAW, "-p", "x", "-n", "many"], ["-n", "many"]),
        ([*RAW, "-p", "x", "-c", "-1"], ["-c", "-1"]),
        ([*RAW, "-p", "x", "-b", "0"], ["-b", "1 or more"]),
        ([*RAW, "-p", "x", "--keep", "-3"], ["--keep is -3"]),
        ([*RAW, "-p", "x", "-f", "y"], ["not allowed with"]),
        ([*RAW, "-p", "x", "--device", "tpu"], ["unknown device 'tpu'"]),
        ([*RAW, "-p", "x", "--no-such-flag"], ["--no-such-flag"]),
        ([*RAW, "-p", "x", "-sys", "y"], ["--no-chat"]),
        ([*RAW, "-p", "x", "-m", "y"], ["twice"]),
        ([LLAMA, "-p", "x", "-hf", "a/b"], ["not both"]),
        ([LLAMA, "-p", "x", "--chat-template", "{% if %}"], ["template"]),
        ([LLAMA, "-p", "x", "--chat-template", "nonsense"], ["nonsense", "chatml"]),
        ([LLAMA, "-p", "x", "--chat-template", "{{ raise_exception('no') }}"], ["no"]),
        ([LLAMA, "-p", "x", "--chat-template-file", "nowhere.jinja"], ["nowhere.jinja"]),
        ([LLAMA, "-f", "nowhere.txt"], ["nowhere.txt", "No such file"]),
        ([LLAMA, "-f", "-"], ["stdin is empty"]),
        (["-hf", "nonsense", "-p", "x"], ["USER/REPO"]),
    ],
)
def test_bad_usage_is_one_line(cli: Cli, arguments: list[str], words: list[str]) -> None:
    check_refusal(cli(*arguments), *words)


def check_refusal(result: Result, *words: str) -> None:
    assert (result.status, result.out) == (2, "")
    *before, last = result.err.splitlines()
    assert last.startswith("ggpy run: error: ")
    assert all(line.startswith(("device:", "model:", "note:")) for line in before)
    assert all(word in last for word in words), last


def test_a_prompt_without_end_is_refused(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("ggpy.cli.prompts.MAX_PROMPT", 1 << 20)
    (tmp_path / "x.txt").write_bytes(bytes((1 << 20) + 1))
    for words, stdin in (([], b"x" * 2000000), (["-f", str(tmp_path / "x.txt")], b"")):
        check_refusal(cli(LLAMA, *words, stdin=stdin), "has over 1 MiB, more than any context")


def test_invalid_utf8_on_stdin_is_refused(cli: Cli) -> None:
    check_refusal(cli(*RAW, stdin=b"hello \xff"), "stdin is not UTF-8: byte 0xff at offset 6")


def test_without_a_template_a_chat_is_refused(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "base.gguf"
    path.write_bytes(Path(LLAMA).read_bytes().replace(b"tokenizer.chat_template", b"t" * 23))
    check_refusal(cli(str(path), "-cnv"), "this model has no chat template", "--chat-template")
    assert cli(str(path), "-cnv", "--chat-template", "chatml", stdin=b"/exit\n").status == 0
    check_refusal(cli(str(path), "-p", "x", "-sys", "y"), "-sys needs a chat template")
    assert cli(str(path), "-p", "hello", "-n", "2").status == 0


def test_verbose_shows_where_an_error_came_from(cli: Cli) -> None:
    result = cli("missing.gguf", "-v")
    assert result.status == 2
    assert "Traceback" in result.err and result.err.splitlines()[-1].startswith("ggpy run: error: ")


# Pipes and Ctrl-C


@posix
def test_a_closed_pipe_ends_quietly() -> None:
    process = start(*FOREVER)
    assert process.stdout and process.stderr
    process.stdout.read(1)
    process.stdout.close()
    assert process.wait(timeout=60) == 0
    assert b"Traceback" not in process.stderr.read()


@posix
def test_closed_streams_are_no_reason_to_crash() -> None:
    for closed, status in ((">&-", 0), ("2>&-", 0), ("<&-", 2)):
        command = f'exec "$0" -m ggpy.run "$@" {closed}'
        arguments = [*MODEL, "-n", "2", *([] if closed == "<&-" else ["-p", "hello"])]
        shell = ["sh", "-c", command, sys.executable, *arguments]
        result = subprocess.run(shell, cwd=ROOT, capture_output=True, timeout=60)
        assert result.returncode == status
        assert b"Traceback" not in result.stderr


@posix
def test_ctrl_c_keeps_what_was_written() -> None:
    process = start(*FOREVER)
    assert process.stdout and process.stderr
    first = process.stdout.read(20)
    process.send_signal(signal.SIGINT)
    rest, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert len(first + rest) >= 20 and rest.endswith(b"\n")
    assert err.splitlines()[-1] == b"ggpy run: interrupted"
    assert b"Traceback" not in err


@pytest.mark.parametrize("where", ["prompts.read_prompt", "hub.resolve", "load"])
def test_ctrl_c_before_the_first_token(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(f"ggpy.cli.run.{where}", interrupted)
    assert cli(*RAW, "-p", "hello") == (130, "", "ggpy run: interrupted\n")


# Help, options and the dispatcher


def test_the_help_states_the_defaults_of_sampling() -> None:
    defaults = SamplingParams()
    stated = {name: kind(text) for _, name, kind, text, _ in SAMPLING}
    assert stated == {name: getattr(defaults, name) for name in stated}


def test_every_sampling_parameter_has_a_flag() -> None:
    others = {"dry_breakers", "logit_bias", "samplers"}
    assert {name for _, name, *_ in SAMPLING} | others == set(vars(SamplingParams()))


def test_only_what_is_given_is_passed_on() -> None:
    options = command_line.parse(["--temp", "0", "--min-p", "0.1", "-s", "5"])
    assert sampling(options) == {"temperature": 0.0, "min_p": 0.1, "seed": 5}


@pytest.mark.parametrize(
    ("given", "samplers"),
    [
        (("--samplers", "Temp; top-k;penalties"), ("temperature", "top_k", "penalties")),
        (("--samplers", ""), ()),
        (("--sampler-seq", "tka"), ("temperature", "top_k", "adaptive_p")),
        (("--samplers", "top_k", "--sampling-seq", "mm"), ("min_p", "min_p")),
        (("--sampler-seq", "kit"), ("top_k", "infill", "temperature")),
    ],
)
def test_the_order_of_samplers(given: tuple[str, ...], samplers: tuple[str, ...]) -> None:
    assert sampling(command_line.parse(list(given))) == {"samplers": samplers}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            ("--samplers", "top_k;fill"),
            "there is no sampler 'fill': give some of penalties (e)",
        ),
        (("--sampler-seq", "kz"), "there is no sampler 'z'"),
        (("--mirostat", "3"), "mirostat is 3: it must be 0 (off), 1 or 2"),
        (("--adaptive-decay", "1"), "adaptive_decay is 1.0: it must be from 0 to 0.99"),
    ],
)
def test_wrong_samplers(cli: Cli, given: tuple[str, ...], message: str) -> None:
    result = cli(*RAW, "-p", "hello", *given)
    assert result.status == 2 and message in result.err


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    for flag, words in (("--help", "usage: ggpy run [MODEL]"), ("--version", "ggpy ")):
        with pytest.raises(SystemExit) as end:
            run.main([flag])
        assert end.value.code == 0
        assert capsys.readouterr().out.startswith(words)


def test_figures_of_several_answers_add_up() -> None:
    total = Figures()
    for _ in range(2):
        total.add(Figures(10, 4, 21, prompt_seconds=0.5, answer_seconds=2.0, n_answers=1))
    prompt, answer = total.lines()[:2]
    assert prompt == "prompt: 12 tokens (8 more reused), 12.0 tok/s; first token after 0.50 s"
    assert answer == "answer: 42 tokens, 10.0 tok/s"


def test_ggpy_lists_and_finds_its_programs(capsys: pytest.CaptureFixture[str]) -> None:
    assert dispatcher.main(["--help"]) == 0
    text = capsys.readouterr().out
    for name in ("run", *(path.stem for path in (ROOT / "tools").glob("[!_]*.py"))):
        assert re.search(rf"^  {name} +\S", text, re.M)
    assert dispatcher.main([]) == 2
    assert dispatcher.main(["nonsense"]) == 2
    assert "unknown program 'nonsense': it must be the name of a program" in capsys.readouterr().err
    for word, hint in (
        ("bench-serve", "did you mean bench_serve?"),
        ("model.gguf", "`ggpy run model.gguf` runs a model"),
        ("-m", "a program comes first, as in `ggpy run -m`"),
        ("\x1b[2J", "'\\x1b[2J'"),
    ):
        assert dispatcher.main([word]) == 2
        assert hint in capsys.readouterr().err


def test_ggpy_runs_a_program() -> None:
    command = [sys.executable, "-m", "ggpy", "run", *RAW, "-p", "hello", "-n", "4"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=60)
    assert result.returncode == 0 and result.stdout
    tool = [sys.executable, "-m", "ggpy", "make_tiny", "--help"]
    shown = subprocess.run(tool, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert shown.stdout.startswith("usage: ggpy make_tiny")


def test_a_budget_of_reasoning(cli: Cli, tmp_path: Path) -> None:
    """The model ends what it thinks, with a message whose escapes are replaced, and goes on."""
    template = tmp_path / "thinks.jinja"
    template.write_text("{{ messages[-1].content }}<think>\n")
    asked = (*MODEL, "-p", "hello", "-n", "40", "-s", "3", "--ignore-eos", "--no-perf")
    asked += ("--chat-template-file", str(template))
    free = cli(*asked)
    words = ("--reasoning-budget", "9", "--reasoning-budget-message", r"\nEnough.")
    found = cli(*asked, *words)
    assert (free.status, found.status) == (0, 0)
    thought, closer, answer = found.out.partition("\nEnough.</think>")
    assert closer and thought and answer and free.out.startswith(thought.strip())
    assert cli(*asked, "--reasoning-budget", "0").out.strip().startswith("</think>")
    for wrong, told in (
        (("--no-chat", "--reasoning-budget", "9"), "needs a chat template"),
        (("--reasoning-budget", "-2"), "0 or more, or -1"),
    ):
        refused = cli(*MODEL, "-p", "hello", *wrong)
        assert refused.status == 2 and told in refused.err and len(refused.err.splitlines()) == 1


def test_a_budget_is_told_to_the_template(cli: Cli) -> None:
    template = "{{ enable_thinking | default('-') }} {{ thinking_budget | default('-') }}"
    asked = (*MODEL, "-p", "x", "-n", "0", "--verbose-prompt", "--chat-template", template)
    for budget, told in (("-1", "- -"), ("0", "False -"), ("7", "- 7")):
        pieces = re.findall(r"b'(.*)'$", cli(*asked, "--reasoning-budget", budget).err, re.M)
        assert "".join(pieces).removeprefix("<s>").strip() == told


THINKS = (
    "{% for m in messages %}[{{ m.role }}: {{ m.content }}]{% endfor %}"
    "{% if add_generation_prompt %}<think>\n{% endif %}"
)
JSON = ("-j", '{"enum": ["a", "b"]}', "-s", "3", "--temp", "0.5", "--no-perf")
BUDGET = ("--reasoning-budget", "5", "--reasoning-budget-message", r"\nEnough.")


def test_json_of_a_chat_follows_reasoning(cli: Cli) -> None:
    """In every turn; reasoning goes to stderr, and stdout has only JSON. A grammar ends it before
    the answer.
    """
    pytest.importorskip("llguidance", reason="needs the extra 'grammar'")
    asked = (*MODEL, "--chat-template", THINKS)
    found = cli(*asked, *JSON, *BUDGET, "-cnv", stdin=b"hello\nworld\n")
    assert found.status == 0 and found.err.count("Enough.\n\n") == 2
    answers = [json.loads(line) for line in found.out.splitlines()]
    assert len(answers) == 2 and all(answer in ("a", "b") for answer in answers)
    half = cli(*asked, *JSON, *BUDGET[2:], "-p", "hello", "-n", "120")
    assert json.loads(half.out) in ("a", "b") and "Enough.\n\n" in half.err
    for plain in (("--grammar", r'root ::= "\"a\""'), (*JSON, "--reasoning-budget", "0")):
        found = cli(*asked, *plain, "-p", "hello", "--verbose-prompt")
        pieces = "".join(re.findall(r"b'(.*)'$", found.err, re.M))
        assert pieces.endswith(r"<think>\n\n</think>\n\n") and "Enough" not in found.err
        assert json.loads(found.out) in ("a", "b")
    raw = cli(*MODEL, *JSON, "--no-chat", "-p", "hello<think>")
    assert json.loads(raw.out) in ("a", "b")


@posix
def test_ctrl_c_ends_reasoning_and_its_answer_alone(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("llguidance", reason="needs the extra 'grammar'")
    shown: list[str] = []

    def show(thoughts: Thoughts, text: str, done: bool) -> None:
        if text and not shown:
            signal.raise_signal(signal.SIGINT)
        shown.append(text)

    monkeypatch.setattr(Thoughts, "show", show)
    asked = (*MODEL, "--chat-template", THINKS, *JSON, *BUDGET, "-cnv")
    found = cli(*asked, stdin=b"hello\nworld\n")
    first, second = found.out.splitlines()
    assert found.status == 0 and not first and json.loads(second) in ("a", "b")
    assert "".join(shown).count("Enough.") == 1
