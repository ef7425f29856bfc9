"""The processor for which kernels are compiled: its features, and a name of it for files.

numba's variables NUMBA_CPU_NAME and NUMBA_CPU_FEATURES choose another one. This module does not
import numba, because compiled kernels are loaded without it.
"""

from __future__ import annotations

import os
from functools import cache

from llvmlite import binding


@cache
def features() -> frozenset[str]:
    """The processor's features, by LLVM's names."""
    given = os.environ.get("NUMBA_CPU_FEATURES")
    if given is not None:
        return frozenset(f[1:] for f in given.split(",") if f.startswith("+"))
    found = dict(binding.get_host_cpu_features())
    return frozenset(name for name, there in found.items() if there)


def dot_level() -> str:
    """The instruction that multiplies bytes: "vnni512", "vnni", "avx2", "neon" or "generic"."""
    has = features()
    if {"avx512vnni", "avx512bw"} <= has:
        return "vnni512"
    if "avxvnni" in has or {"avx512vnni", "avx512vl"} <= has:
        return "vnni"
    return "avx2" if "avx2" in has else "neon" if "dotprod" in has else "generic"


def tile_shape() -> tuple[int, int]:
    """Rows and vectors of columns of a GEMM's tile, which fits in the processor's registers."""
    return (12, 2) if "avx512f" in features() else (6, 1)


def name() -> str:
    """A text with all that machine code depends on: target, features, numba's variables."""
    numbas = sorted((k, v) for k, v in os.environ.items() if k.startswith("NUMBA_"))
    triple = binding.get_process_triple(), binding.get_host_cpu_name()
    return repr((triple, sorted(features()), numbas))
