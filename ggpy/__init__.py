"""ggpy runs GGUF models: `load` gives a `Model`; `quantize` and `dequantize` convert blocks.

>>> import ggpy
>>> with ggpy.load("models/tiny/llama.gguf", device="cpu") as model:
...     text = "".join(map(str, model.generate("hello", max_tokens=8, seed=1)))

Names are imported when they are first used, so that `import ggpy` costs nothing.
"""

from __future__ import annotations

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING

from .util.version import __version__

if _TYPE_CHECKING:
    from . import backends, formats, gguf, sampling, tokenizer
    from .formats import dequantize, quantize
    from .gguf import File, GGUFError
    from .model import Model, load
    from .runtime.engine import ContextOverflow
    from .runtime.logprobs import TokenLogprob
    from .runtime.sequence import Piece
    from .sampling import SamplingParams
    from .tokenizer import Tokenizer

_MODULE_OF = {
    "ContextOverflow": "runtime.engine",
    "File": "gguf",
    "GGUFError": "gguf",
    "Model": "model",
    "Piece": "runtime.sequence",
    "SamplingParams": "sampling",
    "TokenLogprob": "runtime.logprobs",
    "Tokenizer": "tokenizer",
    "dequantize": "formats",
    "load": "model",
    "quantize": "formats",
}
_MODULES = ("backends", "formats", "gguf", "sampling", "tokenizer")

__all__ = [
    "ContextOverflow",
    "File",
    "GGUFError",
    "Model",
    "Piece",
    "SamplingParams",
    "TokenLogprob",
    "Tokenizer",
    "__version__",
    "backends",
    "dequantize",
    "formats",
    "gguf",
    "load",
    "quantize",
    "sampling",
    "tokenizer",
]


if not _TYPE_CHECKING:  # which would take it as a promise of any name

    def __getattr__(name: str) -> object:
        if name in _MODULE_OF:
            return getattr(_import_module(f".{_MODULE_OF[name]}", __name__), name)
        if name in _MODULES:
            return _import_module(f".{name}", __name__)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    special = [name for name in globals() if name.startswith("__")]
    return sorted({*__all__, *special})
