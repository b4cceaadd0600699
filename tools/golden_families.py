"""The tiny configurations for tests/golden: one for each model family, with the keys of the family's real
config.json.

Widths are a hundredth of the real ones; everything that selects a formula (routing method, scaling, YaRN, epsilon,
layout) is as in the real model. original_max_position_embeddings is 64, so that sequences of 150 and 200 tokens
exceed it.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    name: str
    config: dict
    storage: str  # "BF16", "F16", "FP8" or "FP8_UE8M0" (power-of-two scales) for the matrices; "INT4": routed experts, others BF16
    n_shards: int = 1
    gains: tuple = ()  # (part of a tensor name, factor): overrides the random scale where the default hides a formula
    inv_freq_buffers: bool = False  # store the rotary_emb.inv_freq buffers that some exports carry

SMALL_EXPERTS = (("mlp.experts.", 0.6),)  # with a routed_scaling_factor of 16 the experts' rounding would otherwise exceed everything else


def families():
    return [v2_lite(), v2(), v2_5(), v3_bf16(), v3_fp8(), v3_1_fp8(), kimi_k2(), kimi_k2_thinking(), moonlight(), moonlight_tied()]


def v2_lite():
    return Family("v2_lite", deepseek_v2(
        q_lora_rank=None, topk_method="greedy", n_group=1, topk_group=1, routed_scaling_factor=1.0,
        n_routed_experts=8, num_experts_per_tok=3, rope_scaling=yarn(mscale=0.707)), "BF16")


def v2():
    return Family("v2", deepseek_v2(
        q_lora_rank=48, topk_method="group_limited_greedy", n_group=4, topk_group=2, routed_scaling_factor=16.0,
        n_routed_experts=12, num_experts_per_tok=4, rope_scaling=yarn(mscale=0.707)), "BF16", gains=SMALL_EXPERTS)


def v2_5():
    return Family("v2_5", deepseek_v2(
        q_lora_rank=40, topk_method="group_limited_greedy", n_group=4, topk_group=2, routed_scaling_factor=16.0,
        n_routed_experts=8, num_experts_per_tok=3, rope_scaling=yarn(mscale=1.0)), "BF16", gains=SMALL_EXPERTS)


def v3_bf16():
    return Family("v3_bf16", deepseek_v3(num_nextn_predict_layers=0, n_routed_experts=16, num_experts_per_tok=6), "BF16")


def v3_fp8():
    """R1's layout: FP8 with ragged blocks (kv_a has 160 rows where R1 has 576) and a stored MTP layer."""
    return Family("v3_fp8", deepseek_v3(
        vocab_size=128, hidden_size=136, intermediate_size=200, moe_intermediate_size=24, q_lora_rank=132, kv_lora_rank=128,
        qk_nope_head_dim=24, qk_rope_head_dim=32, v_head_dim=40, quantization_config=fp8()), "FP8")


def v3_1_fp8():
    return Family("v3_1_fp8", deepseek_v3(
        vocab_size=128, hidden_size=48, num_attention_heads=3, num_key_value_heads=3, intermediate_size=264,
        moe_intermediate_size=136, q_lora_rank=40, kv_lora_rank=140, qk_nope_head_dim=32, v_head_dim=24,
        quantization_config=fp8(scale_fmt="ue8m0")), "FP8_UE8M0")


def kimi_k2():
    return Family("kimi_k2", deepseek_v3(
        model_type="kimi_k2", vocab_size=160, hidden_size=96, num_attention_heads=2, num_key_value_heads=2,
        intermediate_size=160, moe_intermediate_size=48, kv_lora_rank=130, n_routed_experts=12, num_experts_per_tok=4,
        n_group=1, topk_group=1, routed_scaling_factor=2.827, num_nextn_predict_layers=0, rope_theta=50000.0,
        max_position_embeddings=2048, rope_scaling=yarn(factor=32.0, beta_fast=1.0, beta_slow=1.0), quantization_config=fp8()), "FP8", n_shards=3)


