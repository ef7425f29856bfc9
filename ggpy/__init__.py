"""ggpy runs GGUF models: `load` gives a `Model`; `quantize` and `dequantize` convert blocks.

Everything is imported when it is first used, so that `import ggpy` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .formats import dequantize, quantize
    from .gguf import GGUFError
    from .model import Model, load
    from .sampling import SamplingParams

_WHERE = {
    "GGUFError": "gguf",
    "Model": "model",
    "SamplingParams": "sampling",
    "dequantize": "formats",
    "load": "model",
    "quantize": "formats",
}

__all__ = ["GGUFError", "Model", "SamplingParams", "dequantize", "load", "quantize"]


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(import_module(f".{_WHERE[name]}", __name__), name)
    if name == "__version__":
        from .util.paths import version

        return version()
    if name in ("gguf", "tokenizer", "formats"):  # `import ggpy` is enough for `ggpy.gguf.File`
        return import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    hidden = {"annotations", "Any", "TYPE_CHECKING", "import_module"}
    return sorted({*globals(), *__all__, "__version__"} - hidden)
