"""Rows and their text: llama-bench's names, formats that parse, and the page of results."""

from __future__ import annotations

import csv
import json
import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import stdev
from typing import Any

import pytest

from ggpy.bench import compare_table, report
from ggpy.bench.kernels import table as kernel_table
from ggpy.bench.profiling import table as profile_table
from ggpy.bench.runs import Facts, Result
from ggpy.bench.table import (
    ABOVE_CPU_NOTE,
    ABOVE_NOTE,
    FIELDS,
    LLAMA_BENCH,
    SAMPLES,
    Machine,
    Row,
    lines,
    rate,
    row_of,
)
from ggpy.bench.workload import Test

# The fields of llama-bench's JSON, in its order.
NAMES_IN_WORDS = """
build_commit build_number cpu_info gpu_info backends model_filename model_type model_size
model_n_params n_batch n_ubatch n_threads cpu_mask cpu_strict poll type_k type_v n_gpu_layers
n_cpu_moe split_mode main_gpu no_kv_offload flash_attn devices tensor_split tensor_buft_overrides
load_mode lazy_mode embeddings no_op_offload no_host repack fit_target fit_min_ctx n_prompt n_gen
n_depth test_time avg_ns stddev_ns avg_ts stddev_ts
"""
NAMES = NAMES_IN_WORDS.split()
OPTIONAL = {"load_s", "first_token_ms", "device_bytes"}
SPEEDS = {
    *("avg_ns", "stddev_ns", "avg_ts", "stddev_ts", "median_ts", "spread", "limit_ts"),
    "percent_of_limit",
}
FACTS = Facts("o'model.gguf", 'llama "8B" Q8_0', 8 << 30, 8_030_000_000, 2.5)
MACHINE = Machine(
    backend="CUDA",
    cpu="A CPU",
    gpu="NVIDIA H200",
    driver="13.0",
    activations="f16",
    n_threads=2,
    ordinal=0,
    commit="abc1234",
    command="ggpy bench -m x",
    time=lambda: "2026-11-21T10:00:00Z",
    bandwidth=4.67e12,
    matrix_rate=7.9e14,
)
GENERATION = Result(
    FACTS,
    Test(0, 100, n_seq=2, n_cpu_moe=5),
    samples_ns=[400_000_000, 500_000_000, 410_000_000],
    limit_s=0.2,
    device_bytes=9 << 30,
)
PROMPT = Result(
    FACTS, Test(512, 0, 4096), samples_ns=[10**8] * 3, first_ns=[2 * 10**8] * 3, limit_s=0.05
)
FAILED = Result(Facts("big.gguf"), Test(512, 0), error="MemoryError: too large")


def rows() -> Iterator[Row]:
    return (row_of(result, MACHINE) for result in (GENERATION, PROMPT, FAILED))


def check_schema(row: dict[str, Any]) -> None:
    """Names, order and types of the JSON that the program writes."""
    assert [*row] == [*FIELDS, *SAMPLES]
    for name, kind in FIELDS.items():
        absent = row[name] is None and (name in OPTIONAL or (row["error"] and name in SPEEDS))
        assert absent or type(row[name]) is kind, name
    assert all(type(n) is int for n in row["samples_ns"])


def test_fields_are_those_of_llama_bench_and_then_ours() -> None:
    assert [*LLAMA_BENCH] == NAMES
    assert [*FIELDS][: len(NAMES)] == NAMES
    for row in rows():
        check_schema(row)


def test_figures() -> None:
    row = next(rows())
    speeds = [500, 400, 200 / 0.41]
    assert row["samples_ts"] == pytest.approx(speeds)
    assert row["avg_ts"] == pytest.approx(sum(speeds) / 3)
    assert row["stddev_ts"] == pytest.approx(stdev(speeds))
    assert row["median_ts"] == pytest.approx(200 / 0.41)
    assert row["spread"] == pytest.approx(100 / (200 / 0.41))
    assert row["limit_ts"] == pytest.approx(1000)
    assert row["percent_of_limit"] == pytest.approx(20 / 0.41)
    assert row["test"] == "tg100 x2" and row["first_token_ms"] is None


def test_json_and_jsonl_have_the_same_rows() -> None:
    expected = list(rows())
    assert json.loads("\n".join(lines("json", rows()))) == expected
    assert [json.loads(line) for line in lines("jsonl", rows())] == expected
    assert json.loads("\n".join(lines("json", iter(())))) == []


def test_csv() -> None:
    found = list(csv.DictReader(lines("csv", rows())))
    assert len(found) == 3 and [*found[0]] == [*FIELDS]
    assert found[0]["model_type"] == 'llama "8B" Q8_0'
    assert (found[0]["no_host"], found[2]["avg_ts"]) == ("0", "")


