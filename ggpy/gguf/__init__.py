"""GGUF files: a memory-mapped reader that trusts nothing in the file, and a writer."""

from .file import MAX_METADATA, File, GGUFError, Tensor
from .strings import PackedStrings

__all__ = ["MAX_METADATA", "File", "GGUFError", "PackedStrings", "Tensor"]
