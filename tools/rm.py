"""`ggpy rm NAME ...`: remove models from the cache.

NAME is a known model, or a repository in the Hugging Face hub's cache that has .gguf files. A file
that is named by its path is never removed.
"""

from __future__ import annotations

import sys

from ggpy import hub
from ggpy.cli.parser import Parser
from ggpy.util.outcome import ended


def main(argv: list[str] | None = None) -> int:
    """Run the program; its exit status: 0, or 2 for what is not in the cache."""
    options = parser().parse_args(argv)
    return ended(lambda: remove(options.names), program="ggpy rm")


def parser() -> Parser:
    found = Parser("rm", "Remove models from the cache.")
    found.add_argument("names", metavar="NAME", nargs="+", help="as `ggpy list` shows it")
    return found


def remove(names: list[str]) -> int:
    """Remove each in turn; HubError, OSError."""
    from ggpy.hub import hugging_face, registry

    for name in names:
        if model := hub.known(name):
            freed = registry.remove(model)
        elif hub.is_repository(name):
            freed = hugging_face.remove(name)
        else:
            raise hub.HubError(f"{name} is not the name of a model: `ggpy list` shows the names")
        print(f"removed {name}: {freed / 1e6:.0f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
