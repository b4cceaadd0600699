// What the CPU needs to compute a layer's routed experts, written into mapped memory by one kernel:
// no copy beside it, and nothing in its arguments that changes from step to step.
#pragma once
#include "gpu_kernels/kernels.h"

namespace tandem::gpu {

// How rows are encoded, exactly as the CPU's kernels encode them (cpu_kernels/kernels.h, encode()):
// kBF16 to nearest even; kU8 is 128 + round(x / scale), scale = max |x| / 127 of the row.
enum class RowType : uint8_t { kF32, kBF16, kU8 };
constexpr int64_t bytes_of(RowType t) {
  return t == RowType::kF32 ? 4 : t == RowType::kBF16 ? 2 : 1;
}

// Mapped memory for a layer's tokens.
struct HandedDown {
  int32_t* ids;       // [tokens, n_active] experts of the CPU, -1 for those of the card
  float* weights;     // [tokens, n_active]
  float* scales;      // [tokens], kU8
  void* rows;         // [tokens, row_bytes], zeros (kU8: 128) behind the last number
  int64_t row_bytes;  // a multiple of 32
};

struct HandDownArgs {
  Matrix x;            // [tokens, dim]
  const int32_t* ids;  // [tokens, n_active], rows ids_stride apart
  int64_t ids_stride;
  Matrix weights;  // [tokens, n_active]
  // Where each expert stands among those of the card, -1: on the CPU; null: all are on the CPU.
  const int32_t* place_on_card;  // [n_experts]
  int32_t* card_ids;  // [tokens, n_active], on the card: those places, out; null where that is
  HandedDown to;
  RowType type;
  int tokens, n_active, dim;
};
void hand_down(const Stream& stream, const HandDownArgs& args);

// out[t, i] = place[ids[t, i]].
struct PlaceArgs {
  const int32_t* ids;  // [tokens, n_active], rows ids_stride apart
  int64_t ids_stride;
  const int32_t* place;  // [n_experts]
  int32_t* out;          // [tokens, n_active]
  int tokens, n_active;
};
void place_experts(const Stream& stream, const PlaceArgs& args);

}  // namespace tandem::gpu
