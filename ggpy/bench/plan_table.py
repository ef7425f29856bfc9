"""`ggpy bench --plan`: the kernels that a model's steps launch on a GPU, without that GPU.

The backend plans on a device that computes nothing. A row is a product with the ops that are fused
with it, or another kernel. Layers with equal plans share a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import groupby
from typing import Any

from .. import arch
from ..backends.cuda.arrays import Matrix
from ..backends.cuda.attention import HeadKernels
from ..backends.cuda.backend import Cuda
from ..backends.cuda.plan import (
    LaunchPlan,
    NormIn,
    ProductPlan,
    Recurrence,
    ResidualState,
    RopeIn,
    StepClass,
    SumPlan,
)
from ..backends.cuda.weights_f16 import SCRATCH
from ..backends.interface import GatedDeltaNet, Layer, MoE
from ..kernels.gemm.gemm_wgmma import by_layout
from ..kernels.layout.blocks_to_f16 import F16_TILES
from ..kernels.layout.tile import ROWS, TiledMatrix
from .planned import N_CTX, PlannedCuda

DECODE = (1, 2, 4, 8, 16, 32, 64)  # sequences
PREFILL = (512,)  # tokens of a prompt
LAYOUTS = ("rows", "codes", "f16", "both")  # of activations, by the ids in kernels/layout/pack.py
DEFAULT = "sm_90a"  # if there is no GPU and the user names no architecture


@dataclass(frozen=True)
class PlanRow:
    """A product of a step. layers: the layers with this plan."""

    tokens: str
    layers: str
    tensor: str
    kernel: str
    layout: str
    norm: str
    rope: str
    epilogue: str
    schedule: str
    workspace: str


TITLES = ("tokens", "layers", "tensor", "kernel", "x", "norm", "rope", "epilogue", "schedule")
HEADER = PlanRow(*TITLES, "workspace")


def table(file: Any, device: Any, steps: Sequence[StepClass], **policy: Any) -> list[PlanRow]:
    """The rows of a model's steps; policy: see Cuda."""
    ops = PlannedCuda(device, **policy)
    n_seq = max(s.n_tokens for s in steps if s.decode) if any(s.decode for s in steps) else 1
    decoder = arch.load(file, ops, N_CTX, n_seq=n_seq)
    ops.allocate_cache(decoder.cache_shape(n_seq, N_CTX, decoder.n_batch))
    return [row for s in steps for row in _merged(list(_rows(ops, decoder, s)))]


DELTA_KERNELS = {
    Recurrence.DECODE: ("delta_decode",),
    Recurrence.SCAN: ("delta_conv", "delta_scan", "delta_norm"),
    Recurrence.CHUNKS: ("delta_conv", "delta_chunk_solve", "delta_chunk_scan", "delta_norm"),
}


def steps_of(decode: Sequence[int] = DECODE, prefill: Sequence[int] = PREFILL) -> list[StepClass]:
    """Decode steps of these numbers of sequences, then prefill steps of these numbers of tokens."""
    one_each = [StepClass(n, n, True, True) for n in decode]
    return [*one_each, *(StepClass(n, 1, False, n == 1) for n in prefill)]


def _rows(ops: Cuda, decoder: Any, s: StepClass) -> Iterator[tuple[int, PlanRow]]:
    """(layer, row) of a step: the head is after the last layer, the layers' own inputs are -1."""
    planner, attention = ops.context.planner, ops.attention
    assert attention is not None
    n = f"{s.n_tokens}" if s.decode else f"pp{s.n_tokens}"
    stream = ResidualState()
    if decoder.inputs is not None:
        inputs = decoder.inputs
        plan = planner.projected_inputs(inputs, s)
        yield from _product(ops, -1, n, plan, ("per_layer_model_proj",), [inputs.w])
    for layer in map(ops.computed, decoder.layers):
        a = layer.mixer
        if isinstance(a, GatedDeltaNet):
            yield from _delta(ops, layer, n, s, stream)
            stream = planner.delta(layer, s, stream).after
        else:
            yield from _attends(ops, layer, n, s, stream)
            stream = planner.attention(layer, s, stream, attention.kernels_of(a.group)).after
        if isinstance(layer.ffn, MoE):
            yield from _experts(ops, layer, n, s)
            stream = planner.moe(layer, s).after
        elif layer.ffn is not None:
            f, dense = layer.ffn, planner.dense(layer, s, stream)
            d, gated = dense.down, ("ffn_gate", "ffn_up")
            yield from _product(ops, layer.index, n, dense.gate_up, gated, f.projections)
            yield from _product(ops, layer.index, n, d.product, ("ffn_down",), [f.w_down], out=d)
            stream = dense.after
        if layer.input is not None:
            own, end = layer.input, planner.end(layer, s, stream)
            yield from _product(ops, layer.index, n, end.gate, ("inp_gate",), [own.gate])
            yield from _product(
                ops, layer.index, n, end.out.product, ("proj",), [own.w], out=end.out
            )
            stream = end.after
    head = planner.head(decoder.head, s, stream)
    index = len(decoder.layers)
    yield from _product(ops, index, n, head, ("output",), [decoder.head.weight])


