"""Writes tests/golden/plans: the kernels that models take on each architecture.

    python tests/golden/make_plans.py

A change of these files is a change of what runs; the commit says why.
"""

from __future__ import annotations

import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
sys.path[:0] = [str(FOLDER.parent.parent)]

from ggpy.bench.plan_table import lines, steps_of, table  # noqa: E402
from ggpy.bench.planned import device_of  # noqa: E402
from ggpy.evaluate.synthetic import Synthetic  # noqa: E402

PLANS = FOLDER / "plans"
ARCHITECTURES = ("sm_75", "sm_80", "sm_89", "sm_90a", "sm_120")
MODELS = (
    *("Llama-3.1-8B:Q8_0", "Llama-3.1-8B:Q4_K_M", "Gemma-3-4B:Q4_K_M", "Llama-3.2-1B:F32"),
    *("Qwen3-30B-A3B:Q4_K_M", "gpt-oss-20b:MXFP4_MOE", "Qwen3.5-9B:Q4_K_M", "Gemma-4-E2B:Q4_K_M"),
)
STEPS = steps_of((1, 2, 4, 8, 16, 64), (16, 512))


def plans(architecture: str) -> str:
    """The tables of all models, as the file holds them."""
    parts = []
    for model in MODELS:
        with Synthetic(model, empty=True) as file:
            found = lines(table(file, device_of(architecture), STEPS))
        parts.append("\n".join([f"# {model}", "", *found, ""]))
    return "\n".join(parts)


def main() -> None:
    """Write a file for each architecture."""
    PLANS.mkdir(exist_ok=True)
    for architecture in ARCHITECTURES:
        (PLANS / f"{architecture}.md").write_text(plans(architecture), encoding="utf-8")


if __name__ == "__main__":
    main()