def kimi_k2_thinking():
    """Routed experts in INT4 with groups of 32, as compressed-tensors stores them; rms_norm_eps and YaRN differ from
    Kimi-K2.
    """
    return Family("kimi_k2_thinking", deepseek_v3(
        model_type="kimi_k2", vocab_size=160, hidden_size=96, num_attention_heads=2, num_key_value_heads=2,
        intermediate_size=160, moe_intermediate_size=64, kv_lora_rank=130, n_routed_experts=12, num_experts_per_tok=4,
        n_group=1, topk_group=1, routed_scaling_factor=2.827, num_nextn_predict_layers=0, rope_theta=50000.0, rms_norm_eps=1e-05,
        max_position_embeddings=4096, rope_scaling=yarn(factor=64.0, beta_fast=1.0, beta_slow=1.0),
        quantization_config=packed_int4()), "INT4", n_shards=3)


def moonlight():
    """Small embeddings and latents, because rms_norm_eps of 1e-5 (1e-6 for the latents) matters only beside small
    squares.
    """
    gains = (("embed_tokens", 0.01), ("kv_a_proj_with_mqa", 0.01), ("q_proj", 1.5))
    return Family("moonlight", moonlight_config(), "BF16", gains=gains, inv_freq_buffers=True)


def moonlight_tied():
    gains = (("embed_tokens", 0.3), ("kv_a_proj_with_mqa", 0.01))
    return Family("moonlight_tied", moonlight_config(tie_word_embeddings=True, vocab_size=128), "F16", gains=gains)


def moonlight_config(**changes):
    config = deepseek_v3(
        q_lora_rank=None, n_group=1, topk_group=1, n_shared_experts=2, num_experts_per_tok=3, routed_scaling_factor=2.446,
        rms_norm_eps=1e-05, rope_theta=50000.0, rope_scaling=None, max_position_embeddings=8192,
        num_nextn_predict_layers=0)
    return config | changes


def deepseek_v2(**changes):
    config = common() | {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "n_shared_experts": 2,
        "norm_topk_prob": False,
        "scoring_func": "softmax",
    }
    return config | changes


def deepseek_v3(**changes):
    config = common() | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "n_group": 4,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_experts_per_tok": 3,
        "num_nextn_predict_layers": 1,
        "q_lora_rank": 48,
        "rope_scaling": yarn(),
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "topk_group": 2,
        "topk_method": "noaux_tc",
    }
    return config | changes


def common():
    return {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "aux_loss_alpha": 0.001,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "first_k_dense_replace": 1,
        "hidden_act": "silu",
        "hidden_size": 64,
        "initializer_range": 0.02,
        "intermediate_size": 96,
        "kv_lora_rank": 32,
        "max_position_embeddings": 2560,
        "moe_intermediate_size": 32,
        "moe_layer_freq": 1,
        "num_attention_heads": 4,
        "num_hidden_layers": 3,
        "num_key_value_heads": 4,
        "pretraining_tp": 1,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "rms_norm_eps": 1e-06,
        "rope_theta": 10000,
        "seq_aux": True,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "v_head_dim": 16,
        "vocab_size": 192,
    }


def yarn(mscale=1.0, factor=40, beta_fast=32, beta_slow=1):
    return {
        "beta_fast": beta_fast,
        "beta_slow": beta_slow,
        "factor": factor,
        "mscale": mscale,
        "mscale_all_dim": mscale,
        "original_max_position_embeddings": 64,
        "type": "yarn",
    }


def fp8(**more):
    base = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
    return base | more


def packed_int4():
    """The quantization_config of Kimi-K2-Thinking."""
    weights = {"actorder": None, "block_structure": None, "dynamic": False, "group_size": 32, "num_bits": 4, "observer": "minmax",
               "observer_kwargs": {}, "strategy": "group", "symmetric": True, "type": "int"}
    group = {"input_activations": None, "output_activations": None, "targets": ["Linear"], "weights": weights}
    ignore = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"]
    return {"config_groups": {"group_0": group}, "format": "pack-quantized", "ignore": ignore, "kv_cache_scheme": None,
            "quant_method": "compressed-tensors", "quantization_status": "compressed"}
