"""A second implementation of the architectures: in float64, without a cache, head by head.

Written from the formulas and read with the gguf package, so it has no code in common with ggpy.
It computes RoPE, masks and scaling position by position, so sizes must be tiny.
"""

from __future__ import annotations

import math
from pathlib import Path

import gguf
import numpy as np
from plain_delta import delta_net, taken_apart

# RoPE of the others pairs neighbours.
NEOX = {"qwen2", "qwen3", "gemma", "gemma2", "gemma3", "gemma-embedding", "phi3"}
NEOX |= {"olmo2", "seed_oss", "exaone4", "hunyuan-dense", "qwen3vl", "qwen2vl"}
WHOLE_NORM, NORM_BEHIND_ROPE = ["olmo2"], ["hunyuan-dense"]  # of q and k
# The last of so many has no window.
PERIOD = {"gemma3": 6, "gemma-embedding": 6, "olmo2": 4, "exaone4": 4}
PERIOD |= {"cohere2": 4, "muse-glimmer": 4, "gemma2": 2, "exaone-moe": 4}
HAVE_LOCAL_BASE = ("gemma2", "gemma3", "gemma-embedding", "olmo2", "muse-glimmer")
HYBRID = ("qwen35", "qwen35moe", "qwen3next")
NEOX |= {*HYBRID}
# These store the norm before the feed-forward under the name of a norm after the attention.
NORM_BEFORE_FFN = ("seed_oss", "glm4moe", *HYBRID)
PARALLEL = ("command-r", "cohere2")


