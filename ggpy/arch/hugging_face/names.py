"""Names of tensors, and of settings, in checkpoints on the Hugging Face hub."""

GLOBAL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER = {  # below "model.layers.0." and so on
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
ATTENTION = {ours: theirs for ours, theirs in LAYER.items() if not theirs.startswith("mlp.")}
# What settings are called; transformers 5 has the first for all models
EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
USED_COUNTS = ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts")
EXPERTS = {  # the names that convert/experts.py gives to tensors of all experts
    "ffn_gate_inp.weight": "mlp.gate.weight",
    "ffn_gate_exps.weight": "mlp.experts.gate_proj.weight",
    "ffn_up_exps.weight": "mlp.experts.up_proj.weight",
    "ffn_down_exps.weight": "mlp.experts.down_proj.weight",
}
PARTS = ("gate", "up", "down")  # of a feed-forward
SHARED = {f"ffn_{x}_shexp.weight": f"mlp.shared_experts.{x}_proj.weight" for x in PARTS}
QKV_BIAS = {
    "attn_q.bias": "self_attn.q_proj.bias",
    "attn_k.bias": "self_attn.k_proj.bias",
    "attn_v.bias": "self_attn.v_proj.bias",
}
QK_NORM = {
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
}
SANDWICH = {  # norms before and after both attention and feed-forward
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "ffn_norm.weight": "pre_feedforward_layernorm.weight",
    "post_ffw_norm.weight": "post_feedforward_layernorm.weight",
}
PERMUTED = ("attn_q", "attn_k")  # rows in the order that rope's style "norm" wants
