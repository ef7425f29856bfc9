"""The decoder: one transformer, written once in ops, for every architecture.

An `Architecture` says which tensors a file must have and how its settings become a `Plan`;
`Decoder` hands the weights to a backend once and then runs ragged steps. What differs between
architectures is data here: a tensor that is declared (a bias, a norm after the attention) is used,
one that is not is refused. Nothing here knows which machine runs, what a token means, or how
sequences are scheduled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import zip_longest

from ..backends.interface import (
    Activation,
    Array,
    Attention,
    CacheShape,
    Demand,
    FeedForward,
    Head,
    Norm,
    Ops,
    Rope,
    Step,
    Weight,
    pages_for,
)
from ..cache_types import USUAL, CacheTypes
from ..gguf import File, GGUFError, Tensor
from .collect import check_vocabulary, collect
from .config import Config, Dimensions, read_dimensions, refuse_variants
from .hugging_face import HuggingFace
from .scheme import SCALE, Given, Scheme, read_scheme, scale_of

Progress = Callable[[int, int], None]  # bytes of weights handed over, of all
MOST_BATCH, LEAST_BATCH = 2048, 512  # tokens of a step: on a GPU prompts gain 14 % by the former
READERS = 8  # threads that check scales: one alone reads a mapped file slower than a bus is

# What every architecture has, sized by Dimensions.letters; LAYER stands below "blk.0." and so on.
GLOBAL = {"token_embd.weight": "V D", "output_norm.weight": "D"}
LAYER = {
    "attn_norm.weight": "D",
    "attn_q.weight": "HE D",
    "attn_k.weight": "GE D",
    "attn_v.weight": "GE D",
    "attn_output.weight": "D HE",
    "ffn_norm.weight": "D",
    "ffn_gate.weight": "F D",
    "ffn_up.weight": "F D",
    "ffn_down.weight": "D F",
}
OUTPUT = {"output.weight": "V D"}  # optional: without it the embedding table is used
QKV_BIAS = {"attn_q.bias": "HE", "attn_k.bias": "GE", "attn_v.bias": "GE"}
QK_NORM = {"attn_q_norm.weight": "E", "attn_k_norm.weight": "E"}
POST_NORM = {"post_attention_norm.weight": "D", "post_ffw_norm.weight": "D"}
ROPE_FREQS = {"rope_freqs.weight": "R/2"}
ROPE_FACTORS = {"rope_factors_long.weight": "R/2", "rope_factors_short.weight": "R/2"}


@dataclass(frozen=True)
class Plan:
    """What an architecture makes of a file's settings; one rope and one window per layer."""

    ropes: list[Rope]
    windows: list[int]
    scale: float  # of q.k
    activation: Activation
    embedding_scale: float = 1.0
    soft_cap: float = 0.0  # of attention scores
    final_soft_cap: float = 0.0  # of logits


@dataclass(frozen=True)
class Context:
    """What an architecture may look at to make its plan."""

    config: Config
    sizes: Dimensions
    tensors: Mapping[str, Tensor]
    n_ctx: int


@dataclass(frozen=True)
class Architecture:
    """One `general.architecture`: its tensors and its reading of the settings.

    `fused` maps a layer's tensor to the (name, rows) it is made of, from the first row on.
    """

    name: str
    plan: Callable[[Context], Plan]
    layer: Mapping[str, str] = field(default_factory=lambda: LAYER)
    optional: Mapping[str, str] = field(default_factory=lambda: OUTPUT)
    optional_layer: Mapping[str, str] = field(default_factory=dict)
    fused: Mapping[str, tuple[tuple[str, str], ...]] = field(default_factory=dict)
    activation: Activation = "silu"
    hugging_face: HuggingFace | None = None  # checkpoints that can be converted

    def tensors(self, n_layer: int) -> tuple[dict[str, str], dict[str, str]]:
        """What a file needs and what it may have, by name, in letters; fused tensors in parts."""
        layers = [f"blk.{i}." for i in range(n_layer)]
        needed = {at + name: shape for at in layers for name, shape in self.layer.items()}
        allowed = {at + name: shape for at in layers for name, shape in self.optional_layer.items()}
        return {**GLOBAL, **needed}, {**self.optional, **allowed}


Shapes = dict[str, tuple[int, ...]]


