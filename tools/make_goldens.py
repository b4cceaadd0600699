"""Writes tests/golden: tiny random checkpoints of every family and their logits in Hugging Face transformers.

    python -m tools.make_goldens --out tests/golden [--only v3_fp8] [--mtp-only]

For each family: random weights in the family's storage format, token sequences of 1, 17, 150 and 200 tokens, and the
logits of DeepseekV2/V3ForCausalLM in float32 with eager attention on the decoded weights. reference_model.py computes
the same logits in double precision; the script fails if the two differ by more than 5e-5 of the largest logit, so
that each checks the other. Tokens are drawn again until no routing decision is closer than ROUTING_MARGIN, so that a
correct engine in bfloat16 chooses the same experts. mtp_goldens.py adds the values of the multi-token-prediction (MTP)
layer where a family stores one.
"""

import argparse
import json
import math
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file

from tools import checkpoint_io as io
from tools.golden_families import families
from tools.mtp_goldens import mtp_goldens
from tools.reference_model import ReferenceModel

LENGTHS = [1, 17, 150, 200]
ALL_POSITIONS_LENGTH = 17  # logits of every position for this length, of the last position for the others
ROUTING_MARGIN = 0.01
AGREEMENT = 5e-5


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="directory that receives one folder per family")
    parser.add_argument("--only", help="name of a single family")
    parser.add_argument("--mtp-only", action="store_true",
                        help="keep the checkpoints and add the MTP layer's values to their golden.safetensors")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    make = add_mtp if args.mtp_only else make_golden
    print(f"transformers {transformers.__version__}, torch {torch.__version__}")
    for family in families():
        if args.only in (None, family.name):
            make(family, Path(args.out) / family.name, args.seed)


def make_golden(family, directory, seed):
    generator = torch.Generator().manual_seed(seed)
    tensors = store(family, random_weights(family, generator))
    shards = None if family.n_shards == 1 else shard_chooser(family.n_shards)
    io.write_checkpoint(directory, family.config, tensors, shards)

    config, decoded = io.read_checkpoint(directory)
    reference = ReferenceModel(config, io.as_numpy(decoded))
    oracle = transformers_model(config, decoded)
    golden, worst = {}, 0.0
    for length in LENGTHS:
        tokens = draw_tokens(reference, config["vocab_size"], length, np.random.default_rng(seed + length))
        with torch.no_grad():
            logits = oracle(torch.tensor([tokens])).logits[0].float()
        expected = reference.logits(tokens)
        worst = max(worst, np.abs(logits.numpy() - expected).max() / np.abs(expected).max())
        golden[f"tokens_{length}"] = torch.tensor(tokens, dtype=torch.int32)
        golden[f"logits_{length}"] = (logits if length == ALL_POSITIONS_LENGTH else logits[-1]).contiguous()
    save_file(golden, directory / "golden.safetensors")
    size = sum(f.stat().st_size for f in directory.iterdir())
    rms = expected.std()
    print(f"{family.name:16s} {size / 1e6:5.2f} MB  logit rms {rms:.2f}  transformers vs reference {worst:.1e} of the largest logit")
    if worst > AGREEMENT:
        raise SystemExit(f"{family.name}: transformers and reference_model.py disagree by {worst:.1e} of the largest logit")
    add_mtp(family, directory, seed)


def add_mtp(family, directory, seed):
    """Adds the MTP layer's values to golden.safetensors of a family that stores the layer; other tensors stay."""
    if not family.config.get("num_nextn_predict_layers"):
        return
    config, decoded = io.read_checkpoint(directory)
    reference = ReferenceModel(config, io.as_numpy(decoded))
    golden, worst = mtp_goldens(reference, transformers_model(config, decoded), decoded, seed)
    print(f"{family.name:16s} MTP layer: transformers vs reference {worst:.1e} of the largest logit")
    if worst > AGREEMENT:
        raise SystemExit(f"{family.name}: transformers and reference_model.py disagree about the MTP layer by {worst:.1e}")
    path = directory / "golden.safetensors"
    kept = {name: tensor.clone() for name, tensor in load_file(path).items()}  # not a map of the file that is replaced
    save_file(kept | golden, path)


def random_weights(family, generator):
    """float32 tensors by name: matrices of variance gain^2 / fan_in, norm gains around 1, a bias that makes scores
    negative.
    """
    tensors = {}
    for name, shape in tensor_shapes(family.config).items():
        gain = math.prod(factor for part, factor in family.gains if part in name)
        x = torch.randn(shape, generator=generator)
        if name.endswith("norm.weight"):
            tensors[name] = 1.0 + 0.25 * x
        elif name.endswith("e_score_correction_bias"):
            tensors[name] = -0.45 + 0.25 * x
        elif "embed_tokens" in name:
            tensors[name] = gain * x
        elif "kv_a_proj_with_mqa" in name:
            scale = torch.ones(shape[0], 1)
            scale[: family.config["kv_lora_rank"]] = gain  # only the latent rows, because k_pe is not normalised
            tensors[name] = scale * x / math.sqrt(shape[1])
        else:
            kind = {"lm_head": 2.0, "mlp.gate.": 1.5, "down_proj": 0.7}
            tensors[name] = gain * next((v for k, v in kind.items() if k in name), 1.0) * x / math.sqrt(shape[1])
    if family.config.get("num_nextn_predict_layers"):
        share_mtp_embedding(tensors, family.config)
    return tensors


