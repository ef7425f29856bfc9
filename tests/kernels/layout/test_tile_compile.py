"""The kernels of a decode step compile for every architecture, without spilling."""

import pytest
from static_shared import most_static
from tile_cases import NORMED, PRODUCT, TILED, layouts, tile_types

from ggpy.backends.cuda.plan.products import MOST_NORMED
from ggpy.device.compile import compile_cubin
from ggpy.formats import by_name
from ggpy.kernels.blocks.block_kernel import compile_options, expression

EVERY_INSTANCE, EVERY_KERNEL = ("75", "90a"), ("80", "89", "100", "120")
INSTANCES = ["1, NORM, GLU, true", "1, PLAIN, ADD, true", "8, PLAIN, STORE, true"]
INSTANCES += ["2, NORM, GLU, true", "4, PLAIN, STORE, true", "1, POST_NORM, GLU, true"]
SOME = tile_types("Q8_0", "Q4_0", "Q6_K")
# Bytes without scales, tables with 7-bit and 8-bit entries, codes of two and three bits.
KINDS = tile_types("I8", "F8_E4M3", "MXFP4", "IQ4_XS", "TQ2_0", "Q3_K")
FEW = [*(f"{SOME[0]}, {i}" for i in INSTANCES), f"{SOME[1]}, 1, NORM, STORE, true"]
FEW += [
    f"{SOME[0]}, 1, PLAIN, STORE, false",
    f"{SOME[2]}, 8, PLAIN, ADD, false",
    f"{SOME[0]}, 2, POST_NORM, STORE, true",
]
TWO = [
    f"gemm_decode_two<{', '.join(SOME[1:])}, {n}>" for n in ("1, NORM", "1, POST_NORM", "4, PLAIN")
]
TWO += [f"gemm_decode_rope<{SOME[0]}, 2, NORM>"]
TWO += [f"gemm_decode_two_rope<{', '.join(SOME[1:])}, 2, NORM>"]
ROPE = ["rope_kv<CacheF16, CacheF16>", "rope_kv<CacheQ5_1, CacheQ4_0>", "rope_kv_whole<128>"]
ATTEND = {64: 0, 128: 8, 256: 200}  # head size -> maximum bytes of spill loads
ATTEND_SM_75 = {64: 0, 128: 100, 256: 350}
ATTENTION = ("decode_attention", "paged_attention")
DYNAMIC = ("gemm_", *ATTENTION, "rms_norm_rows", "add_rms_norm_rows")  # use dynamic shared memory
STRIPS = [(row, "false, false") for row in (64, 128, 256)]
ODD_STRIPS = [(row, strips) for row in (64, 128) for strips in ("false, true", "true, true")]


def decode_names(strips):
    choices = ("true, false", "false, false", "false, true")  # (MORE, ROTATED)
    return [f"decode_attention<{row}, {s}, {choice}>" for row, s in strips for choice in choices]


pytestmark = pytest.mark.usefixtures("nvrtc")


def product(arch, instances, pieces=1, warps=16):
    """The resources of instances of the decode GEMM."""
    names = [f"gemm_decode<{instance}>" for instance in instances]
    defines = {**PRODUCT, "NORM_PIECES": pieces, "WARPS": warps}
    return compile_cubin("gemm/gemm_decode.cu", arch, expressions=names, defines=defines).resources


def attend(arch, names):
    return compile_cubin(
        "attention/paged_attention.cu", arch, expressions=names, defines={"PAGE_SIZE": 64}
    ).resources


def small(arch):
    """The resources of the kernels other than GEMMs and attention."""
    found = {}
    for pieces in (1, 4):
        norm = {"WARPS": 16, "NORM_PIECES": pieces}
        found.update(compile_cubin("norm/rms_norm.cu", arch, defines=norm).resources)
    for name in ("sampling/argmax", "gemm/elementwise"):
        found.update(compile_cubin(f"{name}.cu", arch).resources)
    found.update(compile_cubin("attention/rope_kv.cu", arch, expressions=ROPE).resources)
    rows = [f"embed_tile<{t}>" for t in SOME]
    found.update(compile_cubin("layout/embed_tile.cu", arch, expressions=rows).resources)
    assert set(found) >= {"rms_norm", "add_rms_norm", "argmax", "glu", "soft_cap", *ROPE, *rows}
    return found


