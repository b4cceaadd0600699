"""Writes the trained parameters as a Hugging Face checkpoint in R1's storage: FP8 blocks, bfloat16, float32 bias, MTP layer.

    python -m tools.tiny_r1.export --parameters tiny-r1.pt --out models/tiny-r1

Adds config.json, generation_config.json and model.safetensors to the directory that tokenizer.py has filled.
"""

import argparse
from pathlib import Path

import torch

from tools import checkpoint_io as io
from tools.tiny_r1.config import CONFIG

GENERATION_CONFIG = {
    "_from_model_config": True, "bos_token_id": 0, "eos_token_id": 1, "do_sample": True, "temperature": 0.6, "top_p": 0.95,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", required=True, help="file written by train.py")
    parser.add_argument("--out", required=True, help="model directory")
    args = parser.parse_args()
    named = checkpoint_tensors(torch.load(args.parameters, weights_only=True))
    stored = {}
    for name, tensor in named.items():
        if "_proj." in name and "eh_proj" not in name:
            stored[name], stored[name + "_scale_inv"] = io.quantize_fp8(tensor)
        else:
            stored[name] = tensor if name.endswith("e_score_correction_bias") else tensor.to(torch.bfloat16)
    io.write_checkpoint(args.out, CONFIG, stored)
    io.write_json(Path(args.out) / "generation_config.json", GENERATION_CONFIG)


def checkpoint_tensors(parameters):
    """Our parameter names to Hugging Face's; float32 still."""
    mtp = f"layers.{CONFIG['num_hidden_layers']}."
    renames = [("mtp.block.", mtp), ("mtp.norm.", mtp + "shared_head.norm."), ("mtp.", mtp)]
    tensors = {"lm_head.weight": parameters["lm_head"]}
    for name, tensor in parameters.items():
        for ours, theirs in renames:
            if name.startswith(ours):
                name = theirs + name.removeprefix(ours)
        if name == "lm_head":
            continue
        if "experts_" in name and "shared_experts" not in name:
            tensors |= split_experts(name, tensor)
        elif name.endswith("mlp.bias"):
            tensors["model." + name.removesuffix("bias") + "gate.e_score_correction_bias"] = tensor
        else:
            tensors["model." + name.removesuffix(".weight") + ".weight"] = tensor
    tensors[f"model.{mtp}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"model.{mtp}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    return tensors


def split_experts(name, stacked):
    """experts_gate_up [experts, 2 * width, hidden] and experts_down [experts, hidden, width] to one tensor per expert."""
    prefix, kind = "model." + name.split("experts_")[0], name.split("experts_")[1]
    tensors = {}
    for e, matrix in enumerate(stacked):
        parts = zip(("gate", "up"), matrix.chunk(2)) if kind == "gate_up" else [("down", matrix)]
        tensors |= {f"{prefix}experts.{e}.{part}_proj.weight": m.clone() for part, m in parts}
    return tensors


if __name__ == "__main__":
    main()
