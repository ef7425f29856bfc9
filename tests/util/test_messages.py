"""What a file says never reaches a terminal as it is: not its escape codes, lines or megabytes."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import write
from gguf_bad_files import gguf, key, text

from ggpy.arch.config import Config, UnsupportedModel, short
from ggpy.convert import Checkpoint, Folder, read_config
from ggpy.convert.folder import ConvertError
from ggpy.gguf import File, GGUFError
from ggpy.quantization.requantize import _first
from ggpy.tokenizer import Tokenizer
from ggpy.tokenizer.chat import ChatTemplateError, render
from ggpy.util import messages, outcome
from ggpy.util.paths import data_dir

EVIL = "\x1b]0;title\x07\x1b[2J\r\ntwo\u202e\u2028\x9b" + "a" * 5000
STRING = 8


def is_fit(message: str, longest: int = 1500) -> bool:
    return message.isprintable() and len(message) <= longest


@pytest.mark.parametrize(
    "value",
    [EVIL, "a" * 10**7, [EVIL] * 10**5, {EVIL: EVIL}, [[[[EVIL]]]], np.arange(10**6), (1,) * 10**6,
     {i: i for i in range(10**5)}, EVIL.encode()],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_values_are_short_and_printable(value: Any) -> None:
    assert is_fit(messages.shown(value), 200)
    assert is_fit(messages.shown(value, 40), 200)
    assert is_fit(messages.escaped(value), 2000)
    assert is_fit(short(value), 200)


def test_what_is_short_and_printable_stays() -> None:
    assert messages.shown("blk.0") == "'blk.0'"
    assert messages.shown([1, "ä"]) == "[1, 'ä']"
    assert messages.shown(np.array([1, 2])) == "[1, 2]"
    assert messages.shown(2.5) == "2.5"
    assert messages.escaped("a b Δ") == "a b Δ"
    assert messages.shown("x" * 99) == repr("x" * 77 + "...")


def test_lines_of_a_log_stay_and_its_codes_do_not() -> None:
    log = messages.lines("a.cu(3): \x1b[31merror\x1b[0m\n\tint x\n")
    assert log == "a.cu(3): \\x1b[31merror\\x1b[0m\n        int x"
    assert len(messages.lines("x\n" * 10**7)) < 10**5


@pytest.mark.parametrize(
    "error", [ValueError(EVIL * 99), OSError(5, EVIL, EVIL), RuntimeError(EVIL), MemoryError(EVIL)]
)
def test_no_program_prints_what_a_terminal_obeys(
    error: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    def work() -> int:
        raise error

    outcome.ended(work, is_bug=lambda error: True)
    outcome.ended(work)
    said = capsys.readouterr().err
    assert all(line.isprintable() for line in said.split("\n"))
    assert len(said) < 10**5


def test_a_bug_is_told_without_codes() -> None:
    code = "from ggpy.util.outcome import ended\ndef f(): raise TypeError('\\x1b[2J' * 9)\nended(f)"
    command = [sys.executable, "-c", code]
    told = subprocess.run(
        command, cwd=data_dir("tools").parent, capture_output=True, text=True, timeout=60
    )
    assert told.returncode == 1 and "TypeError: \\x1b[2J" in told.stderr
    assert "\x1b" not in told.stderr


# GGUF


@pytest.mark.parametrize(
    "content",
    [
        gguf([key("general.alignment", STRING, text(EVIL))]),
        gguf([key("general.alignment", STRING, text("a" * 10**6))]),
        gguf([key(EVIL, 13, bytes(8))]),
        gguf([key("general.architecture", STRING, text(EVIL)), key(EVIL, STRING, text(EVIL))] * 2),
    ],
    ids=["escape codes", "a megabyte", "a key", "a key twice"],
)
def test_a_gguf_file_s_own_text(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(content)
    with pytest.raises(GGUFError) as raised:
        File(tmp_path / "x.gguf")
    assert is_fit(str(raised.value))


def test_a_tensor_s_name_with_a_nul(tmp_path: Path) -> None:
    name = text("blk.0\0.weight")
    tensor = name + struct.pack("<IQIQ", 1, 32, 0, 0)
    (tmp_path / "x.gguf").write_bytes(gguf([], [tensor]) + bytes(256))
    with pytest.raises(GGUFError, match=r"name of tensor 0: holds a NUL: 'blk\.0\\x00\.weight'"):
        File(tmp_path / "x.gguf")


class Fake:
    """As much of a file as readers of settings look at."""

    path, architecture = Path("x.gguf"), EVIL
    metadata: dict[str, Any] = {f"{EVIL}.head_count": EVIL}  # noqa: RUF012


@pytest.mark.parametrize(
    "read",
    [
        lambda: Config({f"a.{EVIL}": EVIL}, "a").refuse_unread(),
        lambda: Config({"a.b": EVIL}, "a").integer("b"),
        lambda: Config({"a.b": EVIL}, "a").only("b", "c"),
        lambda: _first(Fake(), "head_count"),  # type: ignore[arg-type]
        lambda: Tokenizer({"tokenizer.ggml.model": EVIL}),
        lambda: Tokenizer({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a"],
                           "tokenizer.ggml.pre": EVIL}),
        lambda: Tokenizer({"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": [EVIL] * 2}),
    ],
)  # fmt: skip
def test_settings_and_tokens(read: Callable[[], object]) -> None:
    with pytest.raises(GGUFError) as raised:
        read()
    assert is_fit(str(raised.value), 3000)


@pytest.mark.parametrize(
    "template",
    ["{{ raise_exception(messages[0].content) }}", "{{ raise_exception(messages) }}",
     "{{ raise_exception(5) }}", "{{ raise_exception('a' * 100000) }}", "{{ 'a\x1b[2J' ~ 1 / 0 }}",
     "{% \x1b[2J %}"],
)  # fmt: skip
def test_templates(template: str) -> None:
    with pytest.raises(ChatTemplateError) as raised:
        render(template, [{"role": "user", "content": EVIL}])
    assert is_fit(str(raised.value), 2500)
    assert "ended with status" not in str(raised.value)


# Checkpoints


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": [EVIL]},
        {"architectures": EVIL},
        {"hidden_act": EVIL},
        {EVIL: EVIL},
        {"hidden_size": EVIL},
        {"quantization_config": {"quant_method": EVIL}},
        {"quantization_config": EVIL},
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": EVIL}},
    ],
    ids=str,
)
def test_a_checkpoint_s_settings(changes: dict[str, Any], tmp_path: Path) -> None:
    from ggpy.convert import read_model

    folder = Folder(write(tmp_path, "llama", **changes))
    with pytest.raises((ConvertError, UnsupportedModel, GGUFError)) as raised:
        config, architecture, kind = read_config(folder)
        with Checkpoint(folder, config.get("quantization_config")) as checkpoint:
            read_model(folder, config, architecture, kind, checkpoint)
    assert is_fit(str(raised.value))


@pytest.mark.parametrize(
    "header",
    [
        {"a\x1b[2J": {"dtype": EVIL, "shape": [EVIL], "data_offsets": EVIL}},
        {"a": {"dtype": "F32", "shape": [1] * 10**5, "data_offsets": [0, 0]}},
        {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0] * 10**5}},
        {EVIL: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}},
    ],
)
def test_a_header_s_names(header: dict[str, Any], tmp_path: Path) -> None:
    write(tmp_path, "llama", tokenizer=False)
    for path in tmp_path.glob("model*"):
        path.unlink()
    raw = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(4))
    with pytest.raises(ConvertError) as raised:
        Checkpoint(Folder(tmp_path))
    assert is_fit(str(raised.value))


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c["model"].update(type=EVIL),
        lambda c: c["model"].update(dropout=EVIL),
        lambda c: c["model"]["vocab"].update({EVIL: 9999}),
        lambda c: c["model"].update(merges=[[EVIL] * 3]),
        lambda c: c.update(normalizer={"type": EVIL}),
        lambda c: c["added_tokens"].append({EVIL: EVIL}),
        lambda c: c.update(pre_tokenizer={"type": EVIL}),
    ],
)
def test_a_tokenizer_s_contents(change: Callable[[Any], object], tmp_path: Path) -> None:
    from ggpy.convert.vocabulary import read_tokens

    write(tmp_path, "llama")
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    change(content)
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ConvertError) as raised:
        read_tokens(Folder(tmp_path), 512)
    assert is_fit(str(raised.value))