def test_sql() -> None:
    database = sqlite3.connect(":memory:")
    database.executescript("\n".join(lines("sql", rows())))
    found = database.execute(
        "SELECT model_filename, test, avg_ts, repack, error FROM llama_bench"
    ).fetchall()
    assert found[0] == ("o'model.gguf", "tg100 x2", pytest.approx(462.6, abs=0.1), 1, "")
    assert found[2] == ("big.gguf", "pp512", None, 1, "MemoryError: too large")


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_markdown() -> None:
    found = list(lines("md", rows(), ["n_ubatch"]))
    assert cells(found[0]) == [
        *("model", "size", "params", "backend", "ngl", "n_ubatch"),
        *("test", "t/s", "limit", "% of limit"),
    ]
    assert set(found[1]) == set("|-: ") and len(cells(found[1])) == 10
    assert cells(found[2]) == [
        *('llama "8B" Q8_0', "8.00 GiB", "8.03 B", "CUDA", "-1", "512"),
        *("tg100 x2", "462.60 ± 54.56 !", "1000", "48.8"),
    ]
    assert cells(found[3])[-4:] == ["pp512 @ d4096", "5120.00 ± 0.00", "10240", "50.0"]
    assert cells(found[4])[-3:] == ["failed", "", ""]
    assert found[6:] == [
        "o'model.gguf: loaded in 2.50 s, 9.00 GiB of GPU memory, "
        "first token after 200.0 ms (pp512 @ d4096)",
        "big.gguf: pp512 failed: MemoryError: too large",
        "limit: 4.67 TB/s read, 790 TFLOP/s, measured on NVIDIA H200",
        "! runs differed by more than 5%: the machine was busy or changed its clocks",
        "build: ggpy abc1234",
    ]


@pytest.mark.parametrize(("limit_s", "said"), [(0.105, False), (0.12, True)])
def test_more_than_the_limit_is_remarked(limit_s: float, said: bool) -> None:
    """A machine that was busy when its limit was measured; that of a GPU is kept."""
    result = Result(FACTS, Test(512, 0), samples_ns=[10**8] * 3, limit_s=limit_s)
    for gpu, told in (("NVIDIA H200", ABOVE_NOTE), ("", ABOVE_CPU_NOTE)):
        found = list(lines("md", [row_of(result, replace(MACHINE, gpu=gpu))], []))
        remarks = [line for line in found if line.startswith("! above the limit")]
        assert remarks == ([told] if said else [])


# The page


def test_the_page_is_made_of_the_files(tmp_path: Path) -> None:
    folder = tmp_path / "benchmarks"
    folder.mkdir()
    (folder / "h200-decode.json").write_text("\n".join(lines("json", rows())))
    (folder / "a-first.json").write_text(json.dumps(list(rows())[:1]))
    assert report.write(folder) == tmp_path / "BENCHMARKS.md"
    text = (tmp_path / "BENCHMARKS.md").read_text()
    assert text.index("## a first") < text.index("## h200 decode")
    assert "NVIDIA H200, driver for CUDA 13.0, 2026-11-21" in text
    assert "```sh\nggpy bench -m x\n```" in text
    assert "| o'model.gguf | 8.00 GiB | tg100 x2 | 487.8 | 20.5% (busy?) | 1000 | 48.8 |" in text
    assert "| big.gguf |  | pp512 | failed |" in text
    assert "big.gguf, pp512: MemoryError: too large" in text


def test_a_comparison_is_a_section(tmp_path: Path) -> None:
    row = dict.fromkeys(compare_table.FIELDS, "x") | {"ggpy_ts": 30.0, "llama_ts": 10.0}
    row |= {"ratio": 3.0, "ggpy_spread": 0.01, "llama_spread": 0.5, "limit_ts": 60.0}
    found = {"kind": compare_table.KIND, "command": "ggpy compare", "time": "2026-01-02T03:04:05Z"}
    (tmp_path / "a.json").write_text(json.dumps(found | {"rows": [row]}))
    text = "\n".join(report.page(tmp_path))
    assert "2026-01-02.\n\n```sh\nggpy compare\n```" in text
    assert "| x | x | 30.00 | 10.00 ! | 3.00 | 50.0 |" in text
    del row["ratio"]
    (tmp_path / "a.json").write_text(json.dumps(found | {"rows": [row]}))
    with pytest.raises(report.ReportError, match=r"a\.json: the rows have no 'ratio'"):
        list(report.page(tmp_path))


