"""Mixes: the types of all tensors are llama-quantize's, and what is asked for by hand is obeyed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from quantize_cases import CASES, SHARED_MIXES, Case, summary_of_types

from ggpy.formats import by_name
from ggpy.quantization.mix import MIXES, Mix, find_mix, find_type, in_order, is_values, layer_of

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "quantize.json").read_text())["types"]


def mix_of(case: Case, name: str, **options) -> Mix:
    dimensions = {
        "architecture": case.architecture,
        "n_layer": case.n_layer,
        "n_head": case.n_head,
        "n_head_kv": case.n_head_kv,
        "n_expert": case.n_expert,
        "tied": case.tied,
    }
    return Mix(name, **dimensions, n_values=sum(map(is_values, case.shapes())), **options)


def chosen(case: Case, mix: Mix) -> dict[str, str]:
    """Type by tensor; what stays is F32."""
    shapes = case.shapes()
    found = {name: mix.choose(name, shapes[name]) for name in in_order(shapes)}
    return {name: format.name.lower() if format else "f32" for name, format in found.items()}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("has_imatrix", [False, True])
def test_types_are_those_of_llama_quantize(name: str, has_imatrix: bool) -> None:
    for mix in SHARED_MIXES:
        types = chosen(CASES[name], mix_of(CASES[name], mix, has_imatrix=has_imatrix))
        expected = GOLDEN[name][f"{mix} imatrix" if has_imatrix else mix]
        assert summary_of_types(types) == expected, mix


def test_golden_choices_differ_from_mix_to_mix() -> None:
    for has_imatrix in ("", " imatrix"):
        found = {GOLDEN["mixtral"][f"{mix}{has_imatrix}"] for mix in SHARED_MIXES}
        assert len(found) == len(SHARED_MIXES)


def test_numbers_of_file_types() -> None:
    """LLAMA_FTYPE in llama.h, which the gguf package repeats."""
    from gguf import LlamaFileType

    theirs = {t.name.removeprefix("MOSTLY_").removeprefix("ALL_"): t.value for t in LlamaFileType}
    for name in SHARED_MIXES:
        if name in theirs:
            assert mix_of(CASES["llama"], name).file_type == theirs[name]
    assert {"F32", "Q4_K_M", "IQ4_XS", "TQ2_0", "BF16"} <= theirs.keys()


def test_names_in_any_case_and_numbers() -> None:
    assert find_mix("q4_k_m") == find_mix("Q4_K") == find_mix("15") == "Q4_K_M"
    assert find_mix("7") == "Q8_0"
    assert find_mix("38") == "MXFP4_MOE"
    for bad in ("q4", "99", "iq2_xs", ""):
        problem = "cannot quantise to" if bad == "iq2_xs" else "unknown type"
        with pytest.raises(ValueError, match=rf"{problem} .*: there are F32, F16, .*Q4_K_M"):
            find_mix(bad)


def test_types_of_single_tensors() -> None:
    assert find_type("q5_k") is by_name("Q5_K")
    with pytest.raises(ValueError, match="IQ1_S cannot be quantised to; these can: F32, F16"):
        find_type("iq1_s")


@pytest.mark.parametrize("name", ["MXFP4", "NVFP4"])
def test_formats_that_llama_quantize_has_no_mix_for(name: str) -> None:
    types = chosen(CASES["llama"], mix_of(CASES["llama"], name))
    assert set(types.values()) == {name.lower(), "q6_k", "f32"}
    assert types["output.weight"] == "q6_k"


def test_pure_is_one_type_everywhere() -> None:
    for name in MIXES:
        mix = mix_of(CASES["llama, grouped"], name, pure=True)
        types = chosen(CASES["llama, grouped"], mix)
        assert {t for n, t in types.items() if "norm" not in n} == {mix.base.name.lower()}


def test_types_by_hand() -> None:
    case, q8, f16 = CASES["llama"], by_name("Q8_0"), by_name("F16")
    types = chosen(case, mix_of(case, "q4_k_m", output_type=q8, token_embd_type=f16))
    assert (types["output.weight"], types["token_embd.weight"]) == ("q8_0", "f16")
    tied = CASES["llama, tied"]
    assert chosen(tied, mix_of(tied, "q4_k_m", output_type=q8))["token_embd.weight"] == "q8_0"
    both = chosen(tied, mix_of(tied, "q4_k_m", output_type=q8, token_embd_type=f16))
    assert both["token_embd.weight"] == "f16"
    left = chosen(case, mix_of(case, "q4_k_m", leave_output=True))
    assert left["output.weight"] == "f32"


def test_the_first_pattern_counts_and_is_remarked() -> None:
    case = CASES["llama"]
    patterns = [(r"blk\.[0-3]\.attn_k", by_name("Q8_0")), ("attn_k", by_name("F16"))]
    mix = mix_of(case, "q5_k_m", tensor_types=patterns)
    types = chosen(case, mix)
    assert types["blk.3.attn_k.weight"] == "q8_0"
    assert types["blk.4.attn_k.weight"] == "f16"
    assert types["blk.4.attn_q.weight"] == "q5_k"
    assert len(mix.remarks) == case.n_layer
    assert "blk.3.attn_k.weight" in mix.remarks[3]
    assert mix.remarks[3].endswith("applying manual override: q5_k -> q8_0")


def test_patterns_count_for_plain_types_too() -> None:
    case = CASES["llama"]
    types = chosen(case, mix_of(case, "f16", tensor_types=[("ffn_down", by_name("Q8_0"))]))
    assert types["blk.0.ffn_down.weight"] == "q8_0"
    assert types["blk.0.ffn_up.weight"] == "f16"


def test_rows_that_do_not_fit_are_remarked() -> None:
    case = CASES["rows of 112"]
    mix = mix_of(case, "q4_k_m")
    assert set(chosen(case, mix).values()) == {"f16", "f32"}
    assert mix.n_fallback == len(mix.remarks) == 2 + 7 * case.n_layer
    assert "ncols    112 not divisible by 256" in mix.remarks[-1]
    assert mix.remarks[-1].endswith("falling back to     f16")


@pytest.mark.parametrize(
    "name",
    [
        *("blk.0.attn_norm.weight", "blk.0.ffn_gate_inp.weight", "position_embd.weight"),
        *("blk.0.ssm_conv1d.weight", "blk.0.time_mix_w2.weight", "token_types.weight"),
        *("blk.0.attn_q.bias", "rope_freqs.data", "v.patch_embd.weight"),
    ],
)
def test_what_is_never_quantised(name: str) -> None:
    mix = mix_of(CASES["llama"], "q4_0")
    assert mix.choose(name, (256, 256)) is None
    assert mix.choose("blk.0.ffn_up.weight", (256,)) is None
    assert mix.choose("blk.0.ffn_up.weight", (1, 256)) is None
    assert mix.choose("blk.0.ffn_up.weight", (4, 256)) is by_name("Q4_0")


def test_what_needs_an_importance_matrix() -> None:
    mix, q2, q4 = mix_of(CASES["llama"], "q2_k_s"), by_name("Q2_K"), by_name("Q4_K")
    assert mix.needs_imatrix("blk.0.ffn_up.weight", q2)
    assert not mix.needs_imatrix("blk.0.ffn_up.weight", q4)
    assert not mix.needs_imatrix("token_embd.weight", q2)
    assert not mix_of(CASES["llama"], "q2_k").needs_imatrix("blk.0.ffn_up.weight", q2)


def test_order_and_layers() -> None:
    names = ["blk.10.a", "blk.2.b", "token_embd.weight", "blk.2.a", "output.weight"]
    ordered = ["output.weight", "token_embd.weight", "blk.2.a", "blk.2.b", "blk.10.a"]
    assert in_order(names) == ordered
    assert [layer_of(name) for name in ordered] == [None, None, 2, 2, 10]
    with pytest.raises(ValueError, match=r"'blk\.99\.ffn_down_exps.weight': a model of 32 layers"):
        mix_of(CASES["mixtral"], "q4_k_m").choose("blk.99.ffn_down_exps.weight", (8, 2, 256))
