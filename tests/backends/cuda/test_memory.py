"""What a model takes on a GPU is known before it is uploaded, and is what is then allocated."""

from __future__ import annotations

import re
from collections import Counter
from types import SimpleNamespace

import pytest
from counting_device import CountingDevice

from ggpy import arch
from ggpy.backends.cuda import memory
from ggpy.backends.cuda.backend import SPLIT_TOKENS, Cuda
from ggpy.backends.cuda.kv_pages import heads_of
from ggpy.backends.interface import (
    PAGE_SIZE,
    CacheGroup,
    CacheShape,
    Demand,
    PagedKV,
    Role,
    pages_for,
)
from ggpy.backends.numpy.backend import Reference
from ggpy.cache_types import USUAL, CacheTypes
from ggpy.formats import by_name
from ggpy.gguf import File
from ggpy.kernels.attention.prefill_attention import PrefillAttention
from ggpy.model import Model
from ggpy.tokenizer import Tokenizer

GB = 10**9


def weight(kind: str, rows: int, columns: int) -> SimpleNamespace:
    """A tensor without data: its sizes are all that counts."""
    format = by_name(kind)
    nbytes = rows * format.row_bytes(columns)
    return SimpleNamespace(shape=(rows, columns), format=format, nbytes=nbytes)


def llama_8b(
    n_ctx: int, kind: str = "Q8_0", n_seq: int = 1, types: CacheTypes = USUAL, most: int = 512
) -> Demand:
    layer = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096)]
    shapes = [*layer, (14336, 4096), (4096, 14336)]
    weights = [(weight(kind, *shape), Role("F D")) for shape in shapes] * 32
    weights += [(weight(kind, 128256, 4096), Role("V D", lookup)) for lookup in (True, False)]
    spec = PagedKV(32, 8, 128, 128, types=types)
    group = CacheGroup(spec, tuple(range(32)), n_seq * pages_for(n_ctx))
    sizes = {"n_embd": 4096, "n_ff": 14336, "n_vocab": 128256}
    return Demand(weights, n_seq, most, 512, **sizes, cache=lambda n_batch: CacheShape((group,)))


def spec_of(demand: Demand) -> PagedKV:
    return demand.cache(demand.n_batch).groups[0].spec


def need_of(demand: Demand, converts: bool = False) -> memory.Need:
    return memory.needed(demand, SPLIT_TOKENS, converts=lambda heads: converts)


def test_a_well_known_model_takes_what_it_is_known_to_take() -> None:
    need = need_of(llama_8b(8192))
    assert 8.53 * GB < need.weights < 8.53 * GB * 1.03  # 8.03e9 weights of 8.5 bits, whole pages
    positions = 8192 + PAGE_SIZE  # and the page of tokens that pad a step
    assert need.cache == positions * 2 * 32 * 8 * 128 * 2  # K and V, layers, heads, halves
    assert need.work < 500e6


def test_tiles_take_what_blocks_take_in_common_formats() -> None:
    """But for Q6_K's, whose chunks are no whole lines of memory: 6.5625 bits in a file."""
    bits = {"Q4_0": 4.5, "Q8_0": 8.5, "Q4_K": 4.5, "Q5_K": 5.5, "F16": 16, "Q6_K": 6.75}
    for kind, each in bits.items():
        tensor = weight(kind, 4096, 4096)
        assert memory.weight_bytes(tensor, False) == 4096 * 4096 * each / 8


def test_a_table_that_is_looked_up_and_a_format_without_tiles_stay_in_blocks() -> None:
    for tensor, lookup in ((weight("Q4_K", 64, 256), True), (weight("F32", 64, 256), False)):
        assert memory.weight_bytes(tensor, lookup) == tensor.nbytes


@pytest.mark.parametrize("nbytes", [1, 1000, 1 << 20, (2 << 20) + 1, 1 << 30])
def test_allocations_are_rounded_as_the_driver_does(nbytes: int) -> None:
    unit = 512 if nbytes < 1 << 20 else 2 << 20
    assert 0 <= memory.allocated(nbytes) - nbytes < unit
    assert memory.allocated(nbytes) % unit == 0


def check(demand: Demand, free: int) -> None:
    need = need_of(demand, spec_of(demand).types != USUAL)
    memory.check(need, demand, free, "cuda:0")


def test_what_fits_is_let_through_to_the_byte() -> None:
    total = need_of(llama_8b(8192)).total
    check(llama_8b(8192), total)
    with pytest.raises(MemoryError, match=f"{total} bytes.*{total - 1} bytes"):
        check(llama_8b(8192), total - 1)


