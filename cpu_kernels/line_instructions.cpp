#include "cpu_kernels/line_instructions.h"

#include "cpu_kernels/tables.h"

namespace tandem::cpu {
namespace {

constexpr int kCounts = 11;
constexpr int kRows[kCounts] = {1, 2, 3, 4, 5, 6, 8, 12, 16, 32, 128};
struct Counted {
  WeightType type;
  int group;  // columns that share a scale; 0: any
  double instructions[kCounts];
};
constexpr Counted kCounted[] = {
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

}  // namespace

double instructions_of_line(const KernelTable& table, WeightType type, int group, int m) {
  const bool bytes = type == WeightType::kI8 || is_i4(type);
  if (table.isa != Isa::kAvx2 || m < 1 || (bytes && extensions_here().avx_vnni)) return 0;
  for (const Counted& counted : kCounted) {
    if (counted.type != type || (counted.group != 0 && counted.group != group)) continue;
    for (int i = 0; i + 1 < kCounts; ++i)
      if (m <= kRows[i + 1]) {
        const double part = static_cast<double>(m - kRows[i]) / (kRows[i + 1] - kRows[i]);
        return counted.instructions[i] +
               part * (counted.instructions[i + 1] - counted.instructions[i]);
      }
    return counted.instructions[kCounts - 1] * m / kRows[kCounts - 1];
  }
  return 0;
}

}  // namespace tandem::cpu