@pytest.mark.parametrize("content", ["", "{}", "[]", "[1]", '[{"avg_ts": 1}]'])
def test_what_is_no_result_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(report.ReportError, match=r"x\.json"):
        list(report.page(tmp_path))


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(report.ReportError, match=r"no \.json files"):
        report.write(tmp_path)


def test_the_committed_page_is_up_to_date() -> None:
    root = Path(__file__).resolve().parent.parent.parent
    if not (root / "benchmarks").is_dir():
        pytest.skip("nothing was measured yet")
    page = (root / "BENCHMARKS.md").read_text(encoding="utf-8")
    assert page == "\n".join(report.page(root / "benchmarks")) + "\n"


def test_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from ggpy.bench.plot import draw

    path = tmp_path / "out.png"
    assert draw(list(rows()), str(path)) == 1
    deep = [
        row_of(Result(FACTS, Test(0, 8, d, n_seq=n), [10**7] * 2, limit_s=0.004), MACHINE)
        for d, n in [(0, 1), (512, 1), (0, 4)]
    ]
    assert draw([*rows(), *deep], str(path)) == 3
    assert path.read_bytes().startswith(b"\x89PNG")


def test_kernels_and_steps_become_sections(tmp_path: Path) -> None:
    machine = {
        "gpu": "A GPU", "driver": "13.0", "compiler": "13.1", "build": "abc",
        "time": "2026-11-21T10:00:00Z", "bandwidth": 1e12, "matrix_rate": 1e14,
    }  # fmt: skip
    row = dict.fromkeys(kernel_table.FIELDS) | {
        "what": "product", "where": "8B qkv", "format": "Q8_0", "shape": "8x8", "tokens": 1,
        "us": 12.345, "spread": 0.01, "percent_of_limit": 80.4, "error": "",
    }  # fmt: skip
    other = row | {"tokens": 8, "us": 20.0, "spread": 0.5}
    half = row | {"what": "dequantize", "shape": "8x8 half", "where": "8B"}
    half |= {"error": "no", "us": None, "percent_of_limit": None}
    kernels = machine | {"kind": kernel_table.KIND, "command": "ggpy bench_kernels"}
    profile = machine | {"kind": profile_table.KIND, "command": "ggpy bench --profile"}
    parts = [{"op": "", "name": "start", "count": 1, "us": 1.0, "registers": None, "shared": None}]
    step = {
        "model": "8B:Q8_0", "model_type": "llama", "test": "tg8", "n_seq": 1, "n_depth": 0,
        "step_us": 100.0, "spread": 0.1, "device_us": 90.0, "limit_us": 50.0, "parts": parts,
        "ops": [],
    }  # fmt: skip
    for name, document in (
        ("b-kernels", kernels | {"rows": [row, other, half]}),
        ("a-steps", profile | {"profiles": [step]}),
    ):
        (tmp_path / f"{name}.json").write_text(json.dumps(document))
    text = "\n".join(report.page(tmp_path))
    assert text.index("## a steps") < text.index("## b kernels")
    assert "8B:Q8_0, tg8: a step takes 100.0 us, 50.0 % of the limit of 50.0 us" in text
    assert "| sum |  | 90.0 |  | 90.0 |  |  |" in text
    assert "! steps differed by 10.0%" in text
    assert "A GPU, driver for CUDA 13.0, 2026-11-21, build abc, compiler 13.1." in text
    assert "| where | format | x1 | x8 |" in text
    assert "| 8B qkv | Q8_0 | 12.35 us, 80 % | 20.00 us, 80 % ! |" in text
    assert "<details><summary>dequantize</summary>" in text
    assert "| 8B | Q8_0 | failed |" in text
    for bad in (kernels | {"rows": []}, profile | {"profiles": [{}]}, kernels):
        (tmp_path / "c.json").write_text(json.dumps(bad))
        with pytest.raises(report.ReportError, match=r"c\.json"):
            list(report.page(tmp_path))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere/x.png", "there is no folder .*nowhere"),
        ("x.xyz", "the name ends in none of .*png"),
        ("", "is a directory"),
    ],
)
def test_a_picture_that_cannot_be_written_is_refused(
    name: str, message: str, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    from ggpy.bench.plot import require

    with pytest.raises((ValueError, OSError), match=message):
        require(str(tmp_path / name))
    for good in ("x.png", "x", "x.PDF"):
        require(str(tmp_path / good))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("value", "text"),
    [(4.67e12, "4.67 TB/s"), (21.7e9, "21.7 GB/s"), (999.6e9, "1 TB/s"), (999e9, "999 GB/s")],
)
def test_rates_have_the_prefix_that_fits(value: float, text: str) -> None:
    assert rate(value, "B/s") == text
