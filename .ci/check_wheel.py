"""Checks an installed wheel: the package and its folders are its own, and a kernel compiles.

Run by .ci/run with the interpreter of the environment into which the wheel is installed.
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

import ggpy
from ggpy.device.compile import compile_cubin
from ggpy.util.paths import data_dir

installed = Path(sysconfig.get_path("purelib")).resolve()
package = Path(ggpy.__file__).resolve().parent
if package.parent != installed:
    sys.exit(f"ggpy comes from {package}, not from {installed}")
for name, file in (("cuda", "lib/common.cuh"), ("models", "README.md"), ("tools", "show.py")):
    if data_dir(name) != package / name or not (package / name / file).is_file():
        sys.exit(f"{name}/{file} is not in the wheel")
cubin = compile_cubin("sampling/argmax.cu", "sm_80")
print(f"ggpy {ggpy.__version__} in {package}: argmax compiles to {len(cubin.code)} bytes")
