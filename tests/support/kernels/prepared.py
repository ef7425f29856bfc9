"""An emulator that compiles the kernels of several tests together, as a compiler takes long to
start.

Knows which instances the tests of tiled kernels ask for; one that is not listed is compiled alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from cache_cases import halving_names, kernel_names
from emulator import build
from tile_cases import (
    IN_BLOCKS,
    PRODUCT,
    TILED,
    layouts,
    product_names,
    product_variants,
    products_for_many,
)

from ggpy.formats import by_name
from ggpy.kernels.attention import paged_attention
from ggpy.kernels.blocks.block_kernel import compile_options, expression
from ggpy.kernels.gemm import gemm_decode, gemm_prefill

# Source, names, and options; those that are left out are as the first request has them.
Group = tuple[str, list[str], dict[str, Any]]


def groups() -> list[Group]:
    """What is compiled together."""
    names = product_names()
    parts = [(names[::2], {}), (names[1::2], {}), *product_variants()]
    decode, prefill = gemm_decode.ASSERTS, gemm_prefill.ASSERTS
    products = [
        ("gemm/gemm_decode.cu", n, {"defines": {**PRODUCT, **d}, "extra_source": decode})
        for n, d in parts
    ]
    matrices = layouts().values()
    repacks = [expression("repack", w.format, w.layout.type_name) for w in matrices]
    repacks += [expression("repack", by_name("BF16"), "Tile<16, 32, Scales::D, 64>")]
    attends = [
        f"paged_attention<{row}, {f}>" for f in ("true", "false") for row in (32, 64, 96, 128, 256)
    ]
    typed = kernel_names()
    embeds = [f"embed_tile<{w.layout.type_name}>" for w in matrices]
    whole = [f"dequantize_tile<{w.layout.type_name}>" for w in matrices]
    return [
        *products,
        *[
            ("gemm/gemm_prefill.cu", names, {"defines": {"X_STAGES": 3}, "extra_source": prefill})
            for names in products_for_many()
        ],
        ("layout/repack.cu", repacks, compile_options(*map(by_name, TILED))),
        ("layout/embed_tile.cu", embeds, {}),
        ("layout/dequantize_tile.cu", whole, {}),
        *halves(),
        ("attention/pages_to_f16.cu", halving_names(), {}),
        *[
            ("attention/paged_attention.cu", names[i::2], {"extra_source": paged_attention.ASSERTS})
            for names in (attends, typed)
            for i in range(2)
        ],
    ]


def halves() -> list[Group]:
    """Formats that become halves for a product, in two parts: those with grids are slow to
    compile.
    """
    formats = [*IN_BLOCKS, by_name("BF16"), by_name("Q4_0")]
    made = []
    for part in (formats[::2], formats[1::2]):
        names = [expression("blocks_to_f16", f, tiled) for f in part for tiled in ("true", "false")]
        made.append(("layout/blocks_to_f16.cu", names, compile_options(*part)))
    return made


class Prepared:
    """A device like the one it wraps."""

    def __init__(self, device: Any) -> None:
        self.unprepared = device
        self._groups = groups()
        self._kernels: dict[tuple, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.unprepared, name)

    def kernel(self, source: str, name: str, **options: Any) -> Any:
        """See ggpy.device.base.Device."""
        return self.kernels(source, [name], **options)[0]

    def kernels(self, source: str, names: Sequence[str], **options: Any) -> list[Any]:
        """See ggpy.device.base.Device."""
        self._prepare(source, options)
        keys = [_key(source, name, options) for name in names]
        if all(key in self._kernels for key in keys):
            return [self._kernels[key] for key in keys]
        return self.unprepared.kernels(source, names, **options)

    def _prepare(self, source: str, asked: dict[str, Any]) -> None:
        """Compile the source's groups at the same time, then load them."""
        extra = asked.get("extra_source", "")
        found = [g for g in self._groups if g[0] == source and _extra_source(g[2]) == extra]
        wanted = [(s, names, asked | options) for s, names, options in found]
        if wanted:
            self._groups = [group for group in self._groups if group not in found]
            with ThreadPoolExecutor(2) as pool:
                list(pool.map(self._build, wanted))
        for _, names, options in wanted:
            kernels = self.unprepared.kernels(source, names, **options)
            keys = [_key(source, name, options) for name in names]
            self._kernels.update(zip(keys, kernels, strict=True))

    def _build(self, group: Group) -> None:
        source, names, options = group
        device, headers = self.unprepared, options.get("headers")
        defines, extra = options.get("defines", {}), _extra_source(options)
        build.kernel_library(device.cuda, source, names, defines, extra, device.sanitize, headers)


def _extra_source(options: dict[str, Any]) -> str:
    return options.get("extra_source", "")


def _key(source: str, name: str, options: dict[str, Any]) -> tuple:
    """Headers are left out: a kernel finds its format's among those of all."""
    defines = options.get("defines", {})
    return source, name, _extra_source(options), *sorted(defines.items())
