// Kernels that measure the peak rates of a GPU, for rooflines of the other kernels.
#pragma once
#include "gpu_kernels/launch_shape.h"

namespace tandem::gpu {

// Reads `bytes`, a multiple of 16, once, with `blocks` blocks. `out`: a word that is never written.
void read_once(const Stream& stream, const void* data, int64_t bytes, int blocks, uint32_t* out);

// The instructions of the product kernels: mma of BF16 with float sums, mma of FP8 likewise (needs
// GpuInfo::fp8_mma), and multiply-add of floats. Each of `blocks` blocks fills its registers with
// independent chains and repeats them `rounds` times. Return the number of operations; a
// multiplication and an addition count as two.
int64_t multiply_bf16(const Stream& stream, int blocks, int rounds, float* out);
int64_t multiply_fp8(const Stream& stream, int blocks, int rounds, float* out);
int64_t multiply_f32(const Stream& stream, int blocks, int rounds, float* out);

// One thread waits for `cycles` cycles of its multiprocessor.
void idle_cycles(const Stream& stream, int64_t cycles);

}  // namespace tandem::gpu
