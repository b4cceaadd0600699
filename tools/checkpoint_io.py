"""Reads and writes small Hugging Face checkpoints: FP8 blocks of 128x128 with `weight_scale_inv`, INT4 packed as in
compressed-tensors, one file or shards.
"""

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

BLOCK = 128
FP8_MAX = 448.0


def quantize_fp8(weight, power_of_two_scales=False):
    """float32 [out, in] -> (float8_e4m3fn [out, in], float32 scales [ceil(out/128), ceil(in/128)]); scales multiply."""
    rows, columns = weight.shape
    padded = torch.zeros(-(-rows // BLOCK) * BLOCK, -(-columns // BLOCK) * BLOCK)
    padded[:rows, :columns] = weight
    blocks = padded.view(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // BLOCK, BLOCK)
    scales = blocks.abs().amax(dim=(1, 3)).clamp(min=1e-12) / FP8_MAX
    if power_of_two_scales:
        scales = torch.exp2(torch.ceil(torch.log2(scales)))
    scaled = (weight / spread(scales, rows, columns)).clamp(-FP8_MAX, FP8_MAX)
    return scaled.to(torch.float8_e4m3fn), scales


def quantize_int4(weight, group):
    """float32 [out, in] -> the tensors of compressed-tensors' "pack-quantized", symmetric INT4, by the suffixes of
    their names: weight_packed int32 [out, in / 8] (eight codes + 8 a word, the first in the lowest bits),
    weight_scale bfloat16 [out, in / group] (multiplies) and weight_shape int64 [2]. All sixteen codes are used: the
    largest magnitude is 7.5 steps.
    """
    rows, columns = weight.shape
    scales = (weight.view(rows, columns // group, group).abs().amax(dim=2) / 7.5).to(torch.bfloat16)
    codes = (weight / scales.float().repeat_interleave(group, 1)).round().clamp(-8, 7).to(torch.int64) + 8
    words = sum(codes[:, i::8] << (4 * i) for i in range(8))
    words = torch.where(words < 2**31, words, words - 2**32).to(torch.int32)
    return {"_packed": words, "_scale": scales, "_shape": torch.tensor([rows, columns])}


def dequantize_int4(words, scales, dtype=torch.float64):
    """Decodes the bytes of the words, not by inverting the packing: the low half of a byte precedes its high half."""
    octets = torch.from_numpy(words.numpy().view(np.uint8).copy())
    codes = torch.stack([octets % 16, octets // 16], dim=2).flatten(1).to(dtype) - 8
    return codes * scales.to(dtype).repeat_interleave(codes.shape[1] // scales.shape[1], 1)


def dequantize_fp8(quantized, scales, dtype=torch.float64):
    return quantized.to(dtype) * spread(scales.to(dtype), *quantized.shape)


def spread(scales, rows, columns):
    return scales.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]


def write_checkpoint(directory, config, tensors, shards=None):
    """tensors: name -> torch tensor. shards: None for one file, else a function name -> shard number 0..n-1."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    for stale in [*directory.glob("model*.safetensors"), *directory.glob("*.index.json")]:
        stale.unlink()
    write_json(directory / "config.json", config)
    tensors = {name: t.contiguous() for name, t in tensors.items()}
    if shards is None:
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        return
    count = max(shards(name) for name in tensors) + 1
    weight_map = {n: f"model-{shards(n) + 1:05d}-of-{count:06d}.safetensors" for n in sorted(tensors)}
    for file in sorted(set(weight_map.values())):
        part = {n: t for n, t in tensors.items() if weight_map[n] == file}
        save_file(part, directory / file, metadata={"format": "pt"})
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    write_json(directory / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})


def read_checkpoint(directory, dtype=torch.float64):
    """Returns (config, name -> decoded tensor of dtype). FP8 and INT4 weights are multiplied by their scales, which
    are dropped.
    """
    directory = Path(directory)
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    stored = {}
    for file in sorted(directory.glob("model*.safetensors")):
        stored.update(load_file(file))
    decoded = {}
    for name, tensor in stored.items():
        if name.endswith(("_scale_inv", "_scale", "_shape")):
            continue
        if name.endswith("_packed"):
            weight = name.removesuffix("_packed")
            decoded[weight] = dequantize_int4(tensor, stored[weight + "_scale"], dtype)
            assert list(decoded[weight].shape) == stored[weight + "_shape"].tolist()
            continue
        scales = stored.get(name + "_scale_inv")
        decoded[name] = tensor.to(dtype) if scales is None else dequantize_fp8(tensor, scales, dtype)
    return config, decoded


def as_numpy(tensors):
    return {name: t.numpy().astype(np.float64) for name, t in tensors.items()}


def write_json(path, value):
    Path(path).write_text(json.dumps(value, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
