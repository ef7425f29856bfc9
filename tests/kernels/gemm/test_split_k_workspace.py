"""The split-K workspace: sums of tiles that CTAs share are added in the order of K, whichever CTA
adds them, and the workspace is empty afterwards.
"""

import ctypes

import numpy as np
import pytest
from kernel_buffers import Output, upload
from tile_scheduler_cases import work_tiles

from ggpy.kernels.gemm.hopper import EMPTY, TileSchedulerArgs, tile_scheduler_args
from ggpy.kernels.gemm.tile_scheduler import TileSchedule, Tiling

THREADS = 64
SOURCE = """
template <class T>
struct Params {
    float* partial;
    const T* values;  // [tile][stage][thread][N]
    T* out;           // [tile][thread][N]
    TileSchedulerArgs scheduler;
};
struct Storage {};
template <class T, int N>
struct Adder {
    using Sum = T;
    const Params<T>& p;
    T acc[N];
    __device__ void run(const TileScheduler& work) {
        for (int i = 0; i < N; ++i) acc[i] = 0;
        for (int stage = work.first; stage < work.last; ++stage) {
            const int at = work.tile * p.scheduler.stages + stage;
            const T* from = p.values + (at * 64 + threadIdx.x) * N;
            for (int i = 0; i < N; ++i) acc[i] += from[i];
        }
    }
};
template <class T, int N>
struct Out {
    T* to;
    __device__ Out(const Params<T>& p, const Storage&, const TileScheduler& work)
        : to(p.out + (work.tile * 64 + threadIdx.x) * N) {}
    __device__ void put(int i, const Four<T>& v) const {
        to[4 * i] = v.x, to[4 * i + 1] = v.y, to[4 * i + 2] = v.z, to[4 * i + 3] = v.w;
    }
    __device__ void end(int, int) const {}
};
template <class T, int N>
__global__ void add_up(const Params<T> p) {
    Adder<T, N> adder{p};
    run_work_tiles<Out<T, N>, 64>(p, Storage(), adder);
}
// (row block, token block, CTA, turn) of each tile.
extern "C" __global__ void tiles_of_ctas(TileSchedulerArgs args, int4* dst) {
    const int cta = blockIdx.x;
    int turn = 0;
    for (TileScheduler work(args); work.next(); ++turn)
        dst[work.tile] = make_int4(work.row_block(), work.token_block(), cta, turn);
}
"""
KINDS = [("float", n) for n in (4, 8, 16, 32, 128)] + [("int", n) for n in (8, 32)]
NAMES = [f"add_up<{kind}, {n}>" for kind, n in KINDS]
NOTHING = int.from_bytes(bytes([EMPTY] * 4))
# (tiles, stages per tile, CTAs, waves of whole tiles)
SCHEDULES = [
    (1, 12, 12, 0),  # all CTAs share one tile
    (1, 1, 1, 0),
    (5, 7, 12, 0),
    (6, 4, 12, 0),  # two CTAs per tile
    (9, 4, 12, 0),
    (40, 3, 12, 0),  # more tiles than CTAs
    (40, 3, 12, 3),  # the last four tiles are shared
    (3, 100, 7, 0),
]
SPLITS = [(5, 7, 3), (2, 23, 4), (1, 8, 8)]  # tiles, stages, CTAs of a tile


class Params(ctypes.Structure):
    """The structure of SOURCE."""

    _fields_ = (
        ("partial", ctypes.c_uint64),
        ("values", ctypes.c_uint64),
        ("out", ctypes.c_uint64),
        ("scheduler", TileSchedulerArgs),
    )


def random_values(kind: str, shape: tuple[int, ...]) -> np.ndarray:
    """Some of the values equal EMPTY, or are NaN."""
    rng = np.random.default_rng(sum(shape))
    if kind == "int":
        return rng.integers(-1000, 1000, shape).astype(np.int32)
    x = rng.standard_normal(shape).astype(np.float32)
    # -1.2e-38, for which the workspace stores 0
    x[:, :, ::7, :3] = np.uint32(NOTHING).view(np.float32)
    x[0, -1, 5, 2], x[-1, 0, 9, 0] = np.nan, np.inf
    return x


