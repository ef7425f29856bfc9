"""A second implementation of the architectures: in float64, without a cache, head by head.

Written from the formulas and read with the gguf package, so it has no code in common with ggpy.
It computes RoPE, masks and scaling position by position, so sizes must be tiny.
"""

from __future__ import annotations

import math
from pathlib import Path

import gguf
import numpy as np

NEOX = {"qwen2", "qwen3", "gemma2", "gemma3", "phi3"}  # RoPE of the others pairs neighbours


class Plain:
    """A model file with its tensors in float64."""

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
        self.eps = self.key("attention.layer_norm_rms_epsilon")

    def key(self, name, default=None):
        return self.fields.get(f"{self.arch}.{name}", default)

    def logits(self, ids: list[int]) -> np.ndarray:
        """l[T, V]."""
        x = self.w["token_embd.weight"][ids]
        if self.gemma:
            x = x * math.sqrt(self.n_embd)
        for i in range(self.n_layer):
            x = x + self.attention(i, x)
            x = x + self.feed_forward(i, x)
        x = self.norm(x, "output_norm.weight")
        out = self.w.get("output.weight", self.w["token_embd.weight"])
        return cap(x @ out.T, self.final_cap())

    def final_cap(self) -> float:
        return self.key("final_logit_softcapping", 30.0 if self.arch == "gemma2" else 0.0)

    def attention_cap(self) -> float:
        return self.key("attn_logit_softcapping", 50.0 if self.arch == "gemma2" else 0.0)

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.eps) * self.w[name]

    def project(self, i: int, x: np.ndarray) -> list[np.ndarray]:
        at = f"blk.{i}.attn_"
        nq, nk = self.n_head * self.head, self.n_kv * self.head
        if at + "qkv.weight" in self.w:
            return np.split(x @ self.w[at + "qkv.weight"].T, [nq, nq + nk], axis=1)
        return [x @ self.w[at + c + ".weight"].T + self.w.get(at + c + ".bias", 0) for c in "qkv"]

    def attention(self, i: int, x: np.ndarray) -> np.ndarray:
        n = len(x)
        q, k, v = self.project(i, self.norm(x, f"blk.{i}.attn_norm.weight"))
        q, k = q.reshape(n, self.n_head, -1), k.reshape(n, self.n_kv, -1)
        v = v.reshape(n, self.n_kv, -1)
        if f"blk.{i}.attn_q_norm.weight" in self.w:
            q = self.norm(q, f"blk.{i}.attn_q_norm.weight")
            k = self.norm(k, f"blk.{i}.attn_k_norm.weight")
        out = np.zeros((n, self.n_head, self.head))
        for h in range(self.n_head):
            g = h // (self.n_head // self.n_kv)
            for p in range(n):
                first = 0 if not self.window(i) else max(0, p - self.window(i) + 1)
                seen = range(first, p + 1)
                query = self.rotate(i, q[p, h], p)
                s = np.array([query @ self.rotate(i, k[j, g], j) for j in seen]) * self.scale()
                s = cap(s, self.attention_cap())
                a = np.exp(s - s.max())
                out[p, h] = (a / a.sum()) @ v[first : p + 1, g]
        y = out.reshape(n, -1) @ self.w[f"blk.{i}.attn_output.weight"].T
        post = f"blk.{i}.post_attention_norm.weight"
        return self.norm(y, post) if post in self.w else y

    def feed_forward(self, i: int, x: np.ndarray) -> np.ndarray:
        x = self.norm(x, f"blk.{i}.ffn_norm.weight")
        up = x @ self.w[f"blk.{i}.ffn_up.weight"].T
        if f"blk.{i}.ffn_gate.weight" in self.w:
            gate = x @ self.w[f"blk.{i}.ffn_gate.weight"].T
        else:
            gate, up = up[:, : self.n_ff], up[:, self.n_ff :]
        if self.gemma:
            gate = gate / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
        else:
            gate = gate / (1 + np.exp(-gate))
        y = (gate * up) @ self.w[f"blk.{i}.ffn_down.weight"].T
        post = f"blk.{i}.post_ffw_norm.weight"
        return self.norm(y, post) if post in self.w else y

    def window(self, i: int) -> int:
        size = self.key("attention.sliding_window", 4096 if self.arch == "gemma2" else 0)
        pattern = self.key("attention.sliding_window_pattern", 6)
        if self.arch == "gemma3":
            local = pattern[i] if isinstance(pattern, list) else (i + 1) % pattern != 0
            return size if local else 0
        return size if self.arch != "gemma2" or i % 2 == 0 else 0

    def scale(self) -> float:
        big = (self.arch, self.n_layer) in (("gemma2", 46), ("gemma3", 62))
        return 1 / math.sqrt(self.n_embd / self.n_head if big else self.head)

    def rotate(self, i: int, x: np.ndarray, position: int) -> np.ndarray:
        """x[E] of one head at a position."""
        n = self.key("rope.dimension_count", self.head)
        out = x.copy()
        for pair in range(n // 2):
            a, b = (pair, pair + n // 2) if self.arch in NEOX else (2 * pair, 2 * pair + 1)
            angle, m = self.angle(i, pair, n, position)
            out[a] = m * (x[a] * math.cos(angle) - x[b] * math.sin(angle))
            out[b] = m * (x[a] * math.sin(angle) + x[b] * math.cos(angle))
        return out

    def angle(self, i: int, pair: int, n: int, position: int) -> tuple[float, float]:
        """(radians, magnitude) of a pair at a position."""
        base = self.key("rope.freq_base", 10000.0)
        if self.arch == "gemma3" and self.window(i):
            base = self.key("rope.freq_base_swa", 10000.0)
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
        return position * mixed, magnitude * (1 + 0.1 * math.log(stretch))

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
