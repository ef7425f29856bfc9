"""GGUF files: a memory-mapped reader that trusts nothing in the file, and a writer."""

from .file import MAX_METADATA, File, GGUFError, Tensor

__all__ = ["MAX_METADATA", "File", "GGUFError", "Tensor"]
