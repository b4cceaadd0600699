"""DeepSeek-V2/V3 in double precision numpy, written from the papers' formulas (arXiv 2405.04434, section 2; arXiv
2412.19437, section 2; YaRN, arXiv 2309.00071): slow, one sequence at a time, no cache.

It is the independent check of the golden logits (make_goldens.py compares it with Hugging Face transformers) and the
source of those that transformers cannot give (the MTP layer). Weights are passed decoded, by their Hugging Face
names.
"""

import math

import numpy as np

LATENT_NORM_EPS = 1e-6  # q_a_layernorm and kv_a_layernorm do not use rms_norm_eps


class ReferenceModel:
    def __init__(self, config, weights, angle_type=np.float32):
        self.c, self.w, self.angle_type = config, weights, angle_type
        rope = config.get("rope_scaling")
        self.inv_freq, self.amplitude, mscale = rope_constants(config["qk_rope_head_dim"], config["rope_theta"], rope)
        self.softmax_scale = mscale**2 / math.sqrt(config["qk_nope_head_dim"] + config["qk_rope_head_dim"])
        self.margins = None  # after a run: the closest routing decision of each position, see route()

    def hidden(self, tokens):
        """tokens [n] -> states after the final norm [n, hidden]."""
        x = self.w["model.embed_tokens.weight"][np.asarray(tokens)]
        self.margins = np.full(len(tokens), np.inf)
        for layer in range(self.c["num_hidden_layers"]):
            x = self.block(x, layer)
        return self.norm(x, "model.norm.weight")

    def logits(self, tokens):
        """tokens [n] -> logits [n, vocab]."""
        return self.head(self.hidden(tokens))

    def mtp_logits(self, hidden, next_tokens):
        """hidden [n, hidden] after the final norm, next_tokens [n] (token i+1 at position i) -> logits for token i+2."""
        return self.head(self.mtp_hidden(hidden, next_tokens))

    def mtp_second_logits(self, hidden, next_tokens):
        """The MTP layer applied again, at position n: its own state of position n - 1 is the hidden state, the argmax of
        its logits there is the next token, and attention covers all n + 1 positions. Returns logits [vocab].
        """
        state = self.mtp_hidden(hidden, next_tokens)[-1]
        draft = self.head(state).argmax()
        return self.head(self.mtp_hidden(np.vstack([hidden, state]), [*next_tokens, draft])[-1])

    def mtp_hidden(self, hidden, next_tokens):
        """Arguments as in mtp_logits(). Returns states after the layer's own final norm [n, hidden]."""
        layer = self.c["num_hidden_layers"]
        p = f"model.layers.{layer}."
        embedding = self.norm(self.w["model.embed_tokens.weight"][np.asarray(next_tokens)], p + "enorm.weight")
        x = np.concatenate([embedding, self.norm(hidden, p + "hnorm.weight")], -1) @ self.w[p + "eh_proj.weight"].T
        self.margins = np.full(len(next_tokens), np.inf)
        return self.norm(self.block(x, layer), p + "shared_head.norm.weight")

    def head(self, x):
        tied = self.c.get("tie_word_embeddings", False)
        return x @ self.w["model.embed_tokens.weight" if tied else "lm_head.weight"].T

    def norm(self, x, name, eps=None):
        eps = self.c["rms_norm_eps"] if eps is None else eps
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * self.w[name]

    def block(self, x, layer):
        p = f"model.layers.{layer}."
        x = x + self.attention(self.norm(x, p + "input_layernorm.weight"), p + "self_attn.")
        h = self.norm(x, p + "post_attention_layernorm.weight")
        is_moe = layer >= self.c["first_k_dense_replace"] and layer % self.c.get("moe_layer_freq", 1) == 0
        return x + (self.moe(h, p + "mlp.") if is_moe else self.mlp(h, p + "mlp."))

    def attention(self, x, p):
        c, w, n = self.c, self.w, len(x)
        heads, nope, v_dim, rank = c["num_attention_heads"], c["qk_nope_head_dim"], c["v_head_dim"], c["kv_lora_rank"]
        if c.get("q_lora_rank"):
            q_latent = self.norm(x @ w[p + "q_a_proj.weight"].T, p + "q_a_layernorm.weight", LATENT_NORM_EPS)
            q = q_latent @ w[p + "q_b_proj.weight"].T
        else:
            q = x @ w[p + "q_proj.weight"].T
        q = q.reshape(n, heads, -1).transpose(1, 0, 2)
        a = x @ w[p + "kv_a_proj_with_mqa.weight"].T
        latent = self.norm(a[:, :rank], p + "kv_a_layernorm.weight", LATENT_NORM_EPS)
        k_pe = self.rotate(a[:, rank:])
        kv = (latent @ w[p + "kv_b_proj.weight"].T).reshape(n, heads, nope + v_dim).transpose(1, 0, 2)
        scores = q[..., :nope] @ kv[..., :nope].transpose(0, 2, 1) + self.rotate(q[..., nope:]) @ k_pe.T
        scores = scores * self.softmax_scale + np.triu(np.full((n, n), -np.inf), 1)
        e = np.exp(scores - scores.max(-1, keepdims=True))
        out = (e / e.sum(-1, keepdims=True)) @ kv[..., nope:]
        return out.transpose(1, 0, 2).reshape(n, -1) @ w[p + "o_proj.weight"].T

    def rotate(self, x):
        """Rotary embedding of x [.., n, rope]; element 2i pairs with 2i+1. The models were trained with float32
        angles.
        """
        positions = np.arange(x.shape[-2], dtype=self.angle_type)
        angles = np.outer(positions, self.inv_freq.astype(self.angle_type)).astype(np.float64)
        cos, sin = np.cos(angles) * self.amplitude, np.sin(angles) * self.amplitude
        out = np.empty_like(x)
        out[..., 0::2] = x[..., 0::2] * cos - x[..., 1::2] * sin
        out[..., 1::2] = x[..., 0::2] * sin + x[..., 1::2] * cos
        return out

    def mlp(self, x, p):
        gate = x @ self.w[p + "gate_proj.weight"].T
        up = x @ self.w[p + "up_proj.weight"].T
        return (gate / (1 + np.exp(-gate)) * up) @ self.w[p + "down_proj.weight"].T

    def moe(self, x, p):
        out = self.mlp(x, p + "shared_experts.") if self.c.get("n_shared_experts") else np.zeros_like(x)
        ids, weights, margins = self.route(x, p)
        self.margins = np.minimum(self.margins, margins)
        for t in range(len(x)):
            for expert, weight in zip(ids[t], weights[t]):
                out[t] += weight * self.mlp(x[t], f"{p}experts.{expert}.")
        return out

    def route(self, x, p):
        """Returns expert ids and weights of each token and the smaller gap to a different choice (of groups or of
        experts).

        Gaps are in units of the score for sigmoid and in quarters of log units for softmax, so that both are
        comparable to errors of logits.
        """
        c = self.c
        z = x @ self.w[p + "gate.weight"].T
        sigmoid = c["scoring_func"] == "sigmoid"
        scores = 1 / (1 + np.exp(-z)) if sigmoid else softmax(z)
        choice = scores + self.w[p + "gate.e_score_correction_bias"] if c["topk_method"] == "noaux_tc" else scores
        n_group = 1 if c["topk_method"] == "greedy" else c.get("n_group") or 1
        groups = choice.reshape(len(x), n_group, -1)
        best = np.sort(groups, -1)
        group_scores = best[..., -2:].sum(-1) if c["topk_method"] == "noaux_tc" else best[..., -1]
        ids, weights, margins = [], [], []
        for t in range(len(x)):
            group_order = np.argsort(-group_scores[t], kind="stable")
            kept = group_order[: c["topk_group"]] if n_group > 1 else group_order
            masked = np.full(groups.shape[1:], -np.inf)
            masked[kept] = groups[t, kept]
            masked = masked.ravel()
            order = np.argsort(-masked, kind="stable")
            chosen = order[: c["num_experts_per_tok"]]
            ids.append(chosen)
            weights.append(self.combine(scores[t, chosen]))
            gaps = [gap(masked[order], len(chosen), sigmoid)]
            if n_group > 1:
                gaps.append(gap(group_scores[t, group_order], len(kept), sigmoid))
            margins.append(min(gaps))
        return ids, weights, np.array(margins)

    def combine(self, scores):
        """DeepSeek-V3 always scales; DeepSeek-V2 scales only what it does not renormalise."""
        c = self.c
        factor = c["routed_scaling_factor"]
        if not c["norm_topk_prob"] or len(scores) == 1:
            return scores * factor
        normalized = scores / (scores.sum() + 1e-20)
        return normalized * factor if c["topk_method"] == "noaux_tc" else normalized


