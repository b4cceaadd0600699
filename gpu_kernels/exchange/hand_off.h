// Writes what the CPU needs to compute a layer's routed experts into mapped memory, in one kernel:
// no other copies, and no arguments that change between steps.
#pragma once
#include "gpu_kernels/exchange/signals.h"
#include "gpu_kernels/kernels.h"

namespace tandem::gpu {

// Encoding of rows, bit-identical to the CPU kernels' encode() (cpu_kernels/kernels.h): kBF16
// rounds to nearest even; kU8 is 128 + round(x / scale), scale = max |x| / 127 of the row.
enum class RowType : uint8_t { kF32, kBF16, kU8 };
constexpr int64_t bytes_of(RowType t) {
  return t == RowType::kF32 ? 4 : t == RowType::kBF16 ? 2 : 1;
}

// Mapped memory for the tokens of a layer.
struct HandedDown {
  int32_t* ids;       // [tokens, n_active] experts; -1 for all others
  float* weights;     // [tokens, n_active]
  float* scales;      // [tokens], kU8
  void* rows;         // [tokens, row_bytes], padded with zeros (kU8: 128)
  int64_t row_bytes;  // a multiple of 32
};

struct HandDownArgs {
  Matrix x;            // [tokens, dim]
  const int32_t* ids;  // [tokens, n_active], rows ids_stride apart; negative ones are left out
  int64_t ids_stride;
  Matrix weights;  // [tokens, n_active]
  // Index of each expert among those on the GPU; -1: on the CPU, below: elsewhere. Null: all are on
  // the CPU.
  const int32_t* gpu_place;  // [n_experts]
  // [tokens, n_active] in GPU memory, out: values of gpu_place. Null if gpu_place is null.
  int32_t* gpu_ids;
  HandedDown to;
  RowType type;
  int tokens, n_active, dim;
  SignalWords handed_down = {};  // raised when all is written; null: nothing is
};
void hand_down(const Stream& stream, const HandDownArgs& args);

// Awaits the CPU's next sum and adds it: y += sum. Every row polls over the link, so there should
// be few.
struct AddAwaitedArgs {
  Matrix y, sum;  // [rows, cols]; sum is mapped
  int rows, cols;
  SignalWords sum_is_there;
};
void add_awaited(const Stream& stream, const AddAwaitedArgs& args);

// out[t, i] = place[ids[t, i]], below -1 for a negative id.
struct PlaceArgs {
  const int32_t* ids;  // [tokens, n_active], rows ids_stride apart
  int64_t ids_stride;
  const int32_t* place;  // [n_experts]
  int32_t* out;          // [tokens, n_active]
  int tokens, n_active;
};
void place_experts(const Stream& stream, const PlaceArgs& args);

}  // namespace tandem::gpu