def declared(architecture: Architecture, sizes: Dimensions, tied: bool) -> tuple[Shapes, Shapes]:
    """(shapes that a file needs, shapes that it may have) by name; fused tensors are one.

    tied: the embedding table is the output, so there is no other.
    """
    letters = sizes.letters()

    def of(declarations: Mapping[str, str]) -> Shapes:
        return {name: tuple(letters[x] for x in d.split()) for name, d in declarations.items()}

    layer = of(architecture.layer)
    for name, parts in architecture.fused.items():
        columns = layer[parts[0][0]][1:]
        for part, _ in parts:
            del layer[part]
        layer[name] = (sum(letters[rows] for _, rows in parts), *columns)
    more = of(architecture.optional_layer)
    needed = of(GLOBAL if tied else {**GLOBAL, **OUTPUT})
    allowed = {name: x for name, x in of(architecture.optional).items() if name not in OUTPUT}
    for i in range(sizes.n_layer):
        needed |= {f"blk.{i}.{name}": size for name, size in layer.items()}
        allowed |= {f"blk.{i}.{name}": size for name, size in more.items()}
    return needed, allowed


@dataclass(frozen=True)
class Layer:
    """The weights of one layer, as the ops want them."""

    attention: Attention
    wo: Weight  # [D, H*E]
    attention_post_norm: Norm | None
    feed_forward: FeedForward
    w_down: Weight  # [D, F]
    ffn_post_norm: Norm | None


class Decoder:
    """A model on a backend: steps in, logits out."""

    def __init__(
        self,
        sizes: Dimensions,
        plan: Plan,
        ops: Ops,
        weights: Mapping[str, Weight],
        cache_types: CacheTypes = USUAL,
        n_batch: int = LEAST_BATCH,
    ) -> None:
        """n_batch: tokens of a step at most, for which the ops have room."""
        self.sizes, self.cache_types, self.n_batch = sizes, cache_types, n_batch
        self.plan = plan
        self.ops = ops
        w = _Weights(weights, sizes.eps)
        self.table = weights["token_embd.weight"]
        self.head = Head(
            norm=w.norm("output_norm.weight"),
            weight=weights.get("output.weight", self.table),
            soft_cap=plan.final_soft_cap,
        )
        self.layers = [_layer(i, sizes, plan, w) for i in range(sizes.n_layer)]

    def cache_shape(self, n_pages: int) -> CacheShape:
        """The keys and values that n_pages need."""
        return _cache_shape(self.sizes, n_pages, self.cache_types)

    def run(self, step: Step) -> Array:
        """l[R, V] of step.rows."""
        return self.ops.run(step, self.forward)

    def forward(self, step: Step) -> Array:
        """The whole network, op by op."""
        ops = self.ops
        x = ops.embed(step, self.table, self.plan.embedding_scale)
        behind = [layer.attention for layer in self.layers[1:]]
        for layer, after in zip_longest(self.layers, behind):
            q = ops.qkv(x, layer.attention, step)
            o = ops.attend(q, layer.attention, step)
            x = ops.linear_add(o, layer.wo, x, layer.attention_post_norm, layer.feed_forward)
            h = ops.ffn(x, layer.feed_forward, step)
            x = ops.linear_add(h, layer.w_down, x, layer.ffn_post_norm, after)
        return ops.logits(x, self.head, step)


def build(
    architecture: Architecture,
    file: File,
    ops: Ops,
    n_ctx: int,
    progress: Progress | None,
    n_batch: int | None = None,
    n_seq: int = 1,
    cache_types: CacheTypes = USUAL,
) -> Decoder:
    """Check all the file says, then hand its weights over; GGUFError names what is wrong.

    n_seq sequences of n_ctx tokens, n_batch in a step, or as many as are fast: MemoryError where
    the ops have no room. ValueError for types of keys and values that its heads do not have room
    for.
    """
    config = Config(file.metadata, architecture.name, file.path)
    table = file.tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        raise GGUFError(
            f"{file.path}: token_embd.weight, the embedding table, is missing or no matrix"
        )
    sizes = read_dimensions(config, table.shape[0])
    check_vocabulary(file, sizes.n_vocab)
    scheme = read_scheme(file.metadata, file.path)
    refuse_variants(config, ACTIVATION_NAMES[architecture.activation])
    tensors = collect(architecture, file, sizes)
    plan = architecture.plan(Context(config, sizes, tensors, n_ctx))
    config.refuse_unread()
    weights = _weights(tensors, scheme)
    cache = _cache_shape(sizes, n_seq * pages_for(n_ctx), cache_types)
    widths = sizes.n_embd, sizes.n_ff, sizes.n_vocab
    steps = (MOST_BATCH, LEAST_BATCH) if n_batch is None else (n_batch, n_batch)
    most, least = (min(n, n_seq * n_ctx) for n in steps)
    n_batch = ops.check_room(Demand(_parts(weights), cache, n_seq, most, least, *widths))
    read = [weights[name].tensor if name in weights else x for name, x in tensors.items()]
    with ThreadPoolExecutor(READERS) as pool:  # the first error in the file's order is raised
        list(pool.map(lambda tensor: tensor.check_scales(), read))
    return Decoder(sizes, plan, ops, _hand_over(weights, ops, progress), cache_types, n_batch)


