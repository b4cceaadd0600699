"""Writes tests/golden/t1: a float32 deepseek_v3 checkpoint so small that its weights come from a formula, and its
logits.

    python -m tools.make_t1 --out tests/golden/t1

Weight rule: the 32-bit FNV-1a hash of a tensor's name seeds the generator state = state * 1664525 + 1013904223 (mod
2^32); each element, in row-major order, is float32(offset + amplitude * (2u - 1)) with u = (state >> 8) / 2^24. Any
implementation can make these weights without a file. reference_model.py computes the logits in double precision; they
are checked against EXPECTED, the numbers of an independent implementation. The MTP layer shares the embedding and the
head.
"""

import argparse
import math
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from tools import checkpoint_io as io
from tools.golden_families import deepseek_v3, yarn
from tools.make_goldens import AGREEMENT, tensor_shapes, transformers_model
from tools.mtp_goldens import disagreement, transformers_mtp
from tools.reference_model import ReferenceModel

PROMPT = [3, 1, 4, 1, 5]
LONG_PROMPT = [(7 * i + 3) % 32 for i in range(40)]
CONFIG = deepseek_v3(
    vocab_size=32, hidden_size=16, num_attention_heads=2, num_key_value_heads=2, q_lora_rank=8, kv_lora_rank=8,
    qk_nope_head_dim=4, qk_rope_head_dim=8, v_head_dim=4, intermediate_size=24, moe_intermediate_size=8,
    max_position_embeddings=163840, rope_scaling=yarn() | {"original_max_position_embeddings": 4096}, torch_dtype="float32")
EXPECTED = {
    "logits_5": [0.449801305, -1.131572497, 1.579666978, 1.121415457, -0.134841701, 0.389253419, 0.651399470, -1.448245215],
    "hidden_5": [0.917068503, -0.595782685, -0.349367151, 0.701101308],
    "logits_40": [0.161131617, 0.556017835, -1.928754910, -0.643403258],
    "mtp_logits_5": [1.126559386, -1.289769461, 1.106651585, 1.085845298],
}  # the first values at the last position
EXPECTED_GREEDY = [2, 19, 4, 17, 11, 31, 31, 31]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    directory = Path(parser.parse_args().out)
    weights = {name: formula_weight(name, shape) for name, shape in tensor_shapes(CONFIG).items()}
    weights["model.layers.3.embed_tokens.weight"] = weights["model.embed_tokens.weight"]
    weights["model.layers.3.shared_head.head.weight"] = weights["lm_head.weight"]
    io.write_checkpoint(directory, CONFIG, {n: torch.from_numpy(w).clone() for n, w in weights.items()})

    model = ReferenceModel(CONFIG, {n: w.astype(np.float64) for n, w in weights.items()}, angle_type=np.float64)
    hidden, greedy = model.hidden(PROMPT), greedy_tokens(model, PROMPT, len(EXPECTED_GREEDY))
    next_tokens = PROMPT[1:] + greedy[:1]
    results = {
        "hidden_5": hidden,
        "logits_5": model.head(hidden),
        "logits_40": model.logits(LONG_PROMPT),
        "mtp_logits_5": model.mtp_logits(hidden, next_tokens),
        "mtp_second_logits_5": model.mtp_second_logits(hidden, next_tokens),
    }
    for name, values in EXPECTED.items():
        assert np.allclose(results[name][-1][: len(values)], values, rtol=0, atol=2e-9), name
    assert greedy == EXPECTED_GREEDY, greedy
    check_mtp(directory, [*PROMPT, greedy[0]], results)
    tokens = {"tokens_5": PROMPT, "tokens_40": LONG_PROMPT, "greedy_5": greedy, "mtp_tokens_5": PROMPT,
              "mtp_next_tokens_5": next_tokens}
    golden = {n: torch.from_numpy(r.astype(np.float32)) for n, r in results.items()}
    golden |= {n: torch.tensor(t, dtype=torch.int32) for n, t in tokens.items()}
    save_file(golden, directory / "golden.safetensors")


def check_mtp(directory, tokens, results):
    """The MTP layer of transformers, in float32, gives the same logits."""
    config, decoded = io.read_checkpoint(directory)
    oracle = transformers_model(config, decoded)
    worst = disagreement(oracle, transformers_mtp(oracle, decoded), tokens, results)
    print(f"t1               MTP layer: transformers vs reference {worst:.1e} of the largest logit")
    assert worst <= AGREEMENT, worst


def formula_weight(name, shape):
    offset, amplitude = 0.0, math.sqrt(3.0 / shape[-1])
    if name.endswith("norm.weight"):
        offset, amplitude = 1.0, 0.1
    elif name.endswith("e_score_correction_bias"):
        amplitude = 0.2
    elif name == "model.embed_tokens.weight":
        amplitude = 1.0
    state, values = fnv1a(name), np.empty(math.prod(shape))
    for i in range(len(values)):
        state = (state * 1664525 + 1013904223) % 2**32
        values[i] = offset + amplitude * (2.0 * ((state >> 8) / 2**24) - 1.0)
    return values.astype(np.float32).reshape(shape)


def fnv1a(text):
    state = 2166136261
    for byte in text.encode():
        state = (state ^ byte) * 16777619 % 2**32
    return state


def greedy_tokens(model, prompt, count):
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(model.logits(tokens)[-1].argmax()))
    return tokens[len(prompt):]


if __name__ == "__main__":
    main()
