// Kernels that only show what a card can do: what rooflines of the others are made of.
#pragma once
#include "gpu_kernels/runtime.h"

namespace tandem::gpu {

// Reads `bytes`, a multiple of 16, once, with `blocks` blocks. `out`: a word that is never written.
void read_once(const Stream& stream, const void* data, int64_t bytes, int blocks, uint32_t* out);

// The instructions by which kernels multiply: mma of BF16 with float sums, of FP8 (on a card with
// Card::fp8_mma) likewise, and multiply-add of floats. Each of `blocks` blocks repeats as many as
// the registers hold `rounds` times. Return the operations, a multiplication and an addition being
// two.
int64_t multiply_bf16(const Stream& stream, int blocks, int rounds, float* out);
int64_t multiply_fp8(const Stream& stream, int blocks, int rounds, float* out);
int64_t multiply_f32(const Stream& stream, int blocks, int rounds, float* out);

// One thread does nothing for so many cycles of its multiprocessor.
void idle_cycles(const Stream& stream, int64_t cycles);

}  // namespace tandem::gpu
