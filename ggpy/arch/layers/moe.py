"""The mixture of experts: a router, experts in tensors of three axes, and often a shared expert."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from ...backends.experts import Experts, GatedActivation, Router, Score, SharedExpert
from ...backends.interface import MoE
from .. import expert_sizes
from ..config import Config, Dimensions, UnsupportedModel
from .dense import DenseSettings
from .weights import LayerWeights

# Sized by Dimensions.letters.
TENSORS = {
    "ffn_norm.weight": "D",
    "ffn_gate_inp.weight": "X D",
    "ffn_gate_exps.weight": "X Fx D",
    "ffn_up_exps.weight": "X Fx D",
    "ffn_down_exps.weight": "X D Fx",
}
TOGETHER = "ffn_gate_up_exps.weight"  # gate and up of all experts in one tensor, in some files
ROUTER_BIAS = {"ffn_gate_inp.bias": "X"}
CHOICE_BIAS = {"exp_probs_b.bias": "X"}
EXPERT_BIAS = {
    "ffn_gate_exps.bias": "X Fx",
    "ffn_up_exps.bias": "X Fx",
    "ffn_down_exps.bias": "X D",
}
SHARED = {
    "ffn_gate_shexp.weight": "Fs D",
    "ffn_up_shexp.weight": "Fs D",
    "ffn_down_shexp.weight": "D Fs",
}
SHARED_GATE = {"ffn_gate_inp_shexp.weight": "D"}

# For experts beside a dense feed-forward: norms and scales. NAMES_BESIDE maps names in files to the
# names that are used here.
ROUTER_NORM, EXPERT_SCALE = "router_norm.weight", "ffn_exps_scale.weight"
BESIDE = {
    "pre_ffw_norm_2.weight": "D",
    "post_ffw_norm_1.weight": "D",
    "post_ffw_norm_2.weight": "D",
    ROUTER_NORM: "D",
    EXPERT_SCALE: "X",
}
NAMES_BESIDE = {"ffn_gate_inp.scale": (ROUTER_NORM,), "ffn_down_exps.scale": (EXPERT_SCALE,)}

# Settings of models with experts: those of config.VARIANTS, the number and the width of shared
# experts, and which layers have no experts.
UNDERSTOOD = frozenset(f"expert_{x}count" for x in ("", "used_", "group_", "group_used_"))
SHARED_COUNT, SHARED_WIDTH = expert_sizes.SHARED_COUNT, expert_sizes.SHARED_WIDTH
N_DENSE, PERIOD = "leading_dense_block_count", "interleave_moe_layer_step"
SCORE, NORM, SCALE = "expert_gating_func", "expert_weights_norm", "expert_weights_scale"
GATING: dict[int, Score] = {1: "softmax", 2: "sigmoid", 3: "softmax_chosen"}  # SCORE
SETTINGS = frozenset({SCORE, NORM, SCALE})
BY_FILE = (0, 1, 2)  # values of SCORE if files may choose; 0 is the architecture's score


@dataclass(frozen=True)
class RouterSettings:
    """The settings of a router; see backends.experts.Router."""

    n_used: int
    score: Score = "softmax"
    normalise: bool = False
    scale: float = 1.0
    groups: tuple[int, int] = (1, 1)
    weighs_input: bool = False


@dataclass(frozen=True)
class MoESettings:
    """The settings of one layer's experts."""

    router: RouterSettings
    activation: GatedActivation = "silu"
    beside: DenseSettings | None = None  # a dense feed-forward beside them, with its own norm
    norm_scale: float = 1.0  # of a router with a norm of its own: see backends.experts.Router

    def build(self, w: LayerWeights) -> MoE:
        """The feed-forward."""
        router = self._router(w)
        if self.beside is None:
            return MoE(w.norm("ffn_norm"), router, self._experts(w), _shared(w))
        return MoE(
            norm=w.norm("pre_ffw_norm_2"),
            router=replace(
                router,
                expert_scale=w[EXPERT_SCALE],
                norm=w.norm(ROUTER_NORM.removesuffix(".weight")),
                norm_scale=self.norm_scale,
            ),
            experts=self._experts(w),
            dense=replace(self.beside.build(w), post_norm=w.norm("post_ffw_norm_1")),
            expert_norm=w.norm("post_ffw_norm_2"),
            post_norm=w.norm("post_ffw_norm"),
        )

    def _router(self, w: LayerWeights) -> Router:
        r = self.router
        return Router(
            weight=w["ffn_gate_inp.weight"],
            n_used=r.n_used,
            score=r.score,
            bias=w.get("ffn_gate_inp.bias"),
            choice_bias=w.get("exp_probs_b.bias"),
            normalise=r.normalise,
            scale=r.scale,
            groups=r.groups,
            weighs_input=r.weighs_input,
        )

    def _experts(self, w: LayerWeights) -> Experts:
        return Experts(
            w_gate=w["ffn_gate_exps.weight"],
            w_up=w["ffn_up_exps.weight"],
            w_down=w["ffn_down_exps.weight"],
            activation=self.activation,
            b_gate=w.get("ffn_gate_exps.bias"),
            b_up=w.get("ffn_up_exps.bias"),
            b_down=w.get("ffn_down_exps.bias"),
        )


