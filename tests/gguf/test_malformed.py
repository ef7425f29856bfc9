"""Bad files: each is read or refused with GGUFError, at once and within its memory."""

from __future__ import annotations

import random
import re
import struct
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import numpy as np
import pytest
from gguf_bad_files import BAD
from gguf_files import STR, U8, array, gguf, header, key, tensor, text, u64

from ggpy.formats import all_formats
from ggpy.formats.random_blocks import random_blocks
from ggpy.gguf import File, GGUFError

OVERHEAD = 64 << 20  # bytes that a file may take beyond its size


@pytest.mark.parametrize("name", BAD)
def test_bad_file_is_refused_with_field_and_byte(name: str, tmp_path: Path) -> None:
    data, expected = BAD[name]
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    with pytest.raises(GGUFError) as caught:
        File(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert expected in message
    assert re.search(r" \(at byte \d+\)$", message), message
    assert "\n" not in message and len(message) < len(str(path)) + 300


def test_table_is_large() -> None:
    assert len(BAD) >= 80
    assert len({data for data, _ in BAD.values()}) == len(BAD)


def test_byte_in_the_message_is_where_the_field_starts(tmp_path: Path) -> None:
    data = gguf([key("one", U8, b"\1"), key("two", STR, text(b"ab\xff"))])
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    with pytest.raises(GGUFError, match=rf"\(at byte {data.index(0xFF)}\)$"):
        File(path)


def test_every_truncation_is_refused_and_counted(tmp_path: Path) -> None:
    tensors = [tensor("a", (8, 2)), tensor("b", (8,), offset=64)]
    whole = gguf([array("words", STR, 2, text("x") + text("y"))], tensors, bytes(range(96)))
    path = tmp_path / "cut.gguf"
    path.write_bytes(whole)
    with File(path) as file:
        assert list(file.tensors) == ["a", "b"]
    for size in range(1, len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(GGUFError) as caught:
            File(path)
        if size >= len(whole) - 96:
            assert f": {len(whole) - size} bytes are missing; " in str(caught.value)
        assert re.search("(are missing|are left)", str(caught.value))


@contextmanager
def traced() -> Iterator[Callable[[], int]]:
    """Yields what gives the most bytes that Python and numpy held since."""
    tracemalloc.start()
    most = 0
    try:
        yield lambda: most
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()


def sparse(path: Path, start: bytes, size: int) -> Path:
    """A file of `size` bytes that are zero after `start`, and hardly any disk."""
    with path.open("wb") as stream:
        stream.write(start)
        stream.truncate(size)
    return path


def strings(n: int) -> bytes:
    return header(0, 1) + array("s", STR, n, b"")


SPARSE = {
    "100 million empty strings": (strings(100_000_000), 800_000_100, "100000000 entries"),
    "a million in a small file": (strings(1_200_000), 9_600_100, "beyond the file"),
    "a string of 900 MB": (
        header(0, 1) + key("s", STR, u64(900 << 20)),
        901 << 20,
        "raise max_metadata",
    ),
    "numbers of 900 MB": (header(0, 1) + array("n", U8, 900 << 20, b""), 901 << 20, "the limit is"),
    "30 million tensors": (header(30_000_000, 0), 1 << 30, "at most 65536 are read"),
    "70 million keys": (header(0, 70_000_000), 1 << 30, "at most 65536 are read"),
}


@pytest.mark.parametrize("name", SPARSE)
def test_much_metadata_is_refused_before_memory_is_taken(name: str, tmp_path: Path) -> None:
    start, size, expected = SPARSE[name]
    path = sparse(tmp_path / "sparse.gguf", start, size)
    started = time.process_time()
    with traced() as peak, pytest.raises(GGUFError, match=expected):
        File(path)
    assert time.process_time() - started < 1
    assert peak() < 1 << 20


@pytest.mark.parametrize(
    ("item", "n", "fits"),
    [
        ("a" * 200 + "😀", 85_000, True),  # four bytes a character, for the sake of one
        ("a" * 200 + "😀", 140_000, False),
        ("a" * 300 + "😀", 90_000, False),
        ("a" * 9_000_000 + "😀", 1, True),
        ("a" * 12_000_000 + "😀", 1, False),
    ],
)
def test_memory_of_strings_stays_near_the_file(
    item: str, n: int, fits: bool, tmp_path: Path
) -> None:
    path = tmp_path / "strings.gguf"
    path.write_bytes(header(0, 1) + array("s", STR, n, text(item) * n))
    size = path.stat().st_size
    outcome = nullcontext() if fits else pytest.raises(GGUFError, match="beyond the file")
    with traced() as peak, outcome:
        assert File(path).metadata["s"][-1] == item
    assert peak() < size + OVERHEAD


def small_valid_file() -> bytes:
    """A file with values of every type, and tensors of a fifth of the formats."""
    rng = np.random.default_rng(7)
    codes = "BbHhIif?"
    keys = [key(f"scalar.{c}", i, struct.pack("<" + c, 1)) for i, c in enumerate(codes)]
    keys += [array(f"array.{c}", i, 2, struct.pack(f"<2{c}", 0, 1)) for i, c in enumerate(codes)]
    keys += [key(f"wide.{c}", 10 + i, struct.pack("<" + c, 5)) for i, c in enumerate("Qqd")]
    keys += [key("name", STR, text("naïve 😀")), array("words", STR, 3, text("to") * 3)]
    tensors, data = [], b""
    for format in [f for f in all_formats() if not f.is_private][::5]:
        dims = (format.block_size, 2)
        tensors.append(tensor(f"w.{format.name}", dims, format.type_id, len(data)))
        data += random_blocks(format, 2, rng).tobytes()
        data += bytes(-len(data) % 32)
    return gguf(keys, tensors, data)


EXTREMES = [
    0,
    1,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**32,
    2**62,
    2**63 - 1,
    2**63,
    2**64 - 32,
    2**64 - 1,
]


def flip_bits(data: bytearray, rng: random.Random) -> None:
    for _ in range(rng.randint(1, 2)):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def replace_bytes(data: bytearray, rng: random.Random) -> None:
    for _ in range(rng.randint(1, 3)):
        data[rng.randrange(len(data))] = rng.randrange(256)


def truncate(data: bytearray, rng: random.Random) -> None:
    del data[rng.randrange(len(data)) :]


def insert(data: bytearray, rng: random.Random) -> None:
    at = rng.randrange(len(data))
    data[at:at] = rng.randbytes(rng.randint(1, 40))


def delete(data: bytearray, rng: random.Random) -> None:
    at = rng.randrange(len(data))
    del data[at : at + rng.randint(1, 40)]


def extreme_field(data: bytearray, rng: random.Random) -> None:
    at = rng.randrange(len(data) - 8)
    data[at : at + 8] = u64(rng.choice(EXTREMES))


def extreme_length(data: bytearray, rng: random.Random) -> None:
    """Overwrites 8 bytes that look like a small number: a length, a count, a dimension."""
    places = [m.start() for m in re.finditer(rb"(?s)(?=[^\0].\0\0\0\0\0\0)", bytes(data))]
    at = rng.choice(places)
    data[at : at + 8] = u64(rng.choice([*EXTREMES, len(data), len(data) - at, len(data) - at - 8]))


def copy_piece(data: bytearray, rng: random.Random) -> None:
    at, to, n = rng.randrange(len(data)), rng.randrange(len(data)), rng.randint(1, 64)
    data[to : to + n] = data[at : at + n]


MUTATIONS: list[Callable[[bytearray, random.Random], None]] = [
    flip_bits,
    replace_bytes,
    truncate,
    insert,
    delete,
    extreme_field,
    extreme_length,
    copy_piece,
]


def mutants(valid: bytes, n: int) -> Iterator[bytes]:
    """n of them, 3 of 4 mutated before the tensors' data, where it matters more."""
    rng = random.Random(20240229)
    data_start = valid.rindex(b"w.")  # the last tensor's description, nearly
    for i in range(n):
        anywhere = i // len(MUTATIONS) % 4 == 0
        head = bytearray(valid if anywhere else valid[:data_start])
        tail = b"" if anywhere else valid[data_start:]
        MUTATIONS[i % len(MUTATIONS)](head, rng)
        if rng.random() < 0.3 and len(head) > 64:
            rng.choice(MUTATIONS)(head, rng)
        yield bytes(head) + tail


def touch_everything(file: File) -> None:
    for weights in file.tensors.values():
        assert weights.data.shape[:-1] == weights.shape[:-1]
        weights.data.sum()
        assert weights.dequantize().shape == weights.shape
        if len(weights.shape) > 1:
            assert weights.rows(0, weights.shape[0]).nbytes == weights.nbytes
        weights.check_scales()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NaN and infinity where the scales were hit
def test_mutants_are_read_or_refused(tmp_path: Path) -> None:
    valid = small_valid_file()
    read = refused = 0
    slowest, largest = 0.0, 0
    tracemalloc.start()
    for i, data in enumerate(mutants(valid, 4_000)):
        path = tmp_path / f"{i}.gguf"
        path.write_bytes(data)
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        started = time.process_time()
        try:
            with File(path) as file:
                read += 1
                touch_everything(file)
        except GGUFError:
            refused += 1
        slowest = max(slowest, time.process_time() - started)
        largest = max(largest, tracemalloc.get_traced_memory()[1] - before - len(data))
        path.unlink()
    tracemalloc.stop()
    assert slowest < 1
    assert largest < OVERHEAD
    assert read > 200 and refused > 1200  # the mutations are neither harmless nor all fatal
