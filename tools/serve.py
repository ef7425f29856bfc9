"""`ggpy serve [MODEL]`: serve a model over HTTP, with OpenAI's endpoints and a page.

    ggpy serve smollm2
    ggpy serve -m model.gguf -np 64 -c 131072 --api-key-file keys --metrics
    curl http://127.0.0.1:8080/v1/chat/completions -d '{"messages": [{"role": "user", "content":
    "Hi"}]}'

The options are llama-server's; each may also be given as a variable LLAMA_ARG_*.
"""

from __future__ import annotations

import sys

from ggpy.cli.serve import main
from ggpy.cli.serve_options import parser

__all__ = ["main", "parser"]

if __name__ == "__main__":
    sys.exit(main())
