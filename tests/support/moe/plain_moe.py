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

plain_decoder.NEOX |= {"qwen3moe", "qwen2moe", "gpt-oss", "glm4moe", "hunyuan-moe", "minimax-m2"}
plain_decoder.NEOX |= {"bailingmoe2", "dots1", "exaone-moe", "qwen3vlmoe", "olmoe"}
plain_decoder.WHOLE_NORM += ["minimax-m2", "olmoe"]
plain_decoder.NORM_BEHIND_ROPE.append("hunyuan-moe")
NORMALISED = ("qwen3moe", "llama", "qwen35moe", "qwen3next")
NORMALISED += ("ernie4_5-moe", "hunyuan-moe", "minimax-m2", "qwen3vlmoe", "granitemoe")
SIGMOID = ("glm4moe", "minimax-m2", "llama4", "bailingmoe2", "dots1", "exaone-moe")


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
        if f"blk.{i}.ffn_gate_inp.weight" not in self.w:
            return super().feed_forward(i, x)
        before = f"blk.{i}.ffn_norm.weight" in self.w
        name = "ffn_norm" if before else "post_attention_norm"
        n = self.norm(x, f"blk.{i}.{name}.weight")
        return np.array([self.one_token(i, token) for token in n])

    def one_token(self, i: int, n: np.ndarray) -> np.ndarray:
        at, w, oss = f"blk.{i}.ffn_", self.w, self.arch == "gpt-oss"
        logits = w[at + "gate_inp.weight"] @ n + w.get(at + "gate_inp.bias", 0)
        likes = self.scores(logits) + w.get(f"blk.{i}.exp_probs_b.bias", 0)
        chosen = sorted(self.candidates(likes), key=lambda e: -likes[e])
        chosen = chosen[: self.key("expert_used_count")]
        p = {e: self.scores(logits[chosen if oss else slice(None)])[j if oss else e]
             for j, e in enumerate(chosen)}  # fmt: skip
        if self.key("expert_weights_norm", self.arch in NORMALISED):
            p = {e: v / sum(p.values()) for e, v in p.items()}
        scale = self.key("expert_weights_scale", 1.0)
        if self.arch == "llama4":
            y = sum(self.expert(i, e, n * p[e]) for e in chosen)
        else:
            y = sum(p[e] * scale * self.expert(i, e, n) for e in chosen)
        if at + "up_shexp.weight" in w:
            gate, up = (w[f"{at}{x}_shexp.weight"] @ n for x in ("gate", "up"))
            h = gate / (1 + np.exp(-gate)) * up
            gate = at + "gate_inp_shexp.weight"
            strength = 1 / (1 + math.exp(-(w[gate] @ n))) if gate in w else 1.0
            y = y + strength * (w[at + "down_shexp.weight"] @ h)
        return y

    def scores(self, logits: np.ndarray) -> np.ndarray:
        """The file's, or those of the architecture."""
        usual = 2 if self.arch in SIGMOID else 1
        if (self.key("expert_gating_func") or usual) == 2:
            return 1 / (1 + np.exp(-logits))
        return np.exp(logits) / np.exp(logits).sum()

    def candidates(self, likes: np.ndarray) -> list[int]:
        """Experts of the groups whose two best have the largest sum."""
        n, used = self.key("expert_group_count", 1), self.key("expert_group_used_count", 1)
        groups = np.array_split(np.arange(self.n_expert), n)
        best = sorted(groups, key=lambda group: -sum(sorted(likes[group])[-2:]))
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
