"""Gemma 4 for the plain decoder: position by position, in float64.

Written from the definition of the model, without a line of ggpy.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import plain_moe
from plain_decoder import Plain, cap


def plain(path: Path, n_ctx: int) -> Plain:
    """The decoder for a file."""
    found = PlainGemma4(path, n_ctx)
    return found if found.arch == "gemma4" else plain_moe.plain(path, n_ctx)


class PlainGemma4(Plain):
    """A decoder whose layers are of two kinds, and have inputs of their own."""

    def logits(self, ids: list[int]) -> np.ndarray:
        x = self.w["token_embd.weight"][ids] * math.sqrt(self.n_embd)
        inputs, kept = self.inputs(ids, x), {}
        for i in range(self.n_layer):
            at = f"blk.{i}."
            x = x + self.norm(self.attend(i, x, kept), at + "post_attention_norm.weight")
            x = x + self.feed_forward(i, x)
            if inputs is not None:
                h = gelu(x @ self.w[at + "inp_gate.weight"].T) * inputs[:, i]
                x = x + self.norm(h @ self.w[at + "proj.weight"].T, at + "post_norm.weight")
            x = x * self.w.get(at + "layer_output_scale.weight", 1.0)
        x = self.norm(x, "output_norm.weight")
        return cap(x @ self.w["token_embd.weight"].T, self.key("final_logit_softcapping", 0.0))

    def inputs(self, ids: list[int], x: np.ndarray) -> np.ndarray | None:
        """[T, L, I], or None."""
        size = self.key("embedding_length_per_layer_input", 0)
        if not size:
            return None
        of_x = (x @ self.w["per_layer_model_proj.weight"].T / math.sqrt(self.n_embd)).reshape(
            len(x), self.n_layer, size
        )
        of_id = self.w["per_layer_token_embd.weight"][ids].reshape(of_x.shape) * math.sqrt(size)
        return (self.norm(of_x, "per_layer_proj_norm.weight") + of_id) / math.sqrt(2)

    def attend(self, i: int, x: np.ndarray, kept: dict) -> np.ndarray:
        n, at = len(x), f"blk.{i}.attn_"
        local = self.key("attention.sliding_window_pattern")[i]
        y = self.norm(x, at + "norm.weight")
        q = self.heads(i, y @ self.w[at + "q.weight"].T, at + "q_norm.weight", local)
        if i < self.n_layer - self.key("attention.shared_kv_layers", 0):
            key = y @ self.w[at + "k.weight"].T
            value = y @ self.w[at + "v.weight"].T if at + "v.weight" in self.w else key
            k = self.heads(i, key, at + "k_norm.weight", local)
            v = value.reshape(k.shape)
            kept[local] = k, v / np.sqrt((v * v).mean(-1, keepdims=True) + self.eps)
        k, v = kept[local]
        share, window = q.shape[1] // k.shape[1], self.key("attention.sliding_window")
        out = np.zeros_like(q)
        for p in range(n):
            first = max(0, p - window + 1) if local else 0
            for h in range(q.shape[1]):
                s = k[first : p + 1, h // share] @ q[p, h]
                a = np.exp(s - s.max())
                out[p, h] = a / a.sum() @ v[first : p + 1, h // share]
        return out.reshape(n, -1) @ self.w[at + "output.weight"].T

    def feed_forward(self, i: int, x: np.ndarray) -> np.ndarray:
        at, dense = f"blk.{i}.", super().feed_forward
        if at + "ffn_gate_inp.weight" not in self.w:
            return dense(i, x)
        n = self.norm(x, at + "ffn_norm.weight")
        h = gelu(n @ self.w[at + "ffn_gate.weight"].T) * (n @ self.w[at + "ffn_up.weight"].T)
        d = self.norm(h @ self.w[at + "ffn_down.weight"].T, at + "post_ffw_norm_1.weight")
        m = np.array([self.experts(at + "ffn_", token) for token in self.taken(at, x)])
        y = d + self.norm(m, at + "post_ffw_norm_2.weight")
        return self.norm(y, at + "post_ffw_norm.weight")

    def taken(self, at: str, x: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        """Of each token what experts take, and what the router takes."""
        root = x / np.sqrt((x * x).mean(-1, keepdims=True) + self.eps) / math.sqrt(self.n_embd)
        routed = root * self.w[at + "ffn_gate_inp.scale"]
        return list(zip(self.norm(x, at + "pre_ffw_norm_2.weight"), routed, strict=True))

    def experts(self, at: str, token: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
        n, routed = token
        p = np.exp(self.w[at + "gate_inp.weight"] @ routed)
        chosen = sorted(range(len(p)), key=lambda e: -p[e])[: self.key("expert_used_count")]
        total, y = sum(p[e] for e in chosen), np.zeros_like(n)
        for e in chosen:
            if at + "gate_up_exps.weight" in self.w:
                gate, up = np.split(self.w[at + "gate_up_exps.weight"][e] @ n, 2)
            else:
                gate, up = (self.w[f"{at}{x}_exps.weight"][e] @ n for x in ("gate", "up"))
            h = self.w[at + "down_exps.weight"][e] @ (gelu(gate) * up)
            y = y + p[e] / total * self.w[at + "down_exps.scale"][e] * h
        return y

    def heads(self, i: int, y: np.ndarray, norm: str, local: bool) -> np.ndarray:
        """[T, heads, E], normalised and rotated."""
        size = self.key("attention.key_length" + ("_swa" if local else ""))
        y = self.norm(y.reshape(len(y), -1, size), norm)
        base = self.key("rope.freq_base_swa", 10000.0) if local else self.key("rope.freq_base")
        out, half = y.copy(), size // 2
        for p in range(len(y)):
            for pair in range(half):
                slower = 1.0 if local else self.w["rope_freqs.weight"][pair]
                angle = p * base ** (-2 * pair / size) / slower
                a, b, c, s = y[p, :, pair], y[p, :, pair + half], math.cos(angle), math.sin(angle)
                out[p, :, pair], out[p, :, pair + half] = a * c - b * s, a * s + b * c
        return out


def gelu(x: np.ndarray) -> np.ndarray:
    return x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