def test_pages_as_halves_take_what_a_layer_of_halves_takes() -> None:
    demand = llama_8b(8192, types=CacheTypes("q8_0", "q4_0"))
    blocks = (8192 + PAGE_SIZE) * 8 * 128 // 32 * (34 + 18)  # one page for tokens that pad a step
    halves = 8192 * 8 * 128 * 2 * 2
    assert need_of(demand).cache == 32 * blocks
    assert need_of(demand, True).cache == 32 * blocks + halves


@pytest.mark.parametrize("types", [USUAL, CacheTypes("q8_0", "q8_0")], ids=["f16", "q8_0"])
@pytest.mark.parametrize("n_seq", [1, 3])
def test_the_context_that_would_fit_fits_and_no_larger_one(n_seq: int, types: CacheTypes) -> None:
    free = 11 * GB
    with pytest.raises(MemoryError) as refusal:
        check(llama_8b(131072, n_seq=n_seq, types=types), free)
    text = str(refusal.value)
    assert all(words in text for words in ("8.77 GB for weights", "11.00 GB", "free on cuda:0"))
    n_ctx = int(re.findall(r"would fit \(-c (\d+)\)", text)[0])
    check(llama_8b(n_ctx, n_seq=n_seq, types=types), free)
    with pytest.raises(MemoryError):
        check(llama_8b(n_ctx + 64, n_seq=n_seq, types=types), free)


def with_room(nbytes: int) -> tuple[Cuda, list[str]]:
    """Ops on a device that has so much free memory, and what they tell the user."""
    device = CountingDevice()
    notes: list[str] = []
    ops = Cuda(device, note=notes.append)
    device.total = device.used_bytes + nbytes
    return ops, notes


def test_codebooks_are_written_out_where_there_is_room() -> None:
    demand, kind = llama_8b(8192, "IQ2_XXS"), by_name("IQ2_XXS")
    as_tiles = need_of(demand).total
    ops, notes = with_room(as_tiles)
    ops.plan_memory(demand)
    assert not notes and not ops.context.planner.keeps_blocks(kind)
    ops, notes = with_room(as_tiles - 1)
    ops.plan_memory(demand)
    assert notes == [
        "weights in IQ2_XXS stay in their file's blocks, at about a quarter of the speed: "
        "as tiles they would take 0.00 GB more than is free"
    ]
    assert ops.context.planner.keeps_blocks(kind) and not ops.context.planner.keeps_blocks(
        by_name("Q2_K")
    )


def test_steps_are_as_large_as_there_is_room_for() -> None:
    """They become smaller before weights stay in blocks."""
    demand, least = llama_8b(8192, "IQ2_XXS", most=2048), llama_8b(8192, "IQ2_XXS")
    for free, n_batch in (
        (need_of(demand).total, 2048),
        (need_of(demand).total - 1, 512),
        (need_of(least).total, 512),
    ):
        ops, notes = with_room(free)
        assert ops.plan_memory(demand) == n_batch
        assert not notes and not ops.context.planner.compact
    ops, notes = with_room(need_of(least).total - 1)
    assert ops.plan_memory(demand) == 512 and notes and ops.context.planner.compact
    assert need_of(demand).total - need_of(least).total < 400 << 20


def test_what_does_not_fit_in_blocks_either_is_refused() -> None:
    demand = llama_8b(8192, "IQ2_XXS")
    in_blocks = sum(memory.allocated(w.nbytes) for w, _ in demand.weights)
    ops, notes = with_room(in_blocks)
    with pytest.raises(MemoryError, match=f"{in_blocks / 1e9:.2f} GB for weights"):
        ops.plan_memory(demand)
    plain = llama_8b(8192)
    ops, notes = with_room(need_of(plain).total - 1)
    with pytest.raises(MemoryError):
        ops.plan_memory(plain)
    assert not notes


def test_weights_that_do_not_fit_say_so() -> None:
    with pytest.raises(MemoryError, match="no context would fit: take a smaller model or --dev"):
        check(llama_8b(512), 8 * GB)


