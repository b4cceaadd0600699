// One product with the AVX2 table without VNNI: one_product FORMAT ROWS COLUMNS. What
// tools/count_instructions.py counts.
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <vector>

#include "cpu_kernels/peaks.h"
#include "cpu_kernels/tables.h"

using namespace tandem::cpu;

// The function whose instructions are counted.
extern "C" [[gnu::noinline]] void counted_product(const KernelTable* table, const GemmArgs* args) {
  table->gemm(*args);
}

int main(int argc, char** argv) {
  static const std::map<std::string, WeightType> kTypes = {{"bf16", WeightType::kBF16},
                                                           {"fp8", WeightType::kF8E4M3},
                                                           {"int8", WeightType::kI8},
                                                           {"int4", WeightType::kI4TwoLevel},
                                                           {"int4-32-bf16", WeightType::kI4}};
  const auto format = kTypes.find(argc == 4 ? argv[1] : "");
  const int m = argc == 4 ? std::atoi(argv[2]) : 0, k = argc == 4 ? std::atoi(argv[3]) : 0;
  if (format == kTypes.end() || m < 1 || k < 128 || k % 128 != 0 || !cpu_has(Feature::kAvx2)) {
    std::fprintf(stderr,
                 "error: one_product bf16|fp8|int8|int4|int4-32-bf16 ROWS COLUMNS, columns a "
                 "multiple of 128, on a CPU with AVX2\n");
    return 2;
  }
  constexpr int kPanels = 4, kOutputs = kPanels * kPanelRows;
  const WeightType type = format->second;
  const bool two_level = type == WeightType::kI4TwoLevel, bf16_scales = type == WeightType::kI4;
  const int64_t stride = panel_bytes(type, k);
  struct alignas(64) Line {
    char bytes[64];
  };
  // Room behind the last panel, because products fetch ahead.
  const std::vector<Line> weights(2 * kPanels * stride / 64), x(int64_t{m} * k * 4 / 64 + 64);
  const std::vector<float> scales(4 * k), row_scales(m);
  std::vector<float> out(int64_t{m} * kOutputs);
  Weight w = {.data = weights.data(),
              .stride = stride,
              .type = type,
              .scales = type == WeightType::kBF16 ? nullptr : scales.data(),
              .scale_stride = k / 128,
              .n_scale_rows = 1,
              .block_rows = 128,
              .block_cols = 128,
              .row0 = 0,
              .col0 = 0};
  if (type != WeightType::kBF16 && type != WeightType::kF8E4M3) {
    w.block_rows = 1;
    w.block_cols = two_level ? 64 : bf16_scales ? 32 : k;
    w.scale_stride = two_level     ? k / 64 * kPanelRows + 2 * kOutputs
                     : bf16_scales ? k / 32 * kOutputs / 2 + kOutputs
                                   : 2 * kPanelRows;
  }
  const KernelTable table = table_of(Isa::kAvx2, {});
  const ActivationType encoded = table.activation[static_cast<int>(type)];
  const int bytes = encoded == ActivationType::kF32 ? 4 : 1;
  const GemmArgs args = {.x = {x.data(), int64_t{k} * bytes, encoded, nullptr, row_scales.data()},
                         .w = w,
                         .first_row = 0,
                         .out = out.data(),
                         .out_stride = kOutputs,
                         .m = m,
                         .n = kOutputs,
                         .k = k};
  counted_product(&table, &args);
}