def _attends(
    ops: Cuda, layer: Layer, tokens: str, s: StepClass, stream: ResidualState
) -> Iterator[tuple[int, PlanRow]]:
    """The rows of a layer's attention."""
    a, attention, at = layer.mixer, ops.attention, layer.index
    assert attention is not None
    kernels = attention.kernels_of(a.group)
    plan = ops.context.planner.attention(layer, s, stream, kernels)
    gate, o = ("attn_gate",) if a.w_gate is not None else (), plan.out
    weights, names = a.projections, ("attn_q", *gate, "attn_k", "attn_v")
    yield from _product(ops, at, tokens, plan.qkv, names, weights, plan.rope)
    yield at, _attention(kernels, at, tokens, s)
    yield from _product(ops, at, tokens, o.product, ("attn_output",), [a.wo], out=o)


def _delta(
    ops: Cuda, layer: Layer, tokens: str, s: StepClass, stream: ResidualState
) -> Iterator[tuple[int, PlanRow]]:
    """The rows of a layer's gated delta net."""
    d, at = layer.mixer, layer.index
    plan = ops.context.planner.delta(layer, s, stream)
    names, o = ("attn_qkv", "attn_gate", "ssm_beta", "ssm_alpha"), plan.out
    yield from _product(ops, at, tokens, plan.projections, names, d.projections)
    for kernel in DELTA_KERNELS[plan.recurrence]:
        row = tokens, str(at), "-", kernel, *["-"] * 4, "recurrent state", "-"
        yield at, PlanRow(*row)
    yield from _product(ops, at, tokens, o.product, ("ssm_out",), [d.wo], out=o)


def _experts(ops: Cuda, layer: Layer, tokens: str, s: StepClass) -> Iterator[tuple[int, PlanRow]]:
    """The rows of a layer's experts."""
    f, plan, at = layer.ffn, ops.context.planner.moe(layer, s), layer.index
    assert isinstance(f, MoE)
    choice, e = plan.choice, f.experts
    n_pairs = s.n_tokens * choice.n_used
    kernel = "expert_gemm" if plan.tile_rows else "expert_gemv"
    kernel = "expert_rows" if plan.few_rows else kernel
    deal = f"{n_pairs} pairs" + (f" by {plan.tile_rows}" if plan.tile_rows else "")

    def row(tensor: str, kernel: str, norm: str, epilogue: str, schedule: str) -> PlanRow:
        x = "plain"
        if plan.packed and tensor.endswith("exps"):
            kernel, x = "expert_wgmma", "packed"
        return PlanRow(tokens, str(at), tensor, kernel, x, norm, "-", epilogue, schedule, "-")

    if plan.beside is not None and f.dense is not None:
        b, d = plan.beside, f.dense
        yield from _product(ops, at, tokens, b.gate_up, ("ffn_gate", "ffn_up"), d.projections)
        yield from _product(ops, at, tokens, b.down, ("ffn_down",), [d.w_down])
    chosen = f"{choice.n_used} of {choice.n_expert}"
    yield at, row("ffn_gate_inp", "route", "kernel", choice.score, chosen)
    if plan.packed:
        yield at, row("-", "pack_pairs", "-", "-", "-")
    if plan.shared is not None and f.shared is not None:
        gate_up, down = plan.shared
        weights = [f.shared.w_gate, f.shared.w_up]
        yield from _product(ops, at, tokens, gate_up, ("ffn_gate_shexp", "ffn_up_shexp"), weights)
        yield from _product(ops, at, tokens, down, ("ffn_down_shexp",), [f.shared.w_down])
    if plan.glu:
        yield at, row("ffn_gate_exps, ffn_up_exps", kernel, "-", "glu", deal)
    else:
        names = ("ffn_gate_exps", "ffn_up_exps")
        for name in [", ".join(names)] if plan.together and kernel == "expert_gemm" else names:
            yield at, row(name, kernel, "-", "store", deal)
        yield at, row("-", "expert_glu", "-", e.activation, "-")
    if not plan.tile_rows:
        yield at, row("ffn_down_exps", kernel, "-", "sum", deal)
        return
    yield at, row("ffn_down_exps", kernel, "-", "store", deal)
    if plan.beside is None:
        yield at, row("-", "combine", "-", "add", "-")
    else:
        yield at, row("-", "join", "kernel", " + ".join(_sum(plan.beside.total)), "-")


def _attention(kernels: HeadKernels, layer: int, tokens: str, s: StepClass) -> PlanRow:
    """The row of a layer's attention."""
    least, prefill = kernels.prefill_tokens, kernels.prefill
    kernel = "paged_attention"
    if not s.decode and prefill and least is not None and s.n_tokens >= least:
        kernel = prefill.stem
    elif s.decode and kernels.decode.has_decode_kernel:
        kernel = "decode_attention"
    heads = kernels.heads
    shape = f"{heads.n_head}/{heads.n_head_kv} heads of {heads.head_size}"
    return PlanRow(tokens, str(layer), "attention", kernel, "-", "-", "-", "-", shape, "-")


