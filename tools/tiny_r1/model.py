"""The deepseek_v3 architecture in PyTorch, small and plain, for training tiny-r1.

Follows the DeepSeek-V2 and V3 reports: multi-head latent attention (written out, not absorbed), rotary embedding on adjacent
pairs with YaRN frequencies and the squared mscale, one dense layer then mixture-of-experts layers with a shared expert,
grouped sigmoid routing with a selection bias, and one multi-token-prediction (MTP) layer. All arithmetic is float32.
The configuration is the config.json of the exported checkpoint; parameters carry Hugging Face names where a matrix is
stored on its own, and routed experts are kept stacked as [experts, out, in].
"""

import math

import torch
import torch.nn.functional as F
from torch import nn


class TinyDeepseek(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        d, n = cfg["hidden_size"], cfg["num_hidden_layers"]
        self.embed_tokens = nn.Parameter(torch.randn(cfg["vocab_size"], d) * 0.5)
        self.lm_head = nn.Parameter(torch.randn(cfg["vocab_size"], d) * 0.02)
        self.norm = RMSNorm(d, cfg["rms_norm_eps"])
        self.layers = nn.ModuleList(Block(cfg, i) for i in range(n))
        self.mtp = MtpLayer(cfg, n)
        inv_freq, self.softmax_scale = rope_constants(cfg)
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def forward(self, ids, lengths):
        """ids [batch, time], right-padded; lengths [batch]. Returns the post-norm hidden states [batch, time, hidden]."""
        x, context = self.embed_tokens[ids], self.context(ids, lengths)
        for layer in self.layers:
            x = layer(x, context)
        return self.norm(x)

    def forward_mtp(self, hidden, ids, lengths):
        """Position i sees hidden[i] and token i+1; its head predicts token i+2. Returns normed states [batch, time, hidden]."""
        next_ids = F.pad(ids[:, 1:], (0, 1))
        return self.mtp(hidden, self.embed_tokens[next_ids], self.context(ids, lengths))

    def logits(self, hidden):
        return hidden @ self.lm_head.T

    def routers(self):
        return [block.mlp for block in [*self.layers, self.mtp.block] if isinstance(block.mlp, MoE)]

    def context(self, ids, lengths):
        time = torch.arange(ids.shape[1])
        angles = torch.outer(time.float(), self.inv_freq)
        return dict(
            cos=angles.cos(), sin=angles.sin(), scale=self.softmax_scale,
            mask=torch.full((len(time), len(time)), -math.inf).triu(1),
            valid=(time < lengths[:, None]).flatten().nonzero().squeeze(1),
        )


class Block(nn.Module):
    def __init__(self, cfg, index):
        super().__init__()
        d, eps = cfg["hidden_size"], cfg["rms_norm_eps"]
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(d, eps), RMSNorm(d, eps)
        self.self_attn = Attention(cfg)
        dense = index < cfg["first_k_dense_replace"]
        self.mlp = SwiGLU(d, cfg["intermediate_size"]) if dense else MoE(cfg)

    def forward(self, x, context):
        x = x + self.self_attn(self.input_layernorm(x), context)
        h = self.post_attention_layernorm(x)
        return x + (self.mlp(h, context["valid"]) if isinstance(self.mlp, MoE) else self.mlp(h))


class MtpLayer(nn.Module):
    """The multi-token-prediction module; it shares the main model's embedding and head. The embedding goes first into eh_proj."""

    def __init__(self, cfg, index):
        super().__init__()
        d, eps = cfg["hidden_size"], cfg["rms_norm_eps"]
        self.enorm, self.hnorm, self.norm = RMSNorm(d, eps), RMSNorm(d, eps), RMSNorm(d, eps)
        self.eh_proj = matrix(d, 2 * d)
        self.block = Block(cfg, index)

    def forward(self, hidden, embedding, context):
        x = torch.cat([self.enorm(embedding), self.hnorm(hidden)], -1) @ self.eh_proj.T
        return self.norm(self.block(x, context))


class RMSNorm(nn.Module):
    def __init__(self, size, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x):
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class Attention(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        d, self.heads = cfg["hidden_size"], cfg["num_attention_heads"]
        self.nope, self.rope, self.v = cfg["qk_nope_head_dim"], cfg["qk_rope_head_dim"], cfg["v_head_dim"]
        q_rank, self.kv_rank, eps = cfg["q_lora_rank"], cfg["kv_lora_rank"], 1e-6
        self.q_a_proj, self.q_a_layernorm = matrix(q_rank, d), RMSNorm(q_rank, eps)
        self.q_b_proj = matrix(self.heads * (self.nope + self.rope), q_rank)
        self.kv_a_proj_with_mqa = matrix(self.kv_rank + self.rope, d)
        self.kv_a_layernorm = RMSNorm(self.kv_rank, eps)
        self.kv_b_proj = matrix(self.heads * (self.nope + self.v), self.kv_rank)
        self.o_proj = matrix(d, self.heads * self.v, gain=0.4)

    def forward(self, x, context):
        batch, time, _ = x.shape
        q = (self.q_a_layernorm(x @ self.q_a_proj.T) @ self.q_b_proj.T).view(batch, time, self.heads, -1).transpose(1, 2)
        latent, k_pe = (x @ self.kv_a_proj_with_mqa.T).split([self.kv_rank, self.rope], -1)
        kv = (self.kv_a_layernorm(latent) @ self.kv_b_proj.T).view(batch, time, self.heads, -1).transpose(1, 2)
        k_nope, v = kv.split([self.nope, self.v], -1)
        q_pe = rotate(q[..., self.nope:], context)
        k_pe = rotate(k_pe[:, None], context).expand(-1, self.heads, -1, -1)
        scores = torch.cat([q[..., :self.nope], q_pe], -1) @ torch.cat([k_nope, k_pe], -1).transpose(2, 3)
        p = (scores * context["scale"] + context["mask"]).softmax(-1)
        return (p @ v).transpose(1, 2).reshape(batch, time, -1) @ self.o_proj.T


class SwiGLU(nn.Module):
    def __init__(self, d, width):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = matrix(width, d), matrix(width, d), matrix(d, width, gain=0.4)

    def forward(self, x):
        return (F.silu(x @ self.gate_proj.T) * (x @ self.up_proj.T)) @ self.down_proj.T


class MoE(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        d, m, n = cfg["hidden_size"], cfg["moe_intermediate_size"], cfg["n_routed_experts"]
        self.cfg = cfg
        self.gate = nn.Parameter(torch.randn(n, d) / math.sqrt(d))
        self.experts_gate_up = nn.Parameter(torch.randn(n, 2 * m, d) / math.sqrt(d))
        self.experts_down = nn.Parameter(torch.randn(n, d, m) * (0.4 / math.sqrt(m)))
        self.shared_experts = SwiGLU(d, m * cfg["n_shared_experts"])
        self.register_buffer("bias", torch.zeros(n))
        self.load = torch.zeros(n)

    def forward(self, x, valid):
        """valid: flat indices of real tokens; padding is neither routed nor counted in the load."""
        flat = x.reshape(-1, x.shape[-1])
        tokens = flat[valid]
        ids, weights = self.route(tokens)
        routed = torch.zeros_like(flat).index_add(0, valid, self.run_experts(tokens, ids, weights))
        return routed.view_as(x) + self.shared_experts(x)

    def route(self, tokens):
        """Selection by score + bias inside the best groups, weights from the scores alone."""
        cfg = self.cfg
        scores = (tokens @ self.gate.T).sigmoid()
        with torch.no_grad():
            biased = scores + self.bias
            groups = biased.view(len(tokens), cfg["n_group"], -1)
            kept = groups.topk(2, -1).values.sum(-1).topk(cfg["topk_group"], -1).indices
            mask = torch.ones(groups.shape[:2], dtype=torch.bool).scatter(1, kept, False)
            ids = groups.masked_fill(mask[..., None], -math.inf).flatten(1).topk(cfg["num_experts_per_tok"], -1).indices
            self.load = torch.bincount(ids.flatten(), minlength=scores.shape[1]).float()
        weights = scores.gather(1, ids)
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * cfg["routed_scaling_factor"]
        return ids, weights

    def run_experts(self, tokens, ids, weights):
        """Tokens are laid out as [experts, largest load, hidden] so that three batched products do all experts."""
        n, k = len(self.gate), ids.shape[1]
        order = ids.flatten().argsort(stable=True)
        expert = ids.flatten()[order]
        start = F.pad(self.load.long().cumsum(0), (1, 0))[:-1]
        capacity = int(self.load.max())
        slot = expert * capacity + torch.arange(len(order)) - start[expert]
        source = order // k
        x = tokens.new_zeros(n * capacity, tokens.shape[1]).index_copy(0, slot, tokens[source]).view(n, capacity, -1)
        gate, up = (x @ self.experts_gate_up.transpose(1, 2)).chunk(2, -1)
        y = ((F.silu(gate) * up) @ self.experts_down.transpose(1, 2)).flatten(0, 1)[slot]
        return torch.zeros_like(tokens).index_add(0, source, y * weights.flatten()[order, None])


def rotate(x, context):
    """Rotary embedding of x [..., time, rope]; element 2i pairs with 2i+1."""
    even, odd = x[..., 0::2], x[..., 1::2]
    cos, sin = context["cos"], context["sin"]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)


def rope_constants(cfg):
    """YaRN frequencies [rope / 2] and the softmax scale with the squared mscale."""
    dim, theta, yarn = cfg["qk_rope_head_dim"], cfg["rope_theta"], cfg["rope_scaling"]
    exponent = torch.arange(dim // 2, dtype=torch.float64)
    plain = theta ** (-2.0 * exponent / dim)

    def correction(rotations):
        original = yarn["original_max_position_embeddings"]
        return dim * math.log(original / (2 * math.pi * rotations)) / (2 * math.log(theta))

    low = max(math.floor(correction(yarn["beta_fast"])), 0)
    high = min(math.ceil(correction(yarn["beta_slow"])), dim - 1)
    ramp = ((exponent - low) / max(high - low, 0.001)).clamp(0, 1)
    inv_freq = plain / yarn["factor"] * ramp + plain * (1 - ramp)
    m = 0.1 * yarn["mscale_all_dim"] * math.log(yarn["factor"]) + 1
    return inv_freq.float(), m * m / math.sqrt(cfg["qk_nope_head_dim"] + dim)


def matrix(n_out, n_in, gain=1.0):
    return nn.Parameter(torch.randn(n_out, n_in) * (gain / math.sqrt(n_in)))
