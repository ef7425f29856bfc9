"""Plans of a step: the only place that compares token counts or asks for an architecture.

Every choice that depends on the number of tokens, on the GPU's architecture or on the formats of
weights is made here, once per layer and class of steps; gemm.py, attention.py and norm.py execute
the plans. `products` chooses the kernel of a product, and `layers` what is fused with it.
`ggpy bench --plan` prints both (bench/plan_table.py).
"""

from .candidates import CANDIDATES
from .experts import MoEPlan, copies_experts, sorted_tile
from .kernels import GemmKernels
from .layers import (
    AttentionPlan,
    DeltaPlan,
    DensePlan,
    OutputPlan,
    Planner,
    ResidualState,
    RopeIn,
    SumPlan,
    lacking,
)
from .problem import LaunchPlan, NormIn, ProductPlan, StepClass
from .products import Activations, GemmChoice
from .recurrence import Recurrence
from .successors import Adds, GatedInput, is_rms
from .unusual import unusual_heads

__all__ = [
    "CANDIDATES",
    "Activations",
    "Adds",
    "AttentionPlan",
    "DeltaPlan",
    "DensePlan",
    "GatedInput",
    "GemmChoice",
    "GemmKernels",
    "LaunchPlan",
    "MoEPlan",
    "NormIn",
    "OutputPlan",
    "Planner",
    "ProductPlan",
    "Recurrence",
    "ResidualState",
    "RopeIn",
    "StepClass",
    "SumPlan",
    "copies_experts",
    "is_rms",
    "lacking",
    "sorted_tile",
    "unusual_heads",
]
