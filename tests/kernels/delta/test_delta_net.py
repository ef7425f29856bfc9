"""The kernels of a gated delta net against numpy: ragged steps, states that begin and go on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from kernel_buffers import Output, upload
from packed_cases import unpacked

from ggpy.backends.numpy import delta
from ggpy.backends.numpy.functions import sigmoid, silu, softplus
from ggpy.backends.states import NO_STATE
from ggpy.device.compile import compile_cubin
from ggpy.kernels.delta import delta_net
from ggpy.kernels.delta.delta import ROW, DeltaBuffers, DeltaShape, DeltaStep, DeltaWeights
from ggpy.kernels.delta.delta_chunks import has_chunks
from ggpy.kernels.delta.delta_decode import (
    DeltaDecode,
    Instance,
    cluster_of,
    cluster_of_many,
    instance_of_many,
)
from ggpy.kernels.delta.delta_net import DeltaNet, ahead_of
from ggpy.kernels.gemm.hopper import has_clusters
from ggpy.kernels.layout.pack import CODES, PLAIN, packed_bytes

F32 = np.float32
SHAPES = [
    (DeltaShape(2, 4, 16, 4), True),
    (DeltaShape(2, 6, 16, 4), False),
    (DeltaShape(1, 2, 128, 4), True),
    (DeltaShape(2, 2, 36, 2), True),
    (DeltaShape(1, 1, 256, 3), True),
]
EPS = 1e-6


class Case:
    """Random inputs of a step of sequences of some lengths, the second of which begins."""

    def __init__(self, shape: DeltaShape, tiled: bool, lengths: list[int]) -> None:
        self.shape, self.tiled, self.lengths = shape, tiled, lengths
        rng, n = np.random.default_rng(shape.size), sum(lengths)
        values = shape.n_v_head * shape.size

        def random(*size: int, scale: float = 1.0) -> np.ndarray:
            return (scale * rng.standard_normal(size)).astype(F32)

        self.projected, self.gate = random(n, shape.channels), random(n, values)
        self.beta, self.alpha = random(n, shape.n_v_head), random(n, shape.n_v_head, scale=3)
        self.alpha[0, 0] = 30  # softplus is the identity there
        self.taps, self.a = random(shape.channels, shape.taps), -np.exp(random(shape.n_v_head))
        self.dt, self.norm = random(shape.n_v_head), 1 + random(shape.size, scale=0.2)
        self.n_pages = 2 * len(lengths) + 1
        self.conv = random(self.n_pages, shape.taps - 1, shape.channels)
        self.matrix = random(self.n_pages, shape.n_v_head, shape.size, shape.size)
        order = rng.permutation(self.n_pages)
        self.pages = order[: 2 * len(lengths)].reshape(-1, 2).astype(np.int32)
        self.pages[1:2, 0] = NO_STATE

    def expected(self) -> dict[str, np.ndarray]:
        """What numpy computes."""
        s = self.shape
        d: Any = SimpleNamespace(
            spec=SimpleNamespace(n_k_head=s.n_k_head, n_v_head=s.n_v_head, size=s.size),
            tiled=self.tiled,
        )
        beta, decay = sigmoid(self.beta), self.a * softplus(self.alpha + self.dt)
        u, o = np.empty_like(self.projected), np.empty_like(self.gate)
        conv, matrix = self.conv.copy(), self.matrix.copy()
        stop = 0
        for (old, new), n in zip(self.pages, self.lengths, strict=True):
            start, stop = stop, stop + n
            before, m = (
                (np.zeros_like(conv[0]), np.zeros_like(matrix[0]))
                if old == NO_STATE
                else (self.conv[old], self.matrix[old])
            )
            seen = np.concatenate([before, self.projected[start:stop]])
            part = slice(start, stop)
            u[part] = delta.unit_heads(silu(delta.convolved(seen, self.taps)), d)
            o[part], matrix[new] = delta.scan(u[part], beta[part], decay[part], m, d)
            conv[new] = seen[len(seen) - s.taps + 1 :]
        heads = o.reshape(-1, s.n_v_head, s.size)
        mean = np.mean(np.square(heads), axis=-1, keepdims=True)
        normed = heads / np.sqrt(mean + F32(EPS)) * self.norm
        out = normed.reshape(o.shape) * silu(self.gate)
        return {"u": u, "o": o, "out": out, "conv": conv, "matrix": matrix}

    def run(self, device: Any, kernels: Any = None, order: int = PLAIN) -> dict[str, np.ndarray]:
        """What the kernels compute, DeltaNet's or those given."""
        s, n, total = self.shape, len(self.lengths), sum(self.lengths)
        first = np.cumsum([0, *self.lengths]).astype(np.int32)
        sequences = np.repeat(np.arange(n), self.lengths).astype(np.int32)
        row = ROW * s.quads
        padded = np.zeros((self.n_pages, s.n_v_head, s.size, row), F32)
        padded[..., : s.size] = self.matrix.swapaxes(2, 3)
        states = upload(device, self.conv), upload(device, padded)
        sizes = {"u": self.projected.nbytes, "decay": 2 * self.beta.nbytes,
                 "o": self.gate.nbytes, "out": self.gate.nbytes // 2}  # fmt: skip
        outs = {name: Output(device, nbytes) for name, nbytes in sizes.items()}
        if order != PLAIN:
            outs["out"] = Output(device, packed_bytes(total, self.gate.shape[1]))
        given = {
            x: upload(device, getattr(self, x)) for x in ("projected", "gate", "beta", "alpha")
        }
        vectors = (upload(device, x) for x in (self.taps, self.a.astype(F32), self.dt, self.norm))
        (kernels or DeltaNet(device, s)).launch(
            DeltaStep(*(upload(device, x) for x in (sequences, first, self.pages)), total, n),
            states,
            DeltaWeights(*vectors, EPS, self.tiled),
            DeltaBuffers(**given, **{name: out.buffer for name, out in outs.items()}, order=order),
        )
        matrix = device.download(states[1], F32, padded.shape)
        assert not matrix[..., s.size :].any()
        return {
            "u": outs["u"].read(F32, self.projected.shape),
            "o": outs["o"].read(F32, self.gate.shape),
            "out": self.read(outs["out"], order).astype(F32),
            "conv": device.download(states[0], F32, self.conv.shape),
            "matrix": matrix[..., : s.size].swapaxes(2, 3),
        }

    def read(self, out: Output, order: int) -> np.ndarray:
        """f16 [T, Hv*S]."""
        n, columns = self.gate.shape
        if order == PLAIN:
            return out.read(np.float16, self.gate.shape)
        packed = out.read(np.float16, (packed_bytes(n, columns) // 2,))
        return unpacked(packed, n, columns, order)[:n]


@pytest.mark.parametrize("lengths", [[1], [1, 1, 1], [5, 3, 1, 19]], ids=str)
@pytest.mark.parametrize(("shape", "tiled"), SHAPES, ids=str)
def test_a_step(machine, shape, tiled, lengths):
    case = Case(shape, tiled, lengths)
    found, expected = case.run(machine), case.expected()
    for name, array in expected.items():
        rounded = 2e-3 if name == "out" else 2e-5
        scale = np.abs(array).max()
        np.testing.assert_allclose(found[name] / scale, array / scale, atol=rounded, err_msg=name)


@pytest.mark.parametrize("lengths", [[64], [200, 3, 64, 100], [1] * 33 + [70]], ids=str)
def test_chunks(machine, lengths):
    """Sequences of chunks alone, with tokens after the last chunk, and of fewer tokens."""
    if not has_chunks(SHAPES[2][0], machine.arch):
        pytest.skip(f"{machine.arch} multiplies no bf16")
    for shape, tiled in ((SHAPES[2]), (DeltaShape(2, 4, 128, 4), False)):
        case = Case(shape, tiled, lengths)
        found, expected = case.run(machine, DeltaNet(machine, shape, True)), case.expected()
        for name, array in expected.items():
            rounded = 2e-3 if name == "out" else 5e-5
            scale = np.abs(array).max()
            close = {"atol": rounded, "rtol": 0, "err_msg": name}
            np.testing.assert_allclose(found[name] / scale, array / scale, **close)


@pytest.mark.parametrize("n", [3, 9])
@pytest.mark.parametrize("clusters", [False, True], ids=["one CTA", "a cluster"])
@pytest.mark.parametrize(("shape", "tiled"), SHAPES, ids=str)
def test_a_step_of_one_token_each_has_the_same_bits(machine, shape, tiled, clusters, n):
    """Nine tokens are many, of which CTAs take five or four, and the last two pad the step."""
    cluster = shape.quads if clusters else cluster_of(shape, "sm_80")
    if not cluster:
        with pytest.raises(ValueError, match="heads of 256 on"):
            DeltaDecode(machine, shape, cluster)
        return
    is_emulated = hasattr(machine, "sanitize")
    if clusters and not (is_emulated or has_clusters(machine.arch)):
        pytest.skip(f"{machine.arch} has no clusters")
    decode = DeltaDecode(machine, shape, cluster)
    case, order = Case(shape, tiled, [1] * n), CODES if shape.packs else PLAIN
    pages = np.arange(case.n_pages)
    if n == 9 and not decode.most_at_once:
        pytest.skip(f"{machine.arch} has no kernel for many tokens")
    decode.most_at_once = 2
    if n == 9:
        case.pages[-2:] = NO_STATE, case.pages[-1, 1]
        pages = np.delete(pages, case.pages[-1, 1])
    assert decode.tokens_at_once(n) == {3: 3, 9: 2}[n]
    found, expected = case.run(machine, decode, order), case.run(machine)
    np.testing.assert_array_equal(found["out"], expected["out"])
    for name in ("conv", "matrix"):
        np.testing.assert_array_equal(found[name][pages], expected[name][pages], err_msg=name)


def test_what_cannot_be_packed_is_refused(machine):
    case = Case(*SHAPES[3], [1])
    with pytest.raises(ValueError, match="2 heads of 36 elements cannot be packed"):
        case.run(machine, order=CODES)


def test_decode_takes_one_token_a_sequence(machine):
    case = Case(*SHAPES[0], [2])
    with pytest.raises(ValueError, match="2 tokens of 1 sequences"):
        case.run(machine, DeltaDecode(machine, case.shape))


def test_pages_that_are_not_written_stay(machine):
    case = Case(*SHAPES[0], [2, 2])
    found = case.run(machine)
    rest = np.setdiff1d(np.arange(case.n_pages), case.pages[:, 1])
    for name in ("conv", "matrix"):
        assert np.array_equal(found[name][rest], getattr(case, name)[rest])


def test_a_token_is_computed_alike_alone_and_among_others(machine):
    """Alone it is so long a sequence that the loads of several tokens are in flight."""
    case = Case(*SHAPES[2], [9, 3])
    together = case.run(machine)
    case.lengths, case.pages = [9], case.pages[:1]
    for name in ("projected", "gate", "beta", "alpha"):
        setattr(case, name, getattr(case, name)[:9])
    alone = case.run(machine)
    assert all(np.array_equal(together[name][:9], alone[name]) for name in ("u", "o", "out"))


@pytest.mark.parametrize("size", [6, 260])
def test_what_no_kernel_computes_is_refused(size):
    with pytest.raises(ValueError, match=rf"states of {size} rows \(multiples of 4 up to 256"):
        DeltaNet(None, DeltaShape(1, 1, size, 4))  # type: ignore[arg-type]


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90a", "sm_120"])
def test_they_compile(nvrtc, arch):
    quads = (1, 4, 8)
    shapes = [DeltaShape(1, 1, ROW * n, 4) for n in quads]
    names = [f"delta_scan<{s.quads}, {n}>" for s in shapes for n in ahead_of(s)]
    names += ["delta_conv<1, 4>", "delta_conv<4, 4>"]
    clusters = {s: cluster_of(s, arch) for s in shapes if cluster_of(s, arch)}
    shared = {"sm_80": 163 << 10, "sm_90a": 227 << 10}.get(arch, 99 << 10)
    many = [instance_of_many(s, arch, shared, cluster_of_many(s, arch)) for s in clusters]
    assert all(many) == (arch != "sm_75")
    decode = [i.name for i in (*(Instance(s, c) for s, c in clusters.items()), *many) if i]
    sources = {"delta/delta_net.cu": [*names, "delta_norm<4>"], "delta/delta_decode.cu": decode}
    sources["delta/delta_chunks.cu"] = []
    for source, expressions in sources.items():
        options = {"expressions": expressions, "extra_source": delta_net.ASSERTS}
        found = compile_cubin(source, arch, **options).resources
        assert len(found) == (len(expressions) or 2)
        for name, r in found.items():
            # a few bytes make room for another CTA, or for all threads of a CTA, or are the last
            # of 255 registers
            is_decode, is_of_few = name.startswith("delta_decode"), name.endswith(" 0>")
            most = 24 if is_decode and not is_of_few else 0 if is_decode else 16
            assert max(r.spill_loads, r.spill_stores) <= most, f"{name} spills: {r}"
