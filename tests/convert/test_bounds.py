"""Checkpoints that are made to take memory: refused before they do.

Each is read in a process of its own whose peak memory is measured; a reader without these bounds
takes two to nine times as much.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import write

from ggpy.convert import folder as folders
from ggpy.convert import safetensors, vocabulary
from ggpy.convert.checkpoint import Checkpoint
from ggpy.convert.folder import ConvertError, Folder, Limit, parse_object
from ggpy.convert.vocabulary import read_tokens
from ggpy.util.paths import data_dir

MB = 1 << 20
CODE = """
import re, sys
from pathlib import Path
from ggpy.__main__ import main
try:
    main(["convert", sys.argv[1], sys.argv[2], "--dry-run", "--device", "cpu"])
except SystemExit as end:
    print(end.code)
# Not ru_maxrss, which counts what the process that started this one took.
print(int(re.search("VmHWM:\\s+(.*) kB", Path("/proc/self/status").read_text())[1]) // 1024)
"""


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write(tmp_path / "in", "llama")


def status_and_peak(checkpoint: Path) -> tuple[int, int, str]:
    """Of `ggpy convert`: the exit status, the peak in MB, what it says."""
    command = [sys.executable, "-c", CODE, str(checkpoint), str(checkpoint.parent / "out.gguf")]
    done = subprocess.run(
        command, cwd=data_dir("tools").parent, capture_output=True, text=True, timeout=250
    )
    status, peak = done.stdout.split()
    return int(status), int(peak), done.stderr


def fill(unit: bytes, nbytes: int) -> bytes:
    return b'{"a": [' + unit * (nbytes // len(unit)) + b"0]}"


def rewrite(path: Path, change: Callable[[Any], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def test_bytes_and_values_are_counted_before_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders.json, "loads", lambda *_, **__: pytest.fail("was parsed"))
    for data in (fill(b"{},", 300), fill(b"[],", 300), fill(b'{"a":{}},', 900)):
        with pytest.raises(ConvertError, match=r"x: has \d+ objects, 100 are the most"):
            parse_object(data, "x", Limit(9999, 100, 1000))
    with pytest.raises(ConvertError, match="x: has 150 values, 100 are the most"):
        parse_object(fill(b"1,", 300), "x", Limit(9999, 100, 100))
    (tmp_path / "config.json").write_bytes(fill(b"1,", 4 * MB))
    with pytest.raises(ConvertError, match=r"config\.json: has more than 4 MB"):
        Folder(tmp_path).json("config.json")


@pytest.mark.parametrize(
    "name",
    ["config.json", "tokenizer_config.json", "generation_config.json", "added_tokens.json"],
)
def test_small_files_are_small(name: str, checkpoint: Path) -> None:
    (checkpoint / name).write_bytes(fill(b"1,", 5 * MB))
    with pytest.raises(ConvertError, match="has more than 4 MB"):
        Folder(checkpoint).json(name)


def test_the_largest_real_tokenizers_are_within_the_limit() -> None:
    """Of Gemma 3, counted in its tokenizer.json: 514906 merges as pairs, 262145 tokens."""
    gemma = 33_400_000, 514_906 + 6_500, 2 * 514_906 + 262_145 + 7 * 6_242
    assert all(2 * n < 3 * most for n, most in zip(gemma, vocabulary.JSON_LIMIT, strict=True))


@pytest.mark.skipif(sys.platform != "linux", reason="/proc/self/status")
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", lambda: fill(b"{},", 4 * MB - 99)),
        ("config.json", lambda: fill(b"{},", 64 * MB)),
        ("tokenizer.json", lambda: fill(b"{},", 3_000_000 - 99)),
        ("tokenizer.json", lambda: fill(b'{"a":1},', 8_000_000 - 99)),
        ("tokenizer.json", lambda: fill(b"{},", 47 * MB)),
        ("tokenizer.json", lambda: ('{"a": "\U0001f600' + "a" * 47 * MB + '"}').encode()),
        ("tokenizer.json", lambda: b"{%s}" % b",".join(b'"%x":1.5' % i for i in range(1_999_000))),
        ("tokenizer.model", lambda: b"\x0a\x00" * (8 * MB - 9)),
        ("model.safetensors.index.json", lambda: fill(b"{},", 15 * MB)),
        ("model.safetensors.index.json",
         lambda: b'{"weight_map":{%s}}' % b",".join(b'"%x":"x"' % i for i in range(262_000))),
    ],
    ids=["objects at the limit", "objects", "objects in a tokenizer at the limit",
         "objects of one at the limit", "objects in a tokenizer", "wide text", "keys", "pieces",
         "objects in the index", "keys in the index"],
)  # fmt: skip
def test_json_takes_less_than_a_gigabyte(
    name: str, content: Callable[[], bytes], checkpoint: Path
) -> None:
    (checkpoint / name).write_bytes(content())
    status, peak, said = status_and_peak(checkpoint)
    assert status == 2 and "Traceback" not in said and len(said) < 2000, said[-2000:]
    assert peak < 1000


@pytest.mark.skipif(sys.platform != "linux", reason="/proc/self/status")
def test_a_vocabulary_that_is_large_takes_less_than_a_gigabyte(checkpoint: Path) -> None:
    """What passes all counts and reaches the library: tokens and merges up to the limits."""

    def many(content: Any) -> None:
        vocab = content["model"]["vocab"]
        vocab |= {f"t{i:x}": i for i in range(len(vocab), 900_000)}
        content["model"]["merges"] += [["t1", f"t{i:x}"] for i in range(500_000)]

    rewrite(checkpoint / "tokenizer.json", many)
    status, peak, said = status_and_peak(checkpoint)
    assert status == 2 and "Traceback" not in said
    assert peak < 1000


def header(tensors: dict[str, Any]) -> bytes:
    raw = json.dumps(tensors).encode()
    return struct.pack("<Q", len(raw)) + raw


def test_headers_have_as_many_tensors_as_a_file_can_have(tmp_path: Path) -> None:
    place = {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}
    path = tmp_path / "model.safetensors"
    path.write_bytes(header({str(i): place for i in range(safetensors.MAX_TENSORS)}))
    with safetensors.Shard(path) as shard:
        assert len(shard.tensors) == safetensors.MAX_TENSORS
    path.write_bytes(header({str(i): place for i in range(safetensors.MAX_TENSORS + 2)}))
    with pytest.raises(ConvertError, match="the header: has 196615 objects, 196610 are the most"):
        safetensors.Shard(path)
    path.write_bytes(header({"n" * 257: place}))
    with pytest.raises(ConvertError, match="has a name of 257 characters"):
        safetensors.Shard(path)
    path.write_bytes(struct.pack("<Q", 17 * MB) + bytes(17 * MB))
    with pytest.raises(ConvertError, match="are the most there may be"):
        safetensors.Shard(path)


def test_all_files_together_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}
    for i in (1, 2):
        tensors = {f"{i}.{k}": place for k in range(3)}
        (tmp_path / f"model-0000{i}-of-00002.safetensors").write_bytes(header(tensors))
    monkeypatch.setattr("ggpy.convert.checkpoint.MAX_TENSORS", 6)
    Checkpoint(Folder(tmp_path)).close()
    monkeypatch.setattr("ggpy.convert.checkpoint.MAX_TENSORS", 5)
    with pytest.raises(ConvertError, match="has more than 5 tensors"):
        Checkpoint(Folder(tmp_path))


def test_a_vocabulary_size_is_bounded(checkpoint: Path) -> None:
    rewrite(checkpoint / "config.json", lambda c: c.update(vocab_size=1 << 30))
    status, _, said = status_and_peak(checkpoint)
    assert status == 2 and "vocab_size = 1073741824: expected between 1 and 524288" in said


# What a tokenizer makes of a short text

PART = {"Sequence": {"id": "A", "type_id": 0}}


def template(n: int, **more: Any) -> dict[str, Any]:
    found = {"type": "TemplateProcessing", "single": [PART] * n, "pair": [], "special_tokens": {}}
    return {**found, **more}


def test_a_post_processor_may_have_16_parts(checkpoint: Path) -> None:
    rewrite(checkpoint / "tokenizer.json", lambda c: c.update(post_processor=template(16)))
    read_tokens(Folder(checkpoint), 512)


@pytest.mark.parametrize(
    "processor",
    [
        template(17),
        template(200_000),
        {"type": "Sequence", "processors": [template(2)] * 9},
        {"type": "Sequence", "processors": [{"type": "Sequence", "processors": [template(6)] * 3}]},
        {"type": "Sequence", "processors": [{"type": "ByteLevel"}] * 17},
        template(1, pair=[PART] * 17),
        template(1, single=" ".join("$A" * 17)),
        template(1, special_tokens={"a": {"id": "a", "ids": [1] * 17, "tokens": ["a"] * 17}}),
    ],
    ids=["17", "many", "a chain", "chains in a chain", "a long chain", "pairs", "as text", "ids"],
)
def test_post_processors_that_repeat_the_text(processor: Any, checkpoint: Path) -> None:
    rewrite(checkpoint / "tokenizer.json", lambda c: c.update(post_processor=processor))
    with pytest.raises(ConvertError, match=r"the post-processor (has \d+ parts|puts many ids)"):
        read_tokens(Folder(checkpoint), 512)


@pytest.mark.parametrize(
    "normalizer",
    [
        {"type": "Replace", "pattern": {"String": " "}, "content": "x" * 5},
        {"type": "Prepend", "prepend": "x" * 10**6},
        {"type": "Sequence", "normalizers": [
            {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}] * 30},
    ],
    ids=["long", "a megabyte", "a chain"],
)  # fmt: skip
def test_normalizers_that_put_much_for_little(normalizer: Any, tmp_path: Path) -> None:
    folder = write(tmp_path / "in", "mistral")
    rewrite(folder / "tokenizer.json", lambda c: c.update(normalizer=normalizer))
    with pytest.raises(ConvertError, match="a normalizer of"):
        read_tokens(Folder(folder), 512)


def test_deep_nesting_ends_in_a_line(checkpoint: Path) -> None:
    deep: Any = template(1)
    for _ in range(300):
        deep = {"type": "Sequence", "processors": [deep]}
    rewrite(checkpoint / "tokenizer.json", lambda c: c.update(post_processor=deep))
    try:
        read_tokens(Folder(checkpoint), 512)
    except ConvertError as error:
        assert os.linesep not in str(error)
