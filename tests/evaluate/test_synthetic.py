"""Synthetic models: the shapes of known ones, valid blocks, and what specs mean."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest

from ggpy import arch
from ggpy.backends.numpy.backend import Reference
from ggpy.evaluate.synthetic import Synthetic, parse, shapes
from ggpy.gguf import Tensor
from ggpy.quantization.mix import BY_ROW, activations_of, base_of

PARAMETERS = {  # in thousands of millions, as their makers say
    **{"SmolLM2-135M": 0.1345, "Llama-3.2-1B": 1.236, "Llama-3.2-3B": 3.213},
    **{"Llama-3.1-8B": 8.030, "Llama-3.1-70B": 70.554},
    **{"Qwen3-0.6B": 0.596, "Qwen3-4B": 4.022, "Qwen3-8B": 8.191},
    **{"Qwen3-14B": 14.768, "Qwen3-32B": 32.762},
    **{"Gemma-3-1B": 1.000, "Gemma-3-4B": 3.880, "Gemma-3-12B": 11.766, "Gemma-3-27B": 27.009},
    **{"Mixtral-8x7B": 46.703, "Qwen1.5-MoE-A2.7B": 14.316, "Qwen3-30B-A3B": 30.532},
    **{"Qwen3-235B-A22B": 235.094, "gpt-oss-20b": 20.915, "gpt-oss-120b": 116.829},
    **{"Phi-4": 14.660, "SmolLM3-3B": 3.075, "Granite-3.3-8B": 8.171, "OLMo-3-7B": 7.298},
    **{"Seed-OSS-36B": 36.151, "ERNIE-4.5-0.3B": 0.3607, "Hunyuan-7B": 7.505},
    **{"Ministral-3-8B": 8.490, "EXAONE-4.0-32B": 32.003, "GLM-4-9B": 9.400},
    # Of Gemma 4 the text model, without images and sound.
    **{"Gemma-4-E2B": 4.626, "Gemma-4-E4B": 7.453, "Gemma-4-12B": 11.907, "Gemma-4-31B": 30.697},
    "Gemma-4-26B-A4B": 25.23,
    **{"Qwen3.5-9B": 8.954, "Qwen3.5-27B": 26.896},  # without images and further tokens
    **{"Qwen3.5-35B-A3B": 34.661, "Qwen3-Next-80B-A3B": 79.674},
    **{"Command-R7B": 8.028, "Command-R-32B": 32.296, "Qwen3-VL-8B": 8.191},
    **{"Command-R-Plus": 103.81, "Muse-Glimmer-30B": 27.854},  # the latter without images
    **{"GLM-4.5-Air": 106.85, "ERNIE-4.5-21B-A3B": 21.825, "Hunyuan-A13B": 80.393},
    **{"MiniMax-M2": 228.690, "Llama-4-Scout": 107.77, "Ling-mini-2.0": 16.256},
    **{"dots.llm1": 142.774, "Gemma-7B": 8.538, "K-EXAONE-236B-A23B": 236.57},
    **{"OLMoE-1B-7B": 6.919, "Granite-3.1-3B-A800M": 3.299},
    **{"Qwen2.5-VL-7B": 7.616, "Qwen3-VL-30B-A3B": 30.532},
}


def test_every_shape_but_the_tiny_one_has_a_known_size() -> None:
    assert set(shapes()) == {"tiny", *PARAMETERS}


@pytest.mark.parametrize("name", PARAMETERS)
def test_shapes_have_as_many_weights_as_the_models(name: str) -> None:
    with Synthetic(f"{name}:Q4_0", empty=True) as model:
        n = sum(prod(t.shape) for t in model.tensors.values())
    assert n / 1e9 == pytest.approx(PARAMETERS[name], rel=2e-3)


def test_a_model_takes_the_memory_of_its_largest_tensors() -> None:
    with Synthetic("Llama-3.1-70B:Q4_0") as model:
        table = model.tensors.pop("token_embd.weight")
        matrices = [t for t in model.tensors.values() if len(t.shape) > 1]
        owners = {t.data.base.__array_interface__["data"][0] for t in matrices}
        assert len(owners) == 1
        largest = max(t.nbytes for t in matrices)
        base = matrices[0].data.base
        assert base is not None and largest <= base.nbytes <= largest + (8 << 20)
        assert table.data.base is not None and table.data.base.nbytes <= table.nbytes + (8 << 20)
        assert model.nbytes > 39e9


@pytest.mark.parametrize("architecture", sorted({s.architecture for s in shapes().values()}))
def test_every_architecture_loads_as_a_file_does(architecture: str) -> None:
    """All that `arch.load` checks holds for the declared tensors, fused ones included."""
    shape = next(
        s for s in shapes().values() if s.architecture == architecture and s.name != "tiny"
    )
    model = Synthetic(f"{shape.name}:Q4_0", empty=True)
    loaded: list[str] = []

    class Names(Reference):
        def weight(self, tensor, role, scale=None, activations="f16"):  # type: ignore[no-untyped-def]
            loaded.append(tensor.name)
            return tensor

    decoder = arch.load(model, Names(1), 64)  # type: ignore[arg-type]
    assert decoder.sizes.n_vocab == shape.n_vocab
    assert len(decoder.layers) == shape.settings["block_count"]
    assert ("output.weight" in loaded) is not shape.tied


def test_experts_in_mxfp4_and_the_rest_in_q8_0() -> None:
    with Synthetic("gpt-oss-20b:MXFP4_MOE", empty=True) as model:
        kinds = {name.split(".", 2)[-1]: t.format.name for name, t in model.tensors.items()}
        assert model.nbytes / 2**30 == pytest.approx(11.27, abs=0.02)  # as the usual file
        output = model.tensors["output.weight"].format.name
    of_experts = {kind for name, kind in kinds.items() if name.endswith("_exps.weight")}
    assert of_experts == {"MXFP4"} and kinds["attn_q.weight"] == output == "Q8_0"
    assert kinds["ffn_gate_inp.weight"] == kinds["ffn_up_exps.bias"] == "F32"


@pytest.mark.parametrize("type", ["Q4_K_M", "W8A8", "IQ2_XS"])
def test_types_of_a_mixture_of_experts(type: str) -> None:
    with Synthetic(f"Qwen1.5-MoE-A2.7B:{type}", empty=True) as model:
        assert model.tensors["blk.0.ffn_gate_inp.weight"].format.name == "F32"
        assert all(t.shape[-1] % t.format.block_size == 0 for t in model.tensors.values())
        assert not any("_exps.scale" in name for name in model.tensors)


@pytest.mark.parametrize("type", ["Q8_0", "Q4_K", "F16", "BF16", "IQ2_XS", "TQ1_0", "MXFP4"])
def test_blocks_are_valid_and_of_a_moderate_size(type: str) -> None:
    with Synthetic(f"tiny:{type}") as model:
        for t in model.tensors.values():
            Tensor(t.name, t.shape, t.format, t.data).check_scales()
            weights = t.dequantize().astype(np.float64)
            rms = np.sqrt(np.mean(weights**2))
            expected = 8.0 if t.name == "token_embd.weight" else 256**-0.5
            assert rms == pytest.approx(1.0 if len(t.shape) == 1 else expected, rel=0.3)


@pytest.mark.parametrize("type", BY_ROW)
def test_types_with_a_scale_for_each_row(type: str) -> None:
    with Synthetic(f"tiny:{type}") as model:
        assert model.tensors["token_embd.weight"].format.name == "Q8_0"
        handed: dict[str, tuple[Tensor, Tensor, str]] = {}

        class Given(Reference):
            def weight(self, tensor, role, scale=None, activations="f16"):  # type: ignore[no-untyped-def]
                handed[tensor.name] = tensor, scale, activations
                return super().weight(tensor, role, scale, activations)

        arch.load(model, Given(1), 64)  # type: ignore[arg-type]
        tensor, scale, activations = handed["blk.0.ffn_down.weight"]
        Tensor(tensor.name, tensor.shape, tensor.format, tensor.data).check_scales()
        weights = tensor.dequantize() * scale.dequantize()[:, None]
        assert np.sqrt(np.mean(weights**2)) == pytest.approx(256**-0.5, rel=0.3)
        assert tensor.format is base_of(type) and activations == activations_of(type)
        assert model.tensors[tensor.name].format.name in ("I8", "Q4_0")
        assert all(x[1] is None for name, x in handed.items() if "blk" not in name)


def test_tensors_differ_and_a_seed_repeats_them() -> None:
    one, again, other = Synthetic("tiny:Q8_0"), Synthetic("tiny:Q8_0"), Synthetic("tiny:Q8_0", 1)
    name = "blk.0.ffn_up.weight"
    assert (one.tensors[name].data == again.tensors[name].data).all()
    assert (one.tensors[name].data != other.tensors[name].data).any()
    assert (one.tensors[name].data != one.tensors["blk.0.ffn_gate.weight"].data).any()


@pytest.mark.parametrize(
    ("spec", "formats"),
    [
        ("tiny:q8_0", ("Q8_0", "Q8_0")),
        ("TINY:Q4_K", ("Q4_K", "Q6_K")),
        ("tiny:Q4_K/Q8_0", ("Q4_K", "Q8_0")),
        ("SmolLM2-135M:Q4_K", ("Q5_0", "Q8_0")),  # 576 is no multiple of 256
        ("SmolLM2-135M:IQ2_XS", ("Q4_0", "Q4_0")),
    ],
)
def test_types(spec: str, formats: tuple[str, str]) -> None:
    with Synthetic(spec, empty=True) as model:
        output = "token_embd.weight" if model.shape.tied else "output.weight"
        names = ("blk.0.attn_q.weight", output)
        assert tuple(model.tensors[name].format.name for name in names) == formats
        assert model.tensors["blk.0.attn_norm.weight"].format.name == "F32"


@pytest.mark.parametrize(
    ("spec", "output", "formats"),
    [
        ("Llama-3.1-8B:q4_k_m", "output.weight", ("Q4_K", "Q6_K", "Q6_K", "Q6_K")),
        ("Llama-3.1-8B:Q4_K_S/Q8_0", "output.weight", ("Q4_K", "Q5_K", "Q5_K", "Q8_0")),
        ("Gemma-3-4B:Q4_K_M", "token_embd.weight", ("Q4_K", "Q6_K", "Q6_K", "Q6_K")),
    ],
)
def test_mixes(spec: str, output: str, formats: tuple[str, ...]) -> None:
    """As files have them: the first layer's, and the output's."""
    with Synthetic(spec, empty=True) as model:
        names = [f"blk.0.{part}.weight" for part in ("attn_k", "attn_v", "ffn_down")]
        assert tuple(model.tensors[name].format.name for name in (*names, output)) == formats
        values = {t.format.name for name, t in model.tensors.items() if "attn_v" in name}
        assert values == {"Q4_K", formats[1]}


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("tiny", "give SHAPE:TYPE"),
        ("huge:Q8_0", "Llama-3.1-8B"),
        ("tiny:Q9", "unknown type 'Q9'"),
        ("tiny:I32", "unknown type 'I32'"),
        ("tiny:Q8_0/none", "unknown type 'none'"),
    ],
)
def test_bad_specs(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(spec)


@pytest.mark.parametrize("spec", ["Gemma-3-1B:Q4_K_M", "Llama-3.2-1B:W8A8"])
def test_an_empty_model_has_the_same_tensors(spec: str) -> None:
    """Of several formats, and with scales for each row; its matrices are 0."""
    with Synthetic(spec) as model, Synthetic(spec, empty=True) as empty:
        for name, t in model.tensors.items():
            of_empty = empty.tensors[name]
            assert (of_empty.shape, of_empty.format) == (t.shape, t.format)
        assert list(empty.tensors) == list(model.tensors) and empty.metadata == model.metadata
        assert not empty.tensors["blk.0.attn_q.weight"].data.any()
