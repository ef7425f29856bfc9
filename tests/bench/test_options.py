"""The tests that a command line asks for."""

from __future__ import annotations

import pytest

from ggpy.bench.workload import Test
from ggpy.cli.benchmarks.bench_options import combinations, numbers, parser
from ggpy.cli.options import ALL_LAYERS


def names(*words: str) -> list[str]:
    return [t.name for t in combinations(parser().parse_args(words))]


def test_defaults_are_those_of_llama_bench() -> None:
    assert names() == ["pp512", "tg128"]
    (pp, tg) = combinations(parser().parse_args([]))
    assert pp == Test(512, 0, 0, 2048, 512, 1) and tg == Test(0, 128, 0, 2048, 512, 1)


def test_all_combinations() -> None:
    assert names("-p", "512,2048", "-n", "0", "-d", "0", "-d", "4096") == [
        *("pp512", "pp2048", "pp512 @ d4096", "pp2048 @ d4096")
    ]
    assert names("-p", "0", "-n", "64", "--batch", "1-4*2", "-pg", "16,8") == [
        *("tg64", "pp16+tg8", "tg64 x2", "pp16+tg8 x2", "tg64 x4", "pp16+tg8 x4")
    ]
    words = ["-n", "0", "-b", "64,256", "-ub", "128"]
    chunks = [t.chunk for t in combinations(parser().parse_args(words))]
    assert chunks == [64, 128]


def test_types_of_keys_and_values() -> None:
    words = ["-n", "0", "-p", "8", "-d", "0,4", "-ctk", "f16,q8_0", "--cache-type-v", "q4_0"]
    tests = list(combinations(parser().parse_args(words)))
    assert [(t.n_depth, t.type_k, t.type_v) for t in tests] == [
        *((0, "f16", "q4_0"), (4, "f16", "q4_0"), (0, "q8_0", "q4_0"), (4, "q8_0", "q4_0"))
    ]


def test_experts_in_host_memory() -> None:
    def layers(*words: str) -> list[int]:
        tests = combinations(parser().parse_args(["-n", "0", "-p", "8", *words]))
        return [t.n_cpu_moe for t in tests]

    assert layers() == [0]
    assert layers("-ncmoe", "0,12") == layers("--n-cpu-moe", "0-12+12") == [0, 12]
    assert layers("-cmoe") == layers("--cpu-moe") == [ALL_LAYERS]


def test_numbers() -> None:
    assert numbers("1,2,4") == [1, 2, 4]
    assert numbers("128-512+128,7") == [128, 256, 384, 512, 7]
    assert numbers("1-64*2") == [1, 2, 4, 8, 16, 32, 64]
    assert numbers("3-5") == [3, 4, 5]
    for bad in ("", "a", "1-5*1", "1-5+0", "-1", "1,"):
        with pytest.raises(ValueError):
            numbers(bad)


def test_models_keep_their_order() -> None:
    words = ["--synthetic", "tiny:Q8_0,tiny:F16", "-m", "a.gguf", "--synthetic", "tiny:Q4_0"]
    assert parser().parse_args(words).models == [
        *((True, "tiny:Q8_0"), (True, "tiny:F16"), (False, "a.gguf"), (True, "tiny:Q4_0"))
    ]
    assert parser().parse_args([]).models == []


@pytest.mark.parametrize(
    "words",
    [
        ["-p", "x"],
        ["-b", "0"],
        ["-pg", "512"],
        ["-r", "0"],
        ["-ctk", "q2_k"],
        ["-q"],
        ["-ngl", "few"],
        ["-mg", "1"],
    ],
)
def test_bad_usage_is_status_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parser().parse_args(words)
    assert end.value.code == 2 and words[0] in capsys.readouterr().err
