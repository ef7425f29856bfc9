"""Tiles of output that blocks share: each comes to its sums in the order of K, whoever made them,
and nothing of them stays.
"""

import ctypes

import numpy as np
import pytest
from dealt_cases import shares
from kernel_buffers import Output, upload

from ggpy.kernels.gemm.hopper import EMPTY, Dealt, dealt
from ggpy.kernels.gemm.tile_scheduler import Cut, Schedule

THREADS = 64
SOURCE = """
template <class T>
struct Params {
    float* partial;
    const T* values;  // [tile][stage][thread][N]
    T* out;           // [tile][thread][N]
    Dealt dealt;
};
struct Room {};
template <class T, int N>
struct Adder {
    using Sum = T;
    const Params<T>& p;
    T acc[N];
    __device__ void run(const Shares& share) {
        for (int i = 0; i < N; ++i) acc[i] = 0;
        for (int stage = share.first; stage < share.last; ++stage) {
            const int at = share.tile * p.dealt.stages + stage;
            const T* from = p.values + (at * 64 + threadIdx.x) * N;
            for (int i = 0; i < N; ++i) acc[i] += from[i];
        }
    }
};
template <class T, int N>
struct Out {
    T* to;
    __device__ Out(const Params<T>& p, const Room&, const Shares& share)
        : to(p.out + (share.tile * 64 + threadIdx.x) * N) {}
    __device__ void put(int i, const Four<T>& v) const {
        to[4 * i] = v.x, to[4 * i + 1] = v.y, to[4 * i + 2] = v.z, to[4 * i + 3] = v.w;
    }
    __device__ void end(int, int) const {}
};
template <class T, int N>
__global__ void add_up(const Params<T> p) {
    Adder<T, N> adder{p};
    make_shares<Out<T, N>, 64>(p, Room(), adder);
}
// (row block, token block, block of threads, turn) of each tile.
extern "C" __global__ void places(Dealt dealt, int4* to) {
    const int block = blockIdx.x;
    int turn = 0;
    for (Shares share(dealt); share.next(); ++turn)
        to[share.tile] = make_int4(share.row_block(), share.token_block(), block, turn);
}
"""
KINDS = [("float", n) for n in (4, 8, 16, 32, 128)] + [("int", n) for n in (8, 32)]
NAMES = [f"add_up<{kind}, {n}>" for kind, n in KINDS]
NOTHING = int.from_bytes(bytes([EMPTY] * 4))
# (tiles, stages of each, blocks, rounds of whole tiles)
DEALT = [
    (1, 12, 12, 0),  # all share one
    (1, 1, 1, 0),
    (5, 7, 12, 0),
    (6, 4, 12, 0),  # two blocks each
    (9, 4, 12, 0),
    (40, 3, 12, 0),  # more tiles than blocks
    (40, 3, 12, 3),  # the last four are shared
    (3, 100, 7, 0),
]


class Params(ctypes.Structure):
    """As in SOURCE."""

    _fields_ = (
        ("partial", ctypes.c_uint64),
        ("values", ctypes.c_uint64),
        ("out", ctypes.c_uint64),
        ("dealt", Dealt),
    )


def random_values(kind: str, shape: tuple[int, ...]) -> np.ndarray:
    """Some look as if there were none, or are no numbers."""
    rng = np.random.default_rng(sum(shape))
    if kind == "int":
        return rng.integers(-1000, 1000, shape).astype(np.int32)
    x = rng.standard_normal(shape).astype(np.float32)
    x[:, :, ::7, :3] = np.uint32(NOTHING).view(np.float32)  # -1e-38, as good as 0
    x[0, -1, 5, 2], x[-1, 0, 9, 0] = np.nan, np.inf
    return x


def in_order(values: np.ndarray, d: Dealt, blocks: int) -> np.ndarray:
    """What each block has of a tile, added up in order."""
    sums = np.zeros((len(values), *values.shape[2:]), values.dtype)
    for mine in shares(d, blocks):
        for tile, first, last in mine:
            part = np.zeros_like(sums[tile])
            for stage in range(first, last):
                part = part + values[tile, stage]
            sums[tile] += part
    return sums


@pytest.mark.parametrize(("tiles", "stages", "blocks", "rounds"), DEALT)
def test_sums_come_in_order_and_leave_nothing(machine, tiles, stages, blocks, rounds):
    kernels = machine.kernels("gemm/tile_scheduler.cuh", NAMES, extra_source=SOURCE)
    schedule = Schedule(Cut(8, True), 1, tiles, blocks, rounds)
    d = dealt(schedule, stages)
    for kernel, (kind, n) in zip(kernels, KINDS, strict=True):
        values = random_values(kind, (tiles, stages, THREADS, n))
        words = 2 * blocks * THREADS * n
        memory = upload(machine, np.full(4 * words, EMPTY, np.uint8))
        out = Output(machine, 4 * tiles * THREADS * n)
        given = upload(machine, values)
        params = Params(memory.address, given.address, out.buffer.address, d)
        kernel.launch(blocks, THREADS, (params,), cooperative=True)
        found, expected = out.read(values.dtype, (tiles, THREADS, n)), in_order(values, d, blocks)
        if kind == "float":
            found, expected = (np.where(np.abs(x) < 1e-30, 0, x) for x in (found, expected))
        assert np.array_equal(found, expected, equal_nan=kind == "float"), f"{n} of {kind}"
        assert (machine.download(memory, np.uint8, 4 * words) == EMPTY).all(), f"after {n} {kind}"


@pytest.mark.parametrize(("row_blocks", "n_tokens"), [(2, 1), (12, 515), (6, 2048), (7, 515)])
@pytest.mark.parametrize("pairs", [True, False])
def test_pairs_have_the_same_tokens_of_neighbouring_rows(machine, row_blocks, n_tokens, pairs):
    """In the same turn; and all tiles are somebody's."""
    (kernel,) = machine.kernels("gemm/tile_scheduler.cuh", ["places"], extra_source=SOURCE)
    schedule = Cut(256, False, pairs=pairs).deal(row_blocks, n_tokens, 4, 10)
    out = Output(machine, 16 * schedule.tiles)
    kernel.launch(schedule.blocks, 1, (dealt(schedule, 4), out.buffer))
    found = out.read(np.int32, (schedule.tiles, 4))
    all_tiles = {(row, token) for row in range(row_blocks) for token in range(-(-n_tokens // 256))}
    assert {(row, token) for row, token, _, _ in found.tolist()} == all_tiles
    assert schedule.sharers == (2 if pairs and row_blocks % 2 == 0 else 1)
    if schedule.sharers == 2:
        first, second = found[::2], found[1::2]
        assert (first[:, 0] % 2 == 0).all() and (first[:, 2] % 2 == 0).all()
        assert np.array_equal(second - first, np.tile([1, 0, 1, 0], (len(first), 1)))
