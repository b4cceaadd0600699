// Launchers of the small GPU kernels: plain structs in, work enqueued on the stream, nothing
// allocated. Activations are float (docs/gpu.md says why), rows a stride of elements apart; every
// pointer is device memory unless it says otherwise.
#pragma once
#include "gpu_kernels/numbers.h"
#include "gpu_kernels/runtime.h"

namespace tandem::gpu {

// Some columns of a row-major matrix of floats.
struct Matrix {
  float* data;
  int64_t stride;  // elements from row to row
};

// out = x / sqrt(mean(x^2) + eps) * gain, row by row; out may be x.
struct RmsNormArgs {
  Matrix x;           // [rows, dim]
  const float* gain;  // [dim]
  Matrix out;         // [rows, dim]
  int rows, dim;
  float eps;
};
void rms_norm(const Stream& stream, const RmsNormArgs& args);

}  // namespace tandem::gpu