ACTIVATION_NAMES: dict[Activation, tuple[str, ...]] = {
    "silu": ("silu", "swish"),
    "gelu_tanh": ("gelu_pytorch_tanh", "gelu_tanh", "gelu"),
}


def _weights(tensors: Mapping[str, Tensor], scheme: Scheme) -> dict[str, Given]:
    """The tensors that become weights, with the scales of their rows."""
    untied = "output.weight" in tensors
    return {
        name: scheme.given(
            tensor, tensors.get(scale_of(name)), untied and name == "token_embd.weight"
        )
        for name, tensor in tensors.items()
        if name not in ROPE_FREQS
        and name not in ROPE_FACTORS  # these are in the plan
        and not name.endswith(SCALE)
    }


def _parts(weights: Mapping[str, Given]) -> list[tuple[Tensor, bool]]:
    """All tensors that are handed over, and whether each is only looked up."""
    matrices = [(given.tensor, given.lookup) for given in weights.values()]
    return matrices + [(x.scale, False) for x in weights.values() if x.scale is not None]


def _hand_over(
    tensors: Mapping[str, Given], ops: Ops, progress: Progress | None
) -> dict[str, Weight]:
    total, done = sum(t.nbytes for t, _ in _parts(tensors)), 0
    weights = {}
    for name, given in tensors.items():
        tensor, scale = given.tensor, given.scale
        weights[name] = ops.weight(tensor, given.lookup, scale, given.activations)
        done += tensor.nbytes + (0 if scale is None else scale.nbytes)
        if progress:
            progress(done, total)
    ops.weights_ready()
    return weights


def _cache_shape(s: Dimensions, n_pages: int, types: CacheTypes) -> CacheShape:
    return CacheShape(s.n_layer, n_pages, s.n_head_kv, s.head_size, s.n_head, types)


class _Weights:
    """Weights by name; those a layer need not have are None."""

    def __init__(self, weights: Mapping[str, Weight], eps: float) -> None:
        self._weights = weights
        self._eps = eps

    def norm(self, name: str) -> Norm:
        return Norm(self._weights[name], self._eps)

    def optional_norm(self, name: str) -> Norm | None:
        return self.norm(name) if name in self._weights else None

    def optional(self, name: str) -> Weight | None:
        return self._weights.get(name)

    def __getitem__(self, name: str) -> Weight:
        return self._weights[name]


def _layer(i: int, sizes: Dimensions, plan: Plan, w: _Weights) -> Layer:
    at = f"blk.{i}."
    return Layer(
        attention=_attention(i, sizes, plan, w),
        wo=w[at + "attn_output.weight"],
        attention_post_norm=w.optional_norm(at + "post_attention_norm.weight"),
        feed_forward=FeedForward(
            norm=w.norm(at + "ffn_norm.weight"),
            w_gate=w[at + "ffn_gate.weight"],
            w_up=w[at + "ffn_up.weight"],
            activation=plan.activation,
            w_down=w[at + "ffn_down.weight"],
        ),
        w_down=w[at + "ffn_down.weight"],
        ffn_post_norm=w.optional_norm(at + "post_ffw_norm.weight"),
    )


def _attention(i: int, sizes: Dimensions, plan: Plan, w: _Weights) -> Attention:
    at = f"blk.{i}.attn_"
    return Attention(
        layer=i,
        n_head=sizes.n_head,
        n_head_kv=sizes.n_head_kv,
        head_size=sizes.head_size,
        norm=w.norm(at + "norm.weight"),
        wq=w[at + "q.weight"],
        wk=w[at + "k.weight"],
        wv=w[at + "v.weight"],
        bq=w.optional(at + "q.bias"),
        bk=w.optional(at + "k.bias"),
        bv=w.optional(at + "v.bias"),
        q_norm=w.optional_norm(at + "q_norm.weight"),
        k_norm=w.optional_norm(at + "k_norm.weight"),
        rope=plan.ropes[i],
        scale=plan.scale,
        window=plan.windows[i],
        soft_cap=plan.soft_cap,
        wo=w[at + "output.weight"],
    )
