"""Files whose experts are as those of files in NVFP4: beside their matrices stand scales."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ggpy.formats import by_name
from ggpy.gguf import File
from ggpy.gguf.writer import Slot, Writer

SCALES = 0.7, 1.4  # the least and the largest
SCALED = ("_exps.weight", "_shexp.weight", "ffn_gate_inp.weight")


def write_scaled(source: Path, out: Path) -> Path:
    """The file with gate and up of experts in NVFP4, a scale for each expert, and one for the
    router and for each matrix of a shared expert.
    """
    rng, f32, nvfp4 = np.random.default_rng(0), by_name("F32"), by_name("NVFP4")
    assert nvfp4.quantize is not None
    with File(source) as file:
        typed = {key: (file.types[key], value) for key, value in file.metadata.items()}
        found = {}
        for name, x in file.tensors.items():
            found[name] = x.shape, x.format, x.data
            if name.endswith(("ffn_gate_exps.weight", "ffn_up_exps.weight")):
                rows = nvfp4.quantize(x.dequantize().reshape(-1, x.shape[-1]))
                found[name] = x.shape, nvfp4, rows
            if name.endswith(SCALED) and len(x.shape) > 1:
                n = x.shape[0] if len(x.shape) == 3 else 1
                values = rng.uniform(*SCALES, n).astype(np.float32)
                found[name.removesuffix("weight") + "scale"] = (n,), f32, values.view(np.uint8)
        slots = [Slot(name, shape, format) for name, (shape, format, _) in found.items()]
        with Writer(out, typed, slots) as writer:
            for _, _, data in found.values():
                writer.write(data)
    return out
