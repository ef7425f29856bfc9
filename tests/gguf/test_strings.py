"""Strings packed into their bytes are as those of a list."""

from pathlib import Path

import pytest
from gguf_files import STR, array, gguf, text
from hypothesis import given, settings
from hypothesis import strategies as st

from ggpy.gguf import File, PackedStrings


@settings(max_examples=30, deadline=None)
@given(st.lists(st.text(max_size=20)), st.slices(10))
def test_all_that_a_list_answers(strings: list[str], part: slice) -> None:
    packed = PackedStrings(strings)
    assert packed == strings and packed == PackedStrings(strings)
    assert packed != [*strings, ""] and packed != ["x" + text for text in strings[:1]] + ["y"]
    assert list(packed) == strings and packed[part] == strings[part]
    assert [packed[i - len(strings)] for i in range(len(strings))] == strings
    for index in (len(strings), -len(strings) - 1):
        with pytest.raises(IndexError, match=f"{index} of {len(strings)} strings"):
            packed[index]


def test_a_lone_surrogate_stays() -> None:
    assert PackedStrings(["\ud800"])[0] == "\ud800"


def test_a_file_packs_its_long_arrays(tmp_path: Path) -> None:
    many, few = [f"t{i}" for i in range(2000)], ["a", "b"]
    path = tmp_path / "x.gguf"
    arrays = {"many": many, "few": few}.items()
    path.write_bytes(gguf([array(k, STR, len(a), b"".join(map(text, a))) for k, a in arrays]))
    with File(path) as file:
        file.pack_strings()
        assert isinstance(file.metadata["many"], PackedStrings) and file.metadata["many"] == many
        assert file.metadata["few"] == few and isinstance(file.metadata["few"], list)
    for known in (PackedStrings(many), PackedStrings(many[::-1])):
        with File(path) as file:
            file.pack_strings(known)
            assert (file.metadata["many"] is known) == (known == many)