def share_mtp_embedding(tensors, config):
    p = f"model.layers.{config['num_hidden_layers']}."
    tensors[p + "embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[p + "shared_head.head.weight"] = tensors["lm_head.weight"].clone()


def tensor_shapes(c):
    d, vocab = c["hidden_size"], c["vocab_size"]
    shapes = {"model.embed_tokens.weight": (vocab, d), "model.norm.weight": (d,)}
    if not c["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, d)
    for layer in range(c["num_hidden_layers"] + c.get("num_nextn_predict_layers", 0)):
        p = f"model.layers.{layer}."
        shapes |= attention_shapes(c, p) | mlp_shapes(c, p + "mlp.", layer)
        shapes |= {p + "input_layernorm.weight": (d,), p + "post_attention_layernorm.weight": (d,)}
        if layer >= c["num_hidden_layers"]:
            shapes |= {p + f"{n}norm.weight": (d,) for n in ("e", "h", "shared_head.")}
            shapes |= {p + "embed_tokens.weight": (vocab, d), p + "shared_head.head.weight": (vocab, d)}
            shapes[p + "eh_proj.weight"] = (d, 2 * d)
    return shapes


def attention_shapes(c, p):
    d, heads, p = c["hidden_size"], c["num_attention_heads"], p + "self_attn."
    nope, rope, v, q_rank, kv_rank = (
        c[k] for k in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "q_lora_rank", "kv_lora_rank"))
    shapes = {
        p + "kv_a_proj_with_mqa.weight": (kv_rank + rope, d),
        p + "kv_a_layernorm.weight": (kv_rank,),
        p + "kv_b_proj.weight": (heads * (nope + v), kv_rank),
        p + "o_proj.weight": (d, heads * v),
    }
    if q_rank is None:
        return shapes | {p + "q_proj.weight": (heads * (nope + rope), d)}
    return shapes | {
        p + "q_a_proj.weight": (q_rank, d),
        p + "q_a_layernorm.weight": (q_rank,),
        p + "q_b_proj.weight": (heads * (nope + rope), q_rank),
    }


def mlp_shapes(c, p, layer):
    def gated(prefix, width):
        d = c["hidden_size"]
        return {prefix + "gate_proj.weight": (width, d), prefix + "up_proj.weight": (width, d),
                prefix + "down_proj.weight": (d, width)}

    if layer < c["first_k_dense_replace"]:
        return gated(p, c["intermediate_size"])
    shapes = {p + "gate.weight": (c["n_routed_experts"], c["hidden_size"])}
    if c["topk_method"] == "noaux_tc":
        shapes[p + "gate.e_score_correction_bias"] = (c["n_routed_experts"],)
    for expert in range(c["n_routed_experts"]):
        shapes |= gated(f"{p}experts.{expert}.", c["moe_intermediate_size"])
    return shapes | gated(p + "shared_experts.", c["n_shared_experts"] * c["moe_intermediate_size"])


def store(family, tensors):
    """Converts float32 tensors to the family's storage types. Only projections become FP8 and only routed experts
    INT4; the selection bias stays float32.
    """
    half = torch.float16 if family.storage == "F16" else torch.bfloat16
    stored = {}
    for name, tensor in tensors.items():
        if name.endswith("e_score_correction_bias"):
            stored[name] = tensor
        elif family.storage.startswith("FP8") and "_proj" in name and "eh_proj" not in name:
            stored[name], stored[name + "_scale_inv"] = io.quantize_fp8(tensor, family.storage == "FP8_UE8M0")
        elif family.storage == "INT4" and ".experts." in name:
            parts = io.quantize_int4(tensor, int4_group(family.config))
            stored |= {name + end: part for end, part in parts.items()}
        else:
            stored[name] = tensor.to(half)
    if family.inv_freq_buffers:
        c = family.config
        frequencies = c["rope_theta"] ** (-torch.arange(0, c["qk_rope_head_dim"], 2) / c["qk_rope_head_dim"])
        for layer in range(c["num_hidden_layers"]):
            stored[f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"] = frequencies.clone()
    return stored


def int4_group(config):
    return config["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"]


def shard_chooser(count):
    """Distributes tensors over shards by name, so that a weight and its weight_scale_inv are often in different
    files.
    """
    return lambda name: sum(name.encode()) % count


def transformers_model(config, decoded):
    """The float32 transformers model of a decoded checkpoint, without its MTP layer and quantisation entry."""
    surplus = f"model.layers.{config['num_hidden_layers']}."
    plain = {k: v for k, v in config.items() if k != "quantization_config"}
    plain |= {"num_nextn_predict_layers": 0} if "num_nextn_predict_layers" in config else {}
    plain["model_type"] = plain["model_type"].replace("kimi_k2", "deepseek_v3")  # the same architecture under another name
    tensors = {n: t.float() for n, t in decoded.items() if not n.startswith(surplus) and "rotary_emb" not in n}
    with tempfile.TemporaryDirectory() as directory:
        io.write_checkpoint(directory, plain, tensors)
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
    if info["missing_keys"] or info["unexpected_keys"] or info["mismatched_keys"]:
        raise SystemExit(f"transformers did not take the checkpoint as it is: {json.dumps(info, default=list)}")
    return model.eval()


def draw_tokens(reference, vocab, length, rng):
    """Draws random tokens until all routing decisions have a margin of ROUTING_MARGIN; replaces the first close one
    each time.
    """
    tokens = rng.integers(0, vocab, length).tolist()
    while True:
        reference.hidden(tokens)
        close = np.flatnonzero(reference.margins < ROUTING_MARGIN)
        if len(close) == 0:
            return tokens
        tokens[close[0]] = int(rng.integers(0, vocab))


if __name__ == "__main__":
    main()
