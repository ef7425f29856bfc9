"""`ggpy list`: list the known models, and those in the cache.

The Hugging Face hub's cache is looked at only where huggingface_hub is installed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from ggpy import hub
from ggpy.cli.parser import Parser
from ggpy.util.messages import escaped
from ggpy.util.outcome import ended

Row = tuple[str, str, str]


def main(argv: list[str] | None = None) -> int:
    """Run the program; its exit status."""
    parser().parse_args(argv)
    return ended(show, program="ggpy list")


def parser() -> Parser:
    return Parser("list", "List the known models, and those in the cache.")


def show() -> int:
    """Print the table."""
    for line in table([("name", "size", "file"), *known(), *from_hub()]):
        print(line)
    return 0


def known() -> Iterator[Row]:
    """A row for each known model, fetched or not."""
    from ggpy.hub import registry

    for model in hub.KNOWN:
        path = registry.stored(model)
        missing = f"not fetched (licence: {model.licence})"
        yield model.name, size(model.nbytes), str(path or missing)


def from_hub() -> Iterator[Row]:
    """A row for each .gguf file in the hub's cache."""
    from ggpy.hub import hugging_face

    for file in hugging_face.cached():
        yield file.repo, size(file.nbytes), escaped(file.path, 500)


def size(nbytes: int) -> str:
    return f"{nbytes / 1e6:.0f} MB"


def table(rows: Sequence[Row]) -> Iterator[str]:
    """Lines whose columns are as wide as they need to be; sizes are aligned right."""
    name, number = (max(len(row[i]) for row in rows) for i in range(2))
    for row in rows:
        yield f"{row[0]:{name}}  {row[1]:>{number}}  {row[2]}"


if __name__ == "__main__":
    sys.exit(main())
