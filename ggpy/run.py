"""`ggpy run`: answer a prompt, or chat, with a GGUF model.

`python -m ggpy.run` is the same; the program is ggpy/cli/run.py.
"""

from __future__ import annotations

import sys

from .cli.run import main, program

__all__ = ["main", "program"]

if __name__ == "__main__":
    sys.exit(program())