def check_nothing_spills(found, registers=128, spilled=0):
    for name, r in found.items():
        if name.startswith(DYNAMIC):
            source = "attention/paged_attention.cu" if name.startswith(ATTENTION) else "another"
            assert r.shared <= most_static(source, name), f"{name} has {r.shared} bytes of its own"
        assert max(r.spill_loads, r.spill_stores) <= spilled, f"{name} spills: {r}"
        assert r.registers <= registers, f"{name} takes {r.registers} registers"


def many(arch, layouts):
    """The resources of the prefill GEMM."""
    names = [f"gemm_prefill<{t}, {e}>" for t in layouts for e in ("ADD", "GLU")]
    return compile_cubin("gemm/gemm_prefill.cu", arch, expressions=names).resources


@pytest.mark.parametrize("arch", EVERY_INSTANCE)
def test_every_instance(arch):
    check(f"sm_{arch}", FEW, TWO, STRIPS, ATTEND_SM_75 if arch == "75" else ATTEND)


@pytest.mark.parametrize("arch", EVERY_KERNEL)
def test_every_kernel(arch):
    """Architectures that are similar to one of those above."""
    check(f"sm_{arch}", FEW[:2], TWO[:1], STRIPS[1:2], {128: ATTEND[128]})


def check(arch, few, two, strips, most_spilled):
    check_nothing_spills(many(arch, SOME[:1]), registers=255)
    check_nothing_spills(product(arch, few))  # 512 threads have 128 registers each
    found = compile_cubin("gemm/gemm_decode.cu", arch, expressions=two, defines=PRODUCT).resources
    check_nothing_spills(found)
    check_nothing_spills(small(arch))
    check_nothing_spills(attend(arch, decode_names(strips)), registers=255)
    bounds = {
        f"paged_attention<{n}, {str(n < 256).lower()}>": most for n, most in most_spilled.items()
    }
    for name, r in attend(arch, list(bounds)).items():
        check_nothing_spills({name: r}, registers=255, spilled=bounds[name])


def test_odd_strips():
    """Configurations that need the shared memory of Hopper."""
    check_nothing_spills(attend("sm_90a", decode_names(ODD_STRIPS)), registers=255)


@pytest.mark.parametrize("instance", [INSTANCES[0], *INSTANCES[2:4]])
def test_every_layout(instance):
    """With one token; with more, a layout of each kind."""
    types = layouts() if instance == INSTANCES[0] else [*SOME, *KINDS]
    found = product("sm_90a", [f"{t}, {instance}" for t in types])
    check_nothing_spills(found)
    assert len(found) == len(types)


@pytest.mark.parametrize(
    ("arch", "instances"),
    [("sm_75", INSTANCES[2:3]), ("sm_120", INSTANCES[2:3]), ("sm_90a", INSTANCES[4:])],
)
def test_every_kind_of_codes(arch, instances):
    """A word of IQ4_XS spills as sm_75, before the loop over chunks and after it."""
    found = product(arch, [f"{t}, {i}" for t in KINDS for i in instances])
    if arch == "sm_75":
        (layout,) = tile_types("IQ4_XS")
        spills = {name: r for name, r in found.items() if layout in name}
        check_nothing_spills(spills, spilled=4)
        found = {name: r for name, r in found.items() if name not in spills}
    check_nothing_spills(found)


@pytest.mark.parametrize("warps", [8, 16])
@pytest.mark.parametrize(("columns", "tokens"), [(16384, (1,)), (12288, NORMED)])
def test_wide_rows_are_normalised_in_registers(columns, tokens, warps):
    """Up to 16384 columns, the width of the widest known model, with two tokens too."""
    assert tokens[-1] * columns <= MOST_NORMED
    pieces, registers = columns // (256 * warps), 65536 // (32 * warps)
    instances = [f"{SOME[0]}, {c}, NORM, {e}, true" for c in tokens for e in ("STORE", "GLU")]
    check_nothing_spills(product("sm_90a", instances, pieces, warps), registers=registers)


def test_every_format_can_be_repacked():
    formats = [by_name(name) for name in TILED]
    names = [expression("repack", f, t) for f, t in zip(formats, tile_types(*TILED), strict=True)]
    options = compile_options(*formats)
    found = compile_cubin("layout/repack.cu", "sm_75", expressions=names, **options).resources
    assert set(found) == set(names)
    check_nothing_spills(found, registers=255)
