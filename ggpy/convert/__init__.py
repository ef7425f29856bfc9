"""Hugging Face checkpoints to GGUF: folder -> model -> plan -> file.

`model` knows what a checkpoint says, `write` what becomes of it. Architectures declare their names
and settings in their own files (`arch.hugging_face`); nothing of a folder is executed, and no file
outside it is opened.
"""

from .checkpoint import Checkpoint
from .folder import ConvertError, Folder
from .model import Model, read_config, read_model
from .write import Plan, mix_of, plan, write

__all__ = [
    "Checkpoint",
    "ConvertError",
    "Folder",
    "Model",
    "Plan",
    "mix_of",
    "plan",
    "read_config",
    "read_model",
    "write",
]
