"""Experts, sinks and biases for the plain decoder: token by token, in float64.

Written from the definitions of the models, without a line of ggpy: softmax routing of Qwen,
softmax over the chosen of gpt-oss, its activation, its attention.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import plain_decoder
from plain_decoder import Plain

plain_decoder.NEOX |= {"qwen3moe", "qwen2moe", "gpt-oss"}
NORMALISED = ("qwen3moe", "llama")


def plain(path: Path, n_ctx: int) -> Plain:
    """The decoder for a file, with experts or without."""
    found = PlainMoE(path, n_ctx)
    return found if found.n_expert else Plain(path, n_ctx)


class PlainMoE(Plain):
    """A decoder whose layers have experts."""

    @property
    def n_expert(self) -> int:
        return self.key("expert_count", 0)

    def feed_forward(self, i: int, x: np.ndarray) -> np.ndarray:
        oss = self.arch == "gpt-oss"
        name = "post_attention_norm" if oss else "ffn_norm"
        n = self.norm(x, f"blk.{i}.{name}.weight")
        return np.array([self.one_token(i, token) for token in n])

    def one_token(self, i: int, n: np.ndarray) -> np.ndarray:
        at, w, oss = f"blk.{i}.ffn_", self.w, self.arch == "gpt-oss"
        logits = w[at + "gate_inp.weight"] @ n + w.get(at + "gate_inp.bias", 0)
        chosen = sorted(self.candidates(logits), key=lambda e: -logits[e])
        chosen = chosen[: self.key("expert_used_count")]
        over = chosen if oss else range(self.n_expert)
        total = sum(math.exp(logits[e]) for e in over)
        p = {e: math.exp(logits[e]) / total for e in chosen}
        if self.arch in NORMALISED:
            p = {e: v / sum(p.values()) for e, v in p.items()}
        y = sum(p[e] * self.expert(i, e, n) for e in chosen)
        if at + "up_shexp.weight" in w:
            gate, up = (w[f"{at}{x}_shexp.weight"] @ n for x in ("gate", "up"))
            h = gate / (1 + np.exp(-gate)) * up
            strength = 1 / (1 + math.exp(-(w[at + "gate_inp_shexp.weight"] @ n)))
            y = y + strength * (w[at + "down_shexp.weight"] @ h)
        return y

    def candidates(self, logits: np.ndarray) -> list[int]:
        """Experts of the groups whose two best have the largest sum of probabilities."""
        n, used = self.key("expert_group_count", 1), self.key("expert_group_used_count", 1)
        p = np.exp(logits) / np.exp(logits).sum()
        groups = np.array_split(np.arange(self.n_expert), n)
        best = sorted(groups, key=lambda group: -sum(sorted(p[group])[-2:]))
        return [int(e) for group in best[:used] for e in group]

    def expert(self, i: int, e: int, n: np.ndarray) -> np.ndarray:
        def affine(part: str, x: np.ndarray) -> np.ndarray:
            name = f"blk.{i}.ffn_{part}_exps"
            bias = self.w[name + ".bias"][e] if name + ".bias" in self.w else 0
            return self.w[name + ".weight"][e] @ x + bias

        gate, up = affine("gate", n), affine("up", n)
        if self.arch == "gpt-oss":
            gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
            return affine("down", gate / (1 + np.exp(-1.702 * gate)) * (up + 1))
        return affine("down", gate / (1 + np.exp(-gate)) * up)

    def window(self, i: int) -> int:
        if self.arch == "gpt-oss":
            return self.key("attention.sliding_window") if i % 2 == 0 else 0
        return super().window(i)

    def angle(self, i: int, pair: int, n: int, position: int) -> tuple[float, float]:
        base, before = self.key("rope.freq_base_swa"), self.fields
        if base and self.window(i):
            self.fields = {**before, f"{self.arch}.rope.freq_base": base}
        found = super().angle(i, pair, n, position)
        self.fields = before
        return found

    def attention(self, i: int, x: np.ndarray) -> np.ndarray:
        if self.arch != "gpt-oss":
            return super().attention(i, x)
        n, at = len(x), f"blk.{i}.attn_"
        q, k, v = self.project(i, self.norm(x, at + "norm.weight"))
        q, k = q.reshape(n, self.n_head, -1), k.reshape(n, self.n_kv, -1)
        v, out = v.reshape(n, self.n_kv, -1), np.zeros((n, self.n_head, self.head))
        for h in range(self.n_head):
            g, sink = h // (self.n_head // self.n_kv), math.exp(self.w[at + "sinks.weight"][h])
            for p in range(n):
                first = max(0, p - self.window(i) + 1) if self.window(i) else 0
                query, seen = self.rotate(i, q[p, h], p), range(first, p + 1)
                scores = [query @ self.rotate(i, k[j, g], j) / math.sqrt(self.head) for j in seen]
                e = np.exp(scores)
                out[p, h] = e / (e.sum() + sink) @ v[first : p + 1, g]
        return out.reshape(n, -1) @ self.w[at + "output.weight"].T + self.w[at + "output.bias"]