def gap(ordered, k, sigmoid):
    """Distance between the k-th and the next element of a descending list."""
    if k >= len(ordered) or ordered[k] == -np.inf:
        return np.inf
    return ordered[k - 1] - ordered[k] if sigmoid else 0.25 * math.log(ordered[k - 1] / ordered[k])


def softmax(z):
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def rope_constants(dim, theta, scaling):
    """Returns (frequencies [dim / 2], amplitude of cos and sin, mscale of the softmax scale); YaRN when scaling is given."""
    i = np.arange(dim // 2)
    plain = theta ** (-2.0 * i / dim)
    if scaling is None:
        return plain, 1.0, 1.0
    factor, original = scaling["factor"], scaling["original_max_position_embeddings"]

    def correction(rotations):
        return dim * math.log(original / (2 * math.pi * rotations)) / (2 * math.log(theta))

    low = max(math.floor(correction(scaling["beta_fast"])), 0)
    high = min(math.ceil(correction(scaling["beta_slow"])), dim - 1)
    ramp = np.clip((i - low) / (high - low if high != low else 0.001), 0, 1)
    mscale_all = yarn_mscale(factor, scaling["mscale_all_dim"])
    return plain / factor * ramp + plain * (1 - ramp), yarn_mscale(factor, scaling["mscale"]) / mscale_all, mscale_all


def yarn_mscale(factor, m):
    return 1.0 if factor <= 1 else 0.1 * m * math.log(factor) + 1.0