def _shared(w: LayerWeights) -> SharedExpert | None:
    if w.get("ffn_up_shexp.weight") is None:
        return None
    return SharedExpert(
        w_gate=w["ffn_gate_shexp.weight"],
        w_up=w["ffn_up_shexp.weight"],
        w_down=w["ffn_down_shexp.weight"],
        gate=w.get("ffn_gate_inp_shexp.weight"),
    )


def feed_forwards(sizes: Dimensions, experts: MoESettings) -> list[DenseSettings | MoESettings]:
    """The feed-forward of each layer: the experts, or a dense one with SiLU if it has none."""
    return [experts if layer.n_expert else DenseSettings("silu") for layer in sizes.layers]


def read_router(
    config: Config,
    sizes: Dimensions,
    score: Score = "softmax",
    normalise: bool = False,
    says: Collection[str] = (),
) -> RouterSettings:
    """The router of a file; GGUFError for impossible counts, UnsupportedModel for another score or
    norm than those of its architecture.

    says: which of SCORE, NORM and SCALE the file may set.
    """
    n_expert = max(layer.n_expert for layer in sizes.layers)
    if n_expert == 0:
        raise UnsupportedModel(f"{config.path}: {config.architecture} without experts")
    number = next(number for number, name in GATING.items() if name == score)
    config.only(SCORE, *(BY_FILE if SCORE in says else (number,)))
    config.only(NORM, *((False, True) if NORM in says else (normalise,)))
    config.only("norm_top_k_prob", normalise)  # in files of Ollama's converter
    if SCALE not in says:
        config.only(SCALE, 0, 1)
    score = GATING[config.integer(SCORE, number, low=0) or number]
    normalise = bool(config.raw(NORM)) if config.has(NORM) else normalise
    scale = config.real(SCALE, 1.0) or 1.0  # 0 stands for none
    groups = _groups(config, n_expert)
    there = n_expert // groups[0] * groups[1]  # experts in the groups that may be chosen from
    n_used = config.integer("expert_used_count", high=there)
    return RouterSettings(n_used, score, normalise, scale, groups)


def _groups(config: Config, n_expert: int) -> tuple[int, int]:
    """(groups, groups that are chosen from); one group if the file does not say."""
    n = config.integer("expert_group_count", 1, low=0, high=n_expert) or 1
    used = config.integer("expert_group_used_count", n, low=0, high=n) or n
    if n > 1 and (n_expert % n or n_expert // n < 2):
        raise UnsupportedModel(
            f"{config.path}: {config.architecture}.expert_group_count = {n}: {n_expert} experts"
            f" cannot be {n} groups of two experts or more"
        )
    return n, used