@pytest.mark.parametrize("types", [USUAL, CacheTypes("bf16", "f32")], ids=["f16", "others"])
@pytest.mark.parametrize(
    "architecture",
    [
        *("llama", "gemma3", "phi3", "qwen2", "qwen3moe", "qwen2moe", "gpt-oss"),
        *("qwen35", "qwen35moe", "gemma4"),
    ],
)
def test_a_backend_allocates_no_more_than_was_foreseen(tiny_path, architecture, types) -> None:  # type: ignore[no-untyped-def]
    """Of weights and pages exactly that, up to the driver's rounding."""
    device = CountingDevice()
    demands: list[Demand] = []

    class Noting(Cuda):
        def plan_memory(self, demand: Demand) -> int:
            demands.append(demand)
            return super().plan_memory(demand)

    with File(tiny_path(architecture)) as file:
        ops = Noting(device)
        sizes = {"n_ctx": 256, "n_batch": 64, "n_seq": 3, "cache_types": types}
        model = Model(file, Tokenizer.from_gguf(file), ops, **sizes)
        for text in ("hello world " * 30, "hello", "the model"):
            model.engine.add(model.tokenizer.encode(text), max_tokens=5)
        while model.engine.busy:
            model.engine.step()
    (demand,) = demands
    fits = PrefillAttention.fits(device, heads_of(spec_of(demand)))
    need = need_of(demand, fits and types is not USUAL)
    assert device.most_bytes <= need.total
    assert ops.device_bytes() == device.used_bytes > 0
    kept: Counter[str] = Counter()  # parts of a fused tensor have one name
    for tensor, role in demand.weights:
        kept[tensor.name] += memory.weight_bytes(tensor, role.lookup)
    assert {name: device.allocated[name] for name in kept} == kept
    cache = ("keys", "values", "keys as f16", "values as f16")
    states = ("inputs of convolutions", "recurrent states")
    assert sum(device.allocated[name] for name in (*cache, *states)) == need.cache
    assert bool(device.allocated[states[0]]) == (architecture in ("qwen35", "qwen35moe"))
    assert bool(device.allocated[cache[3]]) == (fits and types is not USUAL)
    activations = need.work - memory.KERNELS - device.allocated["attention workspace"]
    names = ("x", "o", "normed", "logits", "mixed", "z", "beta", "alpha", "u", "decay", "heads")
    assert activations >= sum(device.allocated[n] for n in names)


def test_all_sequences_have_room_to_be_split(tiny_path) -> None:
    for n_seq, most in ((1, SPLIT_TOKENS), (SPLIT_TOKENS + 6, SPLIT_TOKENS + 6)):
        device = CountingDevice()
        with File(tiny_path("llama")) as file:
            ops = Cuda(device)
            decoder = arch.load(file, ops, 64, n_seq=n_seq)
        shape = decoder.cache_shape(n_seq, 64, 64)
        ops.allocate_cache(shape)
        heads = heads_of(shape.groups[0].spec)
        room = memory.attention_bytes(heads, most)
        assert device.allocated["attention workspace"] == room


def test_a_model_that_is_too_large_is_refused_before_any_of_it_is_uploaded(tiny_path) -> None:
    device = CountingDevice(total=70 << 20)
    with File(tiny_path("llama")) as file:
        ops = Cuda(device)
        before = device.used_bytes
        with pytest.raises(MemoryError, match="of GPU memory"):
            arch.load(file, ops, 64)
    assert device.most_bytes == before


def test_numpy_refuses_a_context_before_it_reads_the_weights(tiny_path, monkeypatch) -> None:
    class Untouched(Reference):
        def weight(self, tensor, role, scale=None, activations="f16"):  # type: ignore[no-untyped-def]
            raise AssertionError(f"{tensor.name} was handed over")

    monkeypatch.setattr("ggpy.backends.host.available_memory", lambda: 1 << 20)
    with File(tiny_path("llama")) as file, pytest.raises(MemoryError, match="a context of"):
        arch.load(file, Untouched(1), 1 << 20)


def test_the_demand_is_for_all_sequences(tiny_path) -> None:
    class Asked(Exception):
        pass

    class Asking(Reference):
        def plan_memory(self, demand: Demand) -> int:
            raise Asked(demand)

    with File(tiny_path("qwen3")) as file, pytest.raises(Asked) as asked:
        arch.load(file, Asking(1), 100, n_batch=7, n_seq=5)
    demand = asked.value.args[0]
    (group,) = demand.cache(7).groups
    assert (group.n_pages, demand.n_seq) == (10, 5)
    assert (demand.n_batch, demand.least_batch) == (7, 7)


@pytest.mark.parametrize(
    ("n_ctx", "asked", "n_batch"), [(4096, None, 2048), (100, None, 100), (4096, 3000, 3000)]
)
def test_tokens_of_a_step(tiny_path, n_ctx: int, asked: int | None, n_batch: int) -> None:  # type: ignore[no-untyped-def]
    """As many as are fast, where nobody says: on a GPU more than on the CPU."""
    with File(tiny_path("llama")) as file:
        tokenizer = Tokenizer.from_gguf(file)
        for ops, most in ((Cuda(CountingDevice()), n_batch), (Reference(1), asked or 512)):
            model = Model(file, tokenizer, ops, n_ctx=n_ctx, n_batch=asked)
            assert model.engine.n_batch == model.decoder.n_batch == min(n_batch, most)