class Plain:
    """A model file with its tensors in float64."""

    chunk = 0  # positions, in three of four layers

    def __init__(self, path: Path, n_ctx: int) -> None:
        reader = gguf.GGUFReader(path)
        self.arch = reader.fields["general.architecture"].contents()
        self.fields = {k: v.contents() for k, v in reader.fields.items()}
        self.w = {
            t.name: np.array(gguf.quants.dequantize(t.data, t.tensor_type), np.float64)
            for t in reader.tensors
        }
        self.n_ctx = n_ctx
        self.gemma = self.arch.startswith("gemma")
        self.n_embd, self.n_layer = self.key("embedding_length"), self.key("block_count")
        self.n_head = self.key("attention.head_count")
        self.n_kv = self.key("attention.head_count_kv", self.n_head)
        self.head = self.key("attention.key_length", self.n_embd // self.n_head)
        self.n_ff = self.key("feed_forward_length")
        self.windows = self.key("attention.sliding_window", 0) > 0
        kind = "" if self.arch in PARALLEL else "rms_"
        self.eps = self.key(f"attention.layer_norm_{kind}epsilon")

    def key(self, name, default=None):
        return self.fields.get(f"{self.arch}.{name}", default)

    def logits(self, ids: list[int]) -> np.ndarray:
        """l[T, V]."""
        x = self.w["token_embd.weight"][ids]
        if self.gemma:
            x = x * math.sqrt(self.n_embd)
        if self.arch == "muse-glimmer":
            x = x / np.sqrt((x * x).mean(-1, keepdims=True) + self.eps)
        x, added = x * self.key("embedding_scale", 1.0), self.key("residual_scale", 1.0)
        for i in range(self.n_layer):
            y = x + self.attention(i, x) * added
            x = y + self.feed_forward(i, x if self.arch in PARALLEL else y) * added
        x = self.norm(x, "output_norm.weight")
        out = self.w.get("output.weight", self.w["token_embd.weight"])
        scale = self.key("logit_scale", 1.0)
        divides = self.arch in ("granite", "granitemoe")
        return cap(x @ out.T * (1 / scale if divides else scale), self.final_cap())

    def final_cap(self) -> float:
        return self.key("final_logit_softcapping", 30.0 if self.arch == "gemma2" else 0.0)

    def attention_cap(self) -> float:
        return self.key("attn_logit_softcapping", 50.0 if self.arch == "gemma2" else 0.0)

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        """x as it is where there is no such norm."""
        if name not in self.w:
            return x
        x = x - x.mean(-1, keepdims=True) if self.arch in PARALLEL else x
        is_post_norm = self.arch == "muse-glimmer" and ".post_" in name
        eps = 1e-8 if is_post_norm else self.eps
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * self.w[name]

    def project(self, i: int, x: np.ndarray) -> list[np.ndarray]:
        at = f"blk.{i}.attn_"
        nq, nk = self.n_head * self.head, self.n_kv * self.head
        if at + "qkv.weight" in self.w:
            return np.split(x @ self.w[at + "qkv.weight"].T, [nq, nq + nk], axis=1)
        q, k, v = (self.affine(x, at + c) for c in "qkv")
        if self.arch in HYBRID:
            q = q.reshape(len(x), self.n_head, 2, self.head)[:, :, 0].reshape(len(x), -1)
        return [q, k, v]

    def gate(self, i: int, x: np.ndarray) -> np.ndarray:
        """[T, H, E]: the product of its own matrix, or the rows after each head of q."""
        x = self.norm(x, f"blk.{i}.attn_norm.weight")
        if self.arch not in HYBRID:
            gate = x @ self.w[f"blk.{i}.attn_gate.weight"].T
            return gate.reshape(len(x), self.n_head, self.head)
        q = x @ self.w[f"blk.{i}.attn_q.weight"].T
        return q.reshape(len(x), self.n_head, 2, self.head)[:, :, 1]

    def delta_net(self, i: int, n: np.ndarray) -> np.ndarray:
        at, n_k_head = f"blk.{i}.", self.key("ssm.group_count")
        w = {name.removeprefix(at): x for name, x in self.w.items() if name.startswith(at)}
        share = self.key("ssm.time_step_rank") // n_k_head
        if self.arch == "qwen3next":
            w = taken_apart(w, n_k_head)
            return delta_net(w, n, n_k_head, self.eps, lambda h: h // share)
        return delta_net(w, n, n_k_head, self.eps, lambda h: h % n_k_head)

    def attention(self, i: int, x: np.ndarray) -> np.ndarray:
        """What the layer's mixer adds to x."""
        n = len(x)
        if f"blk.{i}.ssm_a" in self.w:
            return self.delta_net(i, self.norm(x, f"blk.{i}.attn_norm.weight"))
        q, k, v = self.project(i, self.norm(x, f"blk.{i}.attn_norm.weight"))
        names = [f"blk.{i}.attn_{c}_norm.weight" for c in "qk"]
        if self.arch in WHOLE_NORM:
            q, k = self.norm(q, names[0]), self.norm(k, names[1])
        q, k = q.reshape(n, self.n_head, -1), k.reshape(n, self.n_kv, -1)
        v = v.reshape(n, self.n_kv, -1)
        if self.arch not in (*WHOLE_NORM, *NORM_BEHIND_ROPE):
            q, k = self.norm(q, names[0]), self.norm(k, names[1])
        q = np.array([[self.rotate(i, q[p, h], p) for h in range(self.n_head)] for p in range(n)])
        k = np.array([[self.rotate(i, k[p, g], p) for g in range(self.n_kv)] for p in range(n)])
        if self.arch in NORM_BEHIND_ROPE:
            q, k = self.norm(q, names[0]), self.norm(k, names[1])
        if self.arch == "llama4" and (i + 1) % 4 != 0:
            q, k = (y / np.sqrt((y * y).mean(-1, keepdims=True) + self.eps) for y in (q, k))
        out = np.zeros((n, self.n_head, self.head))
        for h in range(self.n_head):
            g = h // (self.n_head // self.n_kv)
            for p in range(n):
                seen = self.seen(p, n, self.window(i))
                if self.chunk and (i + 1) % 4 != 0:
                    seen = range(p - p % self.chunk, p + 1)
                s = np.array([q[p, h] @ k[j, g] for j in seen]) * self.scale() * self.sharp(p)
                s = cap(s, self.attention_cap())
                a = np.exp(s - s.max())
                out[p, h] = (a / a.sum()) @ v[seen.start : seen.stop, g]
        if self.arch in (*HYBRID, "muse-glimmer"):
            out = out / (1 + np.exp(-self.gate(i, x)))
        y = self.affine(out.reshape(n, -1), f"blk.{i}.attn_output")
        return (
            y
            if self.arch in NORM_BEFORE_FFN
            else self.norm(y, f"blk.{i}.post_attention_norm.weight")
        )

    def feed_forward(self, i: int, x: np.ndarray) -> np.ndarray:
        others = {
            **dict.fromkeys(NORM_BEFORE_FFN, "post_attention_norm"),
            **dict.fromkeys(PARALLEL, "attn_norm"),
        }
        x = self.norm(x, f"blk.{i}.{others.get(self.arch, 'ffn_norm')}.weight")
        up = self.affine(x, f"blk.{i}.ffn_up")
        if f"blk.{i}.ffn_gate.weight" in self.w:
            gate = self.affine(x, f"blk.{i}.ffn_gate")
        else:
            gate, up = up[:, : self.n_ff], up[:, self.n_ff :]
        if self.gemma:
            gate = gate / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
        else:
            gate = gate / (1 + np.exp(-gate))
        y = self.affine(gate * up, f"blk.{i}.ffn_down")
        return self.norm(y, f"blk.{i}.post_ffw_norm.weight")

    def affine(self, x: np.ndarray, stem: str) -> np.ndarray:
        """x times a matrix, and its bias if there is one."""
        return x @ self.w[f"{stem}.weight"].T + self.w.get(f"{stem}.bias", 0)

    def seen(self, p: int, n: int, window: int) -> range:
        """What position p of n sees."""
        if self.arch == "gemma-embedding":
            half = window // 2 if window else n
            return range(max(0, p - half), min(n, p + half + 1))
        return range(max(0, p - window + 1) if window else 0, p + 1)

    def sharp(self, position: int) -> float:
        """What scores of a query at a position are multiplied with."""
        return 1 + self.key("attention.temperature_scale", 0.0) * math.log(
            1 + position // self.original()
        )

    def window(self, i: int) -> int:
        size = self.key("attention.sliding_window", 4096 if self.arch == "gemma2" else 0)
        pattern = self.key("attention.sliding_window_pattern", PERIOD.get(self.arch))
        if self.arch in PERIOD:
            local = pattern[i] if isinstance(pattern, list) else (i + 1) % pattern != 0
            return size if local else 0
        return size

    def scale(self) -> float:
        if said := self.key("attention.scale"):
            return said
        big = (self.arch, self.n_layer) in (("gemma2", 46), ("gemma3", 62))
        return 1 / math.sqrt(self.n_embd / self.n_head if big else self.head)

    def rotate(self, i: int, x: np.ndarray, position: int) -> np.ndarray:
        """x[E] of one head at a position."""
        if (self.arch in ("smollm3", "llama4") and i % 4 == 3) or not self.key(
            "rope.scaling.finetuned", True
        ):
            return x
        without = ("cohere2", "exaone4", "exaone-moe", "muse-glimmer")
        if self.arch in without and self.windows and not self.window(i):
            return x
        n = self.key("rope.dimension_count", self.head)
        out = x.copy()
        for pair in range(n // 2):
            halves = self.arch in NEOX or self.key("rope.dimension_sections")
            a, b = (pair, pair + n // 2) if halves else (2 * pair, 2 * pair + 1)
            angle, m = self.angle(i, pair, n, position)
            out[a] = m * (x[a] * math.cos(angle) - x[b] * math.sin(angle))
            out[b] = m * (x[a] * math.sin(angle) + x[b] * math.cos(angle))
        return out

    def angle(self, i: int, pair: int, n: int, position: int) -> tuple[float, float]:
        """(radians, magnitude) of a pair at a position."""
        base = self.key("rope.freq_base", 10000.0)
        base *= self.key("rope.scaling.alpha", 1.0) ** (self.head / (self.head - 2))
        if self.arch in HAVE_LOCAL_BASE and self.window(i):
            base = self.key("rope.freq_base_swa", 10000.0 if self.gemma else base)
            return position * base ** (-2 * pair / n), self.key("rope.scaling.attn_factor", 1.0)
        freq = base ** (-2 * pair / n) / self.factor(pair)
        kind = self.key("rope.scaling.type", "linear")
        stretch = self.key("rope.scaling.factor", self.key("rope.scale_linear", 1.0))
        magnitude = self.key("rope.scaling.attn_factor", 1.0)
        if kind in ("linear", "longrope"):
            return position * freq / stretch, magnitude
        if kind == "none":
            return position * freq, magnitude
        original = self.original()

        def dimension(turns: float) -> float:
            return n * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

        low = max(0, math.floor(dimension(self.key("rope.scaling.yarn_beta_fast", 32.0))))
        high = min(n - 1, math.ceil(dimension(self.key("rope.scaling.yarn_beta_slow", 1.0))))
        ramp = 1 - min(1, max(0, (pair - low) / max(0.001, high - low)))
        mixed = freq / stretch * (1 - ramp) + freq * ramp
        magnitude *= 1 + 0.1 * math.log(stretch)
        multiplier = self.key("rope.scaling.yarn_log_multiplier", 0.0)
        return position * mixed, magnitude / (1 + 0.1 * multiplier * math.log(stretch))

    def factor(self, pair: int) -> float:
        if "rope_freqs.weight" in self.w:
            return self.w["rope_freqs.weight"][pair]
        kind = "long" if self.n_ctx > self.original() else "short"
        name = f"rope_factors_{kind}.weight"
        return self.w[name][pair] if name in self.w else 1.0

    def original(self) -> int:
        return self.key("rope.scaling.original_context_length", self.key("context_length"))


def cap(x: np.ndarray, c: float) -> np.ndarray:
    return c * np.tanh(x / c) if c else x
