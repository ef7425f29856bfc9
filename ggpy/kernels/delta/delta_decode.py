"""Launches cuda/delta/delta_decode.cu: a gated delta net of one token a sequence, in one kernel."""

from __future__ import annotations

from dataclasses import dataclass

from ...device.base import Device, capability
from ..address import Address
from ..gemm.hopper import has_clusters
from ..struct_asserts import struct_asserts
from .delta import (
    LANES,
    ROW,
    DeltaArgs,
    DeltaBuffers,
    DeltaShape,
    DeltaStep,
    DeltaWeights,
    args_of,
)

MOST_THREADS = 1024
RESERVED = 1024  # bytes of shared memory of a resident CTA beside those it asks for
MANY = 2  # CTAs of one token for each resident CTA, above which CTAs stay for several tokens
MANY_THREADS = 512  # at most, of a CTA that stays
MOST_STAGES = 3  # tokens of a CTA on their way into shared memory
ASSERTS = struct_asserts(DeltaArgs)


def cluster_of(shape: DeltaShape, arch: str) -> int:
    """CTAs that take a value head: with clusters, one for each 32 columns; 0: no kernel fits."""
    if has_clusters(arch) and shape.quads in (1, 2, 4, 8):
        return shape.quads
    return int(shape.quads * ROW * LANES <= MOST_THREADS)


def threads_at_once(shape: DeltaShape) -> int:
    """Threads of an SM, in CTAs that stay: DecodeTraits::THREADS_AT_ONCE."""
    return 512 if shape.quads > 4 else 1024


def cluster_of_many(shape: DeltaShape, arch: str) -> int:
    """CTAs that take a value head where they stay: few, which meet at each token."""
    most = min(MANY_THREADS, threads_at_once(shape))
    return min(cluster_of(shape, arch), max(1, shape.quads * ROW * LANES // most))


@dataclass(frozen=True)
class Instance:
    """An instance of the kernel: stages = 0 for few tokens, one of each CTA."""

    shape: DeltaShape
    cluster: int  # CTAs of a value head
    stages: int = 0

    @property
    def name(self) -> str:
        """The template instance."""
        return f"delta_decode<{self.shape.quads}, {self.cluster}, {self.shape.taps}, {self.stages}>"

    @property
    def threads(self) -> int:
        """Of a CTA."""
        return self.shape.quads * ROW // self.cluster * LANES

    @property
    def ctas_per_sm(self) -> int:
        """Resident CTAs with stages: DecodeTraits::CTAS."""
        return max(1, threads_at_once(self.shape) // self.threads)

    @property
    def shared(self) -> int:
        """Bytes of shared memory of a CTA: DecodeStorage and ColumnPipeline."""
        quads, columns = self.shape.quads, self.threads // LANES
        channels = 2 * ROW * quads + columns
        floats = (1 + self.shape.taps) * channels + 2 * columns + 2 * quads + 2 + 4 * quads
        return 4 * floats + self.stages * self.stage

    @property
    def stage(self) -> int:
        """Bytes of a token's columns."""
        return 16 * self.shape.quads * self.threads


def instance_of_many(
    shape: DeltaShape, arch: str, shared_bytes: int, cluster: int
) -> Instance | None:
    """The instance for many tokens, with as many stages as fit beside those of other CTAs; None
    without asynchronous copies, or if none fits.
    """
    bare = Instance(shape, cluster)
    room = (shared_bytes + RESERVED) // bare.ctas_per_sm - RESERVED - bare.shared
    stages = min(MOST_STAGES, room // bare.stage)
    return Instance(shape, cluster, stages) if capability(arch) >= 80 and stages > 0 else None


class DeltaDecode:
    """The kernels of one shape, for few and for many tokens."""

    def __init__(self, device: Device, shape: DeltaShape, cluster: int | None = None) -> None:
        """cluster: CTAs of a value head; None: as cluster_of and cluster_of_many say. ValueError
        for what the kernel does not compute.
        """
        self.shape = shape
        of_few = cluster_of(shape, device.arch) if cluster is None else cluster
        if shape.problem or not of_few:
            raise ValueError(shape.problem or f"heads of {shape.size} on {device.arch}")
        of_many = cluster_of_many(shape, device.arch) if cluster is None else cluster
        self._few = Instance(shape, of_few)
        many = instance_of_many(shape, device.arch, device.shared_bytes, of_many)
        self._many = many or self._few
        self.most_at_once = 0  # tokens of the instance for many; 0: there is none
        if many:
            resident = many.ctas_per_sm * device.sm_count
            self.most_at_once = max(1, resident // (many.cluster * shape.n_v_head))
        names = list(dict.fromkeys((self._few.name, self._many.name)))
        kernels = device.kernels("delta/delta_decode.cu", names, extra_source=ASSERTS)
        self._kernels = dict(zip(names, kernels, strict=True))

    def tokens_at_once(self, n_tokens: int) -> int:
        """Tokens that CTAs take at the same time; all of them if they are few."""
        if not self.most_at_once or n_tokens <= MANY * self.most_at_once:
            return n_tokens
        rounds = -(-n_tokens // self.most_at_once)
        return -(-n_tokens // rounds)

    def launch(
        self,
        step: DeltaStep,
        state: tuple[Address, Address],
        weights: DeltaWeights,
        buffers: DeltaBuffers,
    ) -> None:
        """Enqueue out, with the bits of DeltaNet; u, decay and o are not used. Each token of the
        step is the only one of its sequence.
        """
        n = step.n_tokens
        if n != step.n_sequences:
            raise ValueError(f"{n} tokens of {step.n_sequences} sequences")
        args = (args_of(self.shape, step, state, weights, buffers),)
        at_once = self.tokens_at_once(n)
        run = self._few if at_once == n else self._many
        grid = run.cluster * self.shape.n_v_head, at_once
        self._kernels[run.name].launch(
            grid, run.threads, args, smem=run.shared, pdl=True, cluster=run.cluster
        )
