// Formats in which rows of activations travel between ranks, the same for CPUs and GPUs, and their
// sizes.
#pragma once
#include <cstdint>

#include "core/rounding.h"

namespace tandem {

// kFp8: E4M3 with a float scale for every kColumnsOfRowScale columns, their largest magnitude /
// 448, as DeepSeek's own dispatch sends rows.
enum class RowFormat : uint8_t { kF32, kBf16, kFp8 };
constexpr int kColumnsOfRowScale = 128;
constexpr const char* name_of(RowFormat format) {
  constexpr const char* kNames[] = {"f32", "bf16", "fp8"};
  return kNames[static_cast<int>(format)];
}

// Where the scales of a row of kFp8 begin, in bytes: behind the codes of all columns.
constexpr int64_t row_scales_begin(int64_t dim) { return round_up(dim, int64_t{4}); }

// Bytes of an encoded row, a multiple of 4: 28,672, 14,336 and 7,392 for 7168 columns.
constexpr int64_t encoded_bytes(RowFormat format, int64_t dim) {
  if (format == RowFormat::kF32) return 4 * dim;
  if (format == RowFormat::kBf16) return round_up(2 * dim, int64_t{4});
  return row_scales_begin(dim) + 4 * ceil_div(dim, int64_t{kColumnsOfRowScale});
}

// How rows go to the ranks that have their experts, and their sums back.
struct RowFormats {
  RowFormat there = RowFormat::kF32, back = RowFormat::kF32;
};

// What is asked for. kExact: rows as BF16 where the experts of all ranks round them to that anyway,
// else as floats, and sums as floats. kFp8: rows as kFp8, sums as BF16 where they are not reduced
// on their way.
enum class ExpertRows : uint8_t { kExact, kFp8 };
constexpr const char* name_of(ExpertRows rows) {
  return rows == ExpertRows::kExact ? "exact" : "fp8";
}
constexpr RowFormats row_formats(ExpertRows rows, bool rounded_to_bf16) {
  if (rows == ExpertRows::kFp8) return {RowFormat::kFp8, RowFormat::kBf16};
  return {rounded_to_bf16 ? RowFormat::kBf16 : RowFormat::kF32, RowFormat::kF32};
}

}  // namespace tandem
