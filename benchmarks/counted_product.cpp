#include "benchmarks/counted_product.h"

#include <cstring>
#include <vector>

#include "benchmarks/stepping.h"
#include "cpu_kernels/tables.h"

namespace tandem {
namespace {

constexpr int kPanels = 4, kOutputs = kPanels * cpu::kPanelRows;
constexpr int kShort = 512, kLong = 1024;  // columns; the difference omits what a call costs

SteppedCounts count_product(cpu::Isa isa, const CountedFormat& format, int m, int k);

}  // namespace

InstructionsOfLine count_line(cpu::Isa isa, const CountedFormat& format, int m) {
  const SteppedCounts few = count_product(isa, format, m, kShort),
                      many = count_product(isa, format, m, kLong);
  constexpr int kLineBytes = 64;
  const int64_t n_lines =
      kPanels * (panel_bytes(format.type, kLong) - panel_bytes(format.type, kShort)) / kLineBytes;
  const auto lines = static_cast<double>(n_lines);
  return {static_cast<double>(many.all - few.all) / lines,
          static_cast<double>(many.vector - few.vector) / lines};
}

namespace {

// Weights are ones in FP8, which none of the other formats minds; scales and x are zeros.
SteppedCounts count_product(cpu::Isa isa, const CountedFormat& format, int m, int k) {
  const bool two_level = format.type == cpu::WeightType::kI4TwoLevel,
             bf16_scales = format.type == cpu::WeightType::kI4;
  const int64_t stride = panel_bytes(format.type, k);
  struct alignas(64) Line {
    char bytes[64];
  };
  constexpr char kOne = 0x38;
  // Room behind the last panel, because products fetch ahead.
  std::vector<Line> weights(2 * kPanels * stride / 64);
  std::memset(weights.data(), kOne, weights.size() * sizeof(Line));
  const std::vector<Line> x(int64_t{m} * k * 4 / 64 + 64);
  const std::vector<float> scales(4 * k), row_scales(m);
  std::vector<float> out(int64_t{m} * kOutputs);
  cpu::Weight w = {.data = weights.data(),
                   .stride = stride,
                   .type = format.type,
                   .scales = format.type == cpu::WeightType::kBF16 ? nullptr : scales.data(),
                   .scale_stride = k / 128,
                   .n_scale_rows = 1,
                   .block_rows = 128,
                   .block_cols = 128,
                   .row0 = 0,
                   .col0 = 0};
  if (format.type == cpu::WeightType::kI8 || is_i4(format.type)) {
    w.block_rows = 1;
    w.block_cols = format.group > 0 ? format.group : k;
    w.scale_stride = two_level     ? k / format.group * cpu::kPanelRows + 2 * kOutputs
                     : bf16_scales ? k / format.group * kOutputs / 2 + kOutputs
                                   : 2 * cpu::kPanelRows;
  }
  const cpu::KernelTable table = table_of(isa, {.avx512_bf16 = true});
  const cpu::ActivationType encoded = table.activation[static_cast<int>(format.type)];
  const int bytes = encoded == cpu::ActivationType::kF32    ? 4
                    : encoded == cpu::ActivationType::kBF16 ? 2
                                                            : 1;
  const cpu::GemmArgs args = {
      .x = {x.data(), int64_t{k} * bytes, encoded, nullptr, row_scales.data()},
      .w = w,
      .first_row = 0,
      .out = out.data(),
      .out_stride = kOutputs,
      .m = m,
      .n = kOutputs,
      .k = k};
  return count_steps([&] { table.gemm(args); });
}

}  // namespace
}  // namespace tandem
