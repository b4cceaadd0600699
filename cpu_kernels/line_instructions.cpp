#include "cpu_kernels/line_instructions.h"

#include <span>

#include "cpu_kernels/tables.h"

namespace tandem::cpu {
namespace {

struct Counted {
  WeightType type;
  int group;  // columns that share a scale; 0: any
  double instructions[kNumCountedRows];
};
constexpr int kNumFormats = 5;
constexpr Counted kAvx2[kNumFormats] = {
    {WeightType::kBF16, 0, {20.3, 33.3, 40.1, 47.3, 53.3, 62.6, 84.0, 115.5, 149.9, 290.1, 1136.9}},
    {WeightType::kF8E4M3,
     0,
     {40.2, 63.7, 77.6, 97.4, 138.9, 157.1, 213.3, 272.0, 343.4, 643.6, 2376.9}},
    {WeightType::kI8, 0, {22.4, 40.5, 52.1, 62.7, 73.2, 85.8, 115.6, 160.8, 211.5, 413.2, 1612.0}},
    {WeightType::kI4TwoLevel,
     64,
     {33.6, 44.9, 57.1, 69.1, 92.6, 103.8, 128.3, 182.5, 236.6, 447.4, 1718.2}},
    {WeightType::kI4,
     32,
     {39.4, 52.7, 67.4, 83.4, 107.4, 120.5, 148.9, 209.2, 269.6, 514.6, 1980.9}},
};
constexpr Counted kAvx512[kNumFormats] = {
    {WeightType::kBF16, 0, {1.0, 2.0, 3.1, 4.1, 5.1, 6.1, 8.1, 12.2, 16.3, 32.5, 130.0}},
    {WeightType::kF8E4M3, 0, {7.1, 9.2, 11.2, 13.2, 15.3, 17.3, 21.4, 29.5, 37.7, 70.5, 267.3}},
    {WeightType::kI8, 0, {1.0, 2.0, 3.1, 4.1, 5.1, 6.1, 8.2, 12.3, 16.4, 32.7, 130.8}},
    {WeightType::kI4TwoLevel,
     64,
     {5.5, 8.2, 10.4, 12.7, 15.0, 17.1, 25.5, 34.1, 47.0, 94.1, 269.9}},
    {WeightType::kI4, 32, {6.1, 9.1, 11.6, 14.4, 16.7, 19.0, 28.8, 38.0, 52.5, 105.0, 409.0}},
};
constexpr Counted kAmx[kNumFormats] = {
    {WeightType::kBF16, 0, {2.9, 0.1, 0.1, 0.2, 0.2, 0.2, 0.2, 0.3, 0.3, 0.6, 2.8}},
    {WeightType::kF8E4M3, 0, {15.5, 6.2, 6.3, 6.3, 6.3, 6.4, 6.4, 6.6, 6.7, 7.2, 11.5}},
    {WeightType::kI8, 0, {1.0, 2.0, 0.1, 0.1, 0.1, 0.1, 0.1, 0.2, 0.3, 0.5, 2.7}},
    {WeightType::kI4TwoLevel, 64, {5.5, 8.2, 9.5, 9.6, 9.6, 9.6, 9.7, 9.8, 9.9, 10.4, 14.8}},
    {WeightType::kI4, 32, {6.1, 9.1, 11.6, 14.4, 16.7, 19.0, 28.8, 38.0, 52.5, 105.0, 409.0}},
};

// Null: not counted. Products of bytes were counted without AVX-VNNI on AVX2, those of BF16 with
// AVX512-BF16.
const Counted* counted_of(const KernelTable& table, WeightType type) {
  const bool bytes = type == WeightType::kI8 || is_i4(type);
  switch (table.isa) {
    case Isa::kReference:
      return nullptr;
    case Isa::kAvx2:
      return bytes && extensions_here().avx_vnni ? nullptr : kAvx2;
    case Isa::kAvx512:
      return table.activation[static_cast<int>(type)] == ActivationType::kF32 ? nullptr : kAvx512;
    case Isa::kAmx:
      return kAmx;
  }
  return nullptr;
}

}  // namespace

double instructions_of_line(const KernelTable& table, WeightType type, int group, int m) {
  const Counted* const formats = counted_of(table, type);
  if (!formats || m < 1) return 0;
  for (const Counted& counted : std::span(formats, kNumFormats)) {
    if (counted.type != type || (counted.group != 0 && counted.group != group)) continue;
    for (int i = 0; i + 1 < kNumCountedRows; ++i)
      if (m <= kCountedRows[i + 1]) {
        const double part =
            static_cast<double>(m - kCountedRows[i]) / (kCountedRows[i + 1] - kCountedRows[i]);
        return counted.instructions[i] +
               part * (counted.instructions[i + 1] - counted.instructions[i]);
      }
    return counted.instructions[kNumCountedRows - 1] * m / kCountedRows[kNumCountedRows - 1];
  }
  return 0;
}

}  // namespace tandem::cpu