def in_order(values: np.ndarray, d: TileSchedulerArgs, ctas: int) -> np.ndarray:
    """Adds what each CTA has of a tile, in order."""
    sums = np.zeros((len(values), *values.shape[2:]), values.dtype)
    for own in work_tiles(d, ctas):
        for tile, first, last in own:
            part = np.zeros_like(sums[tile])
            for stage in range(first, last):
                part = part + values[tile, stage]
            sums[tile] += part
    return sums


@pytest.mark.parametrize(("tiles", "stages", "ctas", "waves"), SCHEDULES)
def test_sums_are_in_order_and_leave_nothing(machine, tiles, stages, ctas, waves):
    check_sums(machine, TileSchedule(Tiling(8, True), 1, tiles, ctas, waves), stages)


@pytest.mark.parametrize(("tiles", "stages", "split_k"), SPLITS)
def test_so_do_sums_of_split_tiles(machine, tiles, stages, split_k):
    """Also where the CTAs of a tile have unequal numbers of stages."""
    tiling = Tiling(8, True, split_k=split_k)
    check_sums(machine, TileSchedule(tiling, 1, tiles, tiles * split_k, 0), stages)


def check_sums(machine, schedule: TileSchedule, stages: int) -> None:
    kernels = machine.kernels("gemm/tile_scheduler.cuh", NAMES, extra_source=SOURCE)
    d, tiles, ctas = tile_scheduler_args(schedule, stages), schedule.tiles, schedule.ctas
    for kernel, (kind, n) in zip(kernels, KINDS, strict=True):
        values = random_values(kind, (tiles, stages, THREADS, n))
        words = 2 * ctas * THREADS * n
        memory = upload(machine, np.full(4 * words, EMPTY, np.uint8))
        out = Output(machine, 4 * tiles * THREADS * n)
        device_values = upload(machine, values)
        params = Params(memory.address, device_values.address, out.buffer.address, d)
        kernel.launch(ctas, THREADS, (params,), cooperative=True)
        found, expected = out.read(values.dtype, (tiles, THREADS, n)), in_order(values, d, ctas)
        if kind == "float":
            found, expected = (np.where(np.abs(x) < 1e-30, 0, x) for x in (found, expected))
        assert np.array_equal(found, expected, equal_nan=kind == "float"), f"{n} of {kind}"
        assert (machine.download(memory, np.uint8, 4 * words) == EMPTY).all(), f"after {n} {kind}"


@pytest.mark.parametrize(("row_blocks", "n_tokens"), [(2, 1), (12, 515), (6, 2048), (7, 515)])
@pytest.mark.parametrize("pairs", [True, False])
def test_pairs_have_the_same_tokens_of_neighbouring_rows(machine, row_blocks, n_tokens, pairs):
    """In the same wave; and every tile belongs to a CTA."""
    (kernel,) = machine.kernels("gemm/tile_scheduler.cuh", ["tiles_of_ctas"], extra_source=SOURCE)
    schedule = Tiling(256, False, pairs=pairs).schedule(row_blocks, n_tokens, 4, 10)
    out = Output(machine, 16 * schedule.tiles)
    kernel.launch(schedule.ctas, 1, (tile_scheduler_args(schedule, 4), out.buffer))
    found = out.read(np.int32, (schedule.tiles, 4))
    all_tiles = {(row, token) for row in range(row_blocks) for token in range(-(-n_tokens // 256))}
    assert {(row, token) for row, token, _, _ in found.tolist()} == all_tiles
    assert schedule.cluster == (2 if pairs and row_blocks % 2 == 0 else 1)
    if schedule.cluster == 2:
        first, second = found[::2], found[1::2]
        assert (first[:, 0] % 2 == 0).all() and (first[:, 2] % 2 == 0).all()
        assert np.array_equal(second - first, np.tile([1, 0, 1, 0], (len(first), 1)))
