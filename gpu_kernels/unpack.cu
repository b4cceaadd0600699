// Each block converts 64 steps of one panel, 16 rows of 256 bytes, through shared memory, so that
// reads and writes are 16 bytes wide.
#include "core/invariant.h"
#include "device.h"
#include "gpu_kernels/unpack.h"

namespace tandem::gpu {
namespace {

constexpr int kThreads = 256, kRows = 16, kStepBytes = 64, kSteps = 64;
constexpr int kBytes = kSteps * kStepBytes / kRows;  // per row

struct Shared {
  uint4 units[kSteps * kStepBytes / 16];
};

// The 4 bytes of a row in a step. FP8 stores the first halves of 4 rows before their second halves.
__device__ uint32_t word_of(const Shared& s, int step, int row, bool fp8) {
  const auto* bytes = reinterpret_cast<const uint8_t*>(s.units) + step * kStepBytes + row / 4 * 16;
  if (!fp8) return *reinterpret_cast<const uint32_t*>(bytes + row % 4 * 4);
  const auto* halves = reinterpret_cast<const uint16_t*>(bytes);
  return halves[row % 4] | static_cast<uint32_t>(halves[4 + row % 4]) << 16;
}

__global__ void __launch_bounds__(kThreads) unpack_kernel(const __grid_constant__ UnpackArgs a) {
  Shared& s = shared_memory<Shared>();
  const int first = blockIdx.x * kBytes;  // byte within a row
  const int panel = blockIdx.y, t = threadIdx.x;
  const int64_t at = int64_t{first} * kRows + t * 16;  // byte within the panel
  if (at < a.panel_bytes)
    s.units[t] = *reinterpret_cast<const uint4*>(a.panels + panel * a.panel_bytes + at);
  __syncthreads();
  const int row = t / 16, step = t % 16 * 4, column = first + step * 4;
  if (panel * kRows + row >= a.rows || column >= a.bytes) return;
  const bool fp8 = a.type == Number::kF8E4M3;
  *reinterpret_cast<uint4*>(a.out + (int64_t{panel} * kRows + row) * a.row_bytes + column) = {
      word_of(s, step, row, fp8), word_of(s, step + 1, row, fp8), word_of(s, step + 2, row, fp8),
      word_of(s, step + 3, row, fp8)};
}

}  // namespace

void unpack_panels(const Stream& stream, const UnpackArgs& a) {
  check(a.type != Number::kF32 && a.bytes % 16 == 0 && a.bytes * int64_t{kRows} <= a.panel_bytes,
        "panels of experts");
  launch(unpack_kernel,
         {.grid_x = (a.bytes + kBytes - 1) / kBytes,
          .grid_y = (a.rows + kRows - 1) / kRows,
          .threads = kThreads,
          .shared_bytes = sizeof(Shared)},
         stream, a);
}

}  // namespace tandem::gpu
