// Functions of single columns and of pairs of columns, for kernels.
#pragma once
#include "device.h"

namespace tandem::gpu {

// silu(gate) * up
__device__ inline float gated(float gate, float up) { return gate / (1 + expf(-gate)) * up; }

// The rotation by position * frequency. Uses the precise sincosf of the full angle, like the CPU:
// at positions around 10^5 fast sines are useless.
__device__ inline float2 rotated(float even, float odd, int position, float frequency,
                                 float amplitude) {
  float sin, cos;
  sincosf(static_cast<float>(position) * frequency, &sin, &cos);
  sin *= amplitude;
  cos *= amplitude;
  return make_float2(even * cos - odd * sin, even * sin + odd * cos);
}

}  // namespace tandem::gpu