def _sum(plan: SumPlan) -> Iterator[str]:
    """What is computed with a sum."""
    if plan.post_norm is not NormIn.NONE:
        yield f"norm ({plan.post_norm.value})"
    if plan.next_norm is not None:
        yield "next norm"


def _product(
    ops: Cuda,
    layer: int,
    tokens: str,
    plan: ProductPlan,
    names: Sequence[str],
    weights: Sequence[Matrix],
    rope: RopeIn | None = None,
    out: SumPlan | None = None,
) -> Iterator[tuple[int, PlanRow]]:
    for launch in plan.launches:
        kernel = launch.kernel
        if launch.inner is not None:
            kernel += f" + {launch.inner.kernel}"
        part, epilogue = weights[launch.part], plan.epilogue.lower()
        if out is not None:
            epilogue = " + ".join((epilogue, *_sum(out)))
        schedule, workspace = _schedule(ops, plan, launch, part)
        yield (
            layer,
            PlanRow(
                tokens=tokens,
                layers=str(layer),
                tensor=", ".join(names[launch.part]),
                kernel=kernel,
                layout=LAYOUTS[plan.x_layout],
                norm=plan.norm.value,
                rope=rope.value if rope else "-",
                epilogue=epilogue,
                schedule=schedule,
                workspace=f"{workspace / 1e6:.1f} MB" if workspace else "-",
            ),
        )


def _schedule(
    ops: Cuda, plan: ProductPlan, launch: LaunchPlan, weights: Sequence[Matrix]
) -> tuple[str, int]:
    """(how the launch's output is split among CTAs, bytes of scratch memory that it takes)."""
    kernels = ops.context.planner.kernels
    inner, nbytes = launch, 0
    tiles = [w.tiles for w in weights if w.tiles is not None]
    if launch.inner is not None:
        inner = launch.inner
        layout = F16_TILES
        tiles = [TiledMatrix(layout, w.n_rows, w.k, w.in_blocks.data) for w in weights]
        nbytes = min(SCRATCH, sum(layout.nbytes(w.n_rows, w.k) for w in weights))
    n, epilogue = plan.n_tokens, plan.epilogue
    if inner.kernel == "gemm_wgmma":
        tiling, schedule = kernels.wgmma.schedule(tiles, n, epilogue)
        if tiling.split:
            nbytes += kernels.wgmma.workspace_bytes
        return f"{schedule.name}, {tiling.tokens} tokens a tile", nbytes
    if inner.kernel == "gemm_wgmma_two":
        parts = [[tiles[i] for i in part] for part in by_layout(tiles)]
        schedules = kernels.wgmma.schedule_two(parts, n)
        if any(schedule.tiling.split for schedule in schedules):
            nbytes += kernels.wgmma.workspace_bytes
        names = " and ".join(schedule.name for schedule in schedules)
        return f"{names}, {schedules[0].tiling.tokens} tokens a tile", nbytes
    if inner.kernel == "gemm_skinny":
        config = kernels.skinny.config_for(tiles[0], n)
        assert config is not None
        n_parts = config.split_k
        split = f", split-K {n_parts}" if n_parts > 1 else ""
        nbytes += kernels.wgmma.workspace_bytes if n_parts > 1 else 0
        return f"{config.tokens} tokens, {config.stages} stages{split}", nbytes
    if inner.kernel == "gemm_decode":
        rows = sum(-(-w.n_rows // ROWS) for w in tiles)
        return f"{min(rows, ops.device.sm_count)} CTAs", nbytes
    return "-", nbytes


def _merged(found: list[tuple[int, PlanRow]]) -> Iterator[PlanRow]:
    """Rows in the order of the network; those that differ only in the layer become one row."""
    same: dict[PlanRow, list[int]] = {}
    for layer, row in found:
        same.setdefault(replace(row, layers=""), []).append(layer)
    outside = [-1], [max(layer for layer, _ in found)]
    for row, layers in same.items():
        yield replace(row, layers="" if layers in outside else _ranges(layers))


def _ranges(numbers: Sequence[int]) -> str:
    """ "0-3, 5" for 0, 1, 2, 3, 5."""
    spans = []
    for _, group in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        members = [number for _, number in group]
        ends = list(dict.fromkeys((members[0], members[-1])))
        spans.append("-".join(map(str, ends)))
    return ", ".join(spans)


def lines(rows: Sequence[PlanRow]) -> Iterator[str]:
    """A table in Markdown."""
    cells = [astuple(row) for row in (HEADER, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    for i, row in enumerate(cells):
        padded = (text.ljust(width) for text, width in zip(row, widths, strict=True))
        yield f"| {' | '.join(padded)} |"
        if i == 0:
            yield f"|{'|'.join('-' * (width + 2) for width in widths)}|"
