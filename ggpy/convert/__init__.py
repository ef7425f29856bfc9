"""Hugging Face checkpoints to GGUF: folder -> model -> plan -> file.

`checkpoint` finds tensors and what makes each, `model` knows what they say, `write` what becomes of
them. Architectures declare their names and settings in their own files (`arch.hugging_face`);
nothing of a folder is executed, and no file outside it is opened.
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
