"""Writes a checkpoint of R1's shapes with few layers and experts and random FP8 weights, to measure `tandem serve`
with matrices that are read from memory: 3 layers (1 dense), 16 experts, tiny-r1's vocabulary of 512; 2.5 GB. Needs
only Python.

    python3 tools/cut_checkpoint.py FOLDER [--layers 3] [--dense 1] [--experts 16]

A layer with all 256 experts takes 11.6 GB.
"""
import argparse
import json
import pathlib
import random
import shutil
import struct

ROOT = pathlib.Path(__file__).resolve().parent.parent
VOCAB, HIDDEN, DENSE, EXPERT, HEADS = 512, 7168, 18432, 2048, 128
BYTES = {"F8_E4M3": 1, "BF16": 2, "F32": 4}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", metavar="FOLDER", type=pathlib.Path)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--dense", type=int, default=1, help="the first layers, which have no experts (1)")
    parser.add_argument("--experts", type=int, default=16, help="of a layer: a multiple of 8, of which a token uses 8 (16)")
    chosen = parser.parse_args()
    if not 0 <= chosen.dense <= chosen.layers or chosen.layers < 1 or chosen.experts < 16 or chosen.experts % 8:
        parser.error("--layers is at least 1, --dense at most that, and --experts a multiple of 8 from 16 on")
    folder = chosen.folder
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((ROOT / "models/configs/r1.json").read_text(encoding="utf-8"))
    config.update(num_hidden_layers=chosen.layers, first_k_dense_replace=chosen.dense, n_routed_experts=chosen.experts, vocab_size=VOCAB,
                  num_nextn_predict_layers=0)
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(ROOT / "models" / "tiny-r1" / name, folder)
    write(folder / "model.safetensors", list(tensors(chosen)))


def tensors(chosen):
    """(name, type, shape) of every tensor, with Hugging Face's names."""
    yield "model.embed_tokens.weight", "BF16", [VOCAB, HIDDEN]
    yield "model.norm.weight", "BF16", [HIDDEN]
    yield "lm_head.weight", "BF16", [VOCAB, HIDDEN]
    for layer in range(chosen.layers):
        at = f"model.layers.{layer}."
        for norm, n in (("input_layernorm", HIDDEN), ("post_attention_layernorm", HIDDEN), ("self_attn.q_a_layernorm", 1536),
                        ("self_attn.kv_a_layernorm", 512)):
            yield at + norm + ".weight", "BF16", [n]
        for name, rows, columns in (("q_a_proj", 1536, HIDDEN), ("q_b_proj", HEADS * 192, 1536), ("kv_a_proj_with_mqa", 576, HIDDEN),
                                    ("kv_b_proj", HEADS * 256, 512), ("o_proj", HIDDEN, HEADS * 128)):
            yield from matrix(at + "self_attn." + name, rows, columns)
        if layer < chosen.dense:
            yield from feed_forward(at + "mlp.", DENSE)
            continue
        yield at + "mlp.gate.weight", "BF16", [chosen.experts, HIDDEN]
        yield at + "mlp.gate.e_score_correction_bias", "F32", [chosen.experts]
        for part in ["shared_experts", *(f"experts.{e}" for e in range(chosen.experts))]:
            yield from feed_forward(f"{at}mlp.{part}.", EXPERT)


def feed_forward(at, width):
    for name, rows, columns in (("gate_proj", width, HIDDEN), ("up_proj", width, HIDDEN), ("down_proj", HIDDEN, width)):
        yield from matrix(at + name, rows, columns)


def matrix(name, rows, columns):
    yield name + ".weight", "F8_E4M3", [rows, columns]
    yield name + ".weight_scale_inv", "F32", [-(-rows // 128), -(-columns // 128)]


def write(path, listed):
    header, end = {}, 0
    for name, dtype, shape in listed:
        n_bytes = BYTES[dtype] * shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + n_bytes]}
        end += n_bytes
    text = json.dumps(header).encode()
    rng = random.Random(1)
    # FP8 with magnitudes from 0.25 to 1.9 and either sign; BF16 from 0.008 to 0.06.
    fp8 = rng.randbytes(1 << 22).translate(bytes((b & 0x80) | ((5 + (b >> 3) % 3) << 3) | (b & 7) for b in range(256)))
    bf16 = b"".join(bytes((b, 0x3C | (b & 0x80))) for b in rng.randbytes(1 << 16))
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, dtype, shape in listed:
            begin, finish = header[name]["data_offsets"]
            if dtype == "F32":
                one = struct.pack("<f", 0.0 if name.endswith("bias") else 0.015)
            else:
                one = fp8 if dtype == "F8_E4M3" else b"\x80\x3f" if "norm" in name else bf16
            write_repeated(file, one, finish - begin)


def write_repeated(file, one, n_bytes):
    for at in range(0, n_bytes, len(one) if len(one) > 4 else 1 << 20):
        left = n_bytes - at
        file.write(one[:left] if len(one) > 4 else one * (min(left, 1 << 20) // len(one)))


if __name__ == "__main__":
    main()
