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
    {WeightType::kBF16, 0, {20.4, 33.4, 40.2, 47.4, 53.4, 62.6, 84.1, 115.6, 150.0, 290.2, 1137.0}},
    {WeightType::kF8E4M3,
     0,
     {40.2, 63.8, 77.7, 97.4, 139.0, 157.2, 213.3, 272.0, 343.3, 643.6, 2376.9}},
    {WeightType::kI8, 0, {22.4, 40.5, 52.1, 62.7, 73.2, 85.9, 115.6, 160.8, 211.6, 413.3, 1612.1}},
    {WeightType::kI4TwoLevel,
     64,
     {33.7, 45.0, 57.2, 69.2, 92.7, 103.9, 128.4, 182.5, 236.6, 447.5, 1718.3}},
    {WeightType::kI4,
     32,
     {39.9, 53.2, 68.0, 83.9, 107.9, 121.0, 149.4, 209.7, 270.0, 515.0, 1981.4}},
};
constexpr Counted kAvx512[kNumFormats] = {
    {WeightType::kBF16, 0, {1.0, 2.0, 3.1, 4.1, 5.1, 6.1, 8.1, 12.2, 16.3, 32.5, 130.0}},
    {WeightType::kF8E4M3, 0, {7.1, 9.2, 11.2, 13.3, 15.3, 17.3, 21.5, 29.6, 37.8, 70.6, 267.3}},
    {WeightType::kI8, 0, {1.0, 2.0, 3.1, 4.1, 5.1, 6.1, 8.2, 12.3, 16.4, 32.7, 130.8}},
    {WeightType::kI4TwoLevel,
     64,
     {5.5, 8.2, 10.5, 12.9, 15.1, 17.2, 25.7, 34.4, 47.4, 94.8, 269.9}},
    {WeightType::kI4, 32, {6.1, 9.3, 11.8, 14.4, 16.9, 19.1, 28.7, 38.2, 52.8, 105.7, 411.6}},
};
constexpr Counted kAmx[kNumFormats] = {
    {WeightType::kBF16, 0, {2.9, 0.1, 0.1, 0.2, 0.2, 0.2, 0.2, 0.3, 0.3, 0.6, 2.8}},
    {WeightType::kF8E4M3, 0, {15.5, 6.2, 6.3, 6.3, 6.3, 6.4, 6.4, 6.6, 6.7, 7.2, 11.5}},
    {WeightType::kI8, 0, {1.0, 2.0, 0.1, 0.1, 0.1, 0.1, 0.1, 0.2, 0.3, 0.5, 2.7}},
    {WeightType::kI4TwoLevel, 64, {5.5, 8.2, 9.5, 9.6, 9.6, 9.6, 9.7, 9.8, 10.0, 10.5, 14.8}},
    {WeightType::kI4, 32, {6.1, 9.3, 11.8, 14.4, 16.9, 19.1, 28.7, 38.2, 52.8, 105.7, 411.6}},
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
