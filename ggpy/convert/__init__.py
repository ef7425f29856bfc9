"""Hugging Face checkpoints to GGUF: folder -> model -> plan -> file.

`checkpoint` finds the tensors, with their scales where they are quantised; `model` maps them to the
tensors and metadata of a GGUF file; `write` chooses formats and writes the file. Architectures
declare names and settings in their own files (`arch.hugging_face`). No code of a checkpoint's
folder is executed, and no file outside the folder is opened.
"""

from .checkpoint import Checkpoint
from .folder import ConvertError, Folder
from .model import ModelConversion, read_config, read_model
from .write import ConversionPlan, mix_of, plan, write

__all__ = [
    "Checkpoint",
    "ConversionPlan",
    "ConvertError",
    "Folder",
    "ModelConversion",
    "mix_of",
    "plan",
    "read_config",
    "read_model",
    "write",
]
