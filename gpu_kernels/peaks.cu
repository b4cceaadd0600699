#include "clock.h"
#include "device.h"
#include "gpu_kernels/peaks.h"
#include "packed.h"

namespace tandem::gpu {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kUnderWay = 4;        // loads in flight per thread
constexpr int kSums = 8;            // independent chains of a warp's mma, or of a thread
constexpr int kChains = 16;         // passes over a thread's sums per round
constexpr float kNever = 1.25e30f;  // no sum reaches it, which the compiler cannot know

struct ReadArgs {
  const uint4* data;
  int64_t n;
  uint32_t* out;
};

__global__ void read_kernel(const __grid_constant__ ReadArgs a) {
  const int64_t step = int64_t{gridDim.x} * kThreads;
  uint32_t sum = 0;
  const auto take = [&](uint4 v) { sum ^= v.x ^ v.y ^ v.z ^ v.w; };
  int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  for (; i + (kUnderWay - 1) * step < a.n; i += kUnderWay * step) {
    uint4 v[kUnderWay];
#pragma unroll
    for (int j = 0; j < kUnderWay; ++j) v[j] = load_once_16(a.data + i + j * step);
#pragma unroll
    for (int j = 0; j < kUnderWay; ++j) take(v[j]);
  }
  for (; i < a.n; i += step) take(load_once_16(a.data + i));
  if (sum == 0x2c0ffee5u) *a.out = sum;
}

struct MultiplyArgs {
  int rounds;
  float* out;
};

__device__ void store_if_never(const float (&sums)[kSums][4], const MultiplyArgs& a) {
  float all = 0;
#pragma unroll
  for (int i = 0; i < kSums; ++i) all += sums[i][0] + sums[i][1] + sums[i][2] + sums[i][3];
  if (all == kNever) *a.out = all;
}

__global__ void multiply_bf16_kernel(const __grid_constant__ MultiplyArgs a) {
  const uint32_t one = 0x3f803f80u + threadIdx.x % 32;  // pairs of numbers near 1
  const uint32_t left[4] = {one, one + 1, one + 2, one + 3};
  float sums[kSums][4] = {};
  for (int round = 0; round < a.rounds; ++round) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) mma_m16n8k16(sums[i], left, one + i, one - i);
  }
  store_if_never(sums, a);
}

__global__ void multiply_fp8_kernel(const __grid_constant__ MultiplyArgs a) {
  const uint32_t one = 0x38383838u + threadIdx.x % 8;  // four numbers near 1
  const uint32_t left[4] = {one, one + 1, one + 2, one + 3};
  float sums[kSums][4] = {};
  for (int round = 0; round < a.rounds; ++round) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) mma_m16n8k32_e4m3(sums[i], left, one + i, one - i);
  }
  store_if_never(sums, a);
}

__global__ void multiply_f32_kernel(const __grid_constant__ MultiplyArgs a) {
  const float x = 1.0f - 1e-7f * static_cast<float>(threadIdx.x);
  float sums[kSums] = {};
  for (int round = 0; round < a.rounds; ++round) {
#pragma unroll
    for (int i = 0; i < kSums * kChains; ++i) sums[i % kSums] = fmaf(sums[i % kSums], x, x);
  }
  float all = 0;
#pragma unroll
  for (int i = 0; i < kSums; ++i) all += sums[i];
  if (all == kNever) *a.out = all;
}

struct IdleArgs {
  int64_t cycles;
};

__global__ void idle_kernel(const __grid_constant__ IdleArgs a) {
  const int64_t end = cycles() + a.cycles;
  while (cycles() < end) {
  }
}

}  // namespace

void read_once(const Stream& stream, const void* data, int64_t bytes, int blocks, uint32_t* out) {
  launch(read_kernel, {.grid_x = blocks, .threads = kThreads}, stream,
         {static_cast<const uint4*>(data), bytes / 16, out});
}

int64_t multiply_bf16(const Stream& stream, int blocks, int rounds, float* out) {
  launch(multiply_bf16_kernel, {.grid_x = blocks, .threads = kThreads}, stream, {rounds, out});
  return int64_t{blocks} * kWarps * rounds * kSums * (16 * 8 * 16 * 2);
}

int64_t multiply_fp8(const Stream& stream, int blocks, int rounds, float* out) {
  launch(multiply_fp8_kernel, {.grid_x = blocks, .threads = kThreads}, stream, {rounds, out});
  return int64_t{blocks} * kWarps * rounds * kSums * (16 * 8 * 32 * 2);
}

int64_t multiply_f32(const Stream& stream, int blocks, int rounds, float* out) {
  launch(multiply_f32_kernel, {.grid_x = blocks, .threads = kThreads}, stream, {rounds, out});
  return int64_t{blocks} * kThreads * rounds * kSums * kChains * 2;
}

void idle_cycles(const Stream& stream, int64_t cycles) {
  launch(idle_kernel, {.threads = 1}, stream, {cycles});
}

}  // namespace tandem::gpu
