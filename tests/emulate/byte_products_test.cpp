// Products of bytes are exact in integers and scaled in one order, so every table with the panel
// layout gives the same bits, native and emulated, with vectors and with tiles, in any batch.
#include <gtest/gtest.h>

#include "tests/kernel_cases.h"
#include "tests/kernel_tables.h"

namespace tandem::test {
namespace {

constexpr WeightFormat kFormats[] = {{DType::kI8},
                                     {DType::kI4, 32},
                                     {DType::kI4, 64},
                                     {DType::kI4, 128},
                                     {DType::kI4TwoLevel, 32},
                                     {DType::kI4TwoLevel, 64},
                                     {DType::kI4TwoLevel, 128}};

std::vector<NamedTable> byte_tables() {
  std::vector<NamedTable> tables;
  for (const NamedTable& t : all_tables())
    if (t.kernels.layout == cpu::Layout::kPanels) tables.push_back(t);
  return tables;
}

struct Converted {
  CpuWeights home;
  QuantView w;

  Converted(const cpu::KernelTable& t, const QuantView& stored, WeightFormat format) : home(t) {
    home.allocate(home.converted_bytes(stored, format));
    w = home.reserve_converted(stored, format);
    home.convert(stored.q.row_data(0), stored, w, 0, stored.q.rows);
  }
};

class ByteProducts : public testing::TestWithParam<NamedTable> {
 protected:
  // Expects the same bits from this table as from the first one, with rows of x selected by index.
  void expect_same_bits(WeightFormat format, Shape shape) const;
};
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(ByteProducts);

TEST_P(ByteProducts, SameBitsInEveryTableAndBatch) {
  for (const WeightFormat format : kFormats)
    for (const Shape shape : {Shape{55, 144, 640}, Shape{3, 16, 128}, Shape{7, 33, 1024}})
      expect_same_bits(format, shape);
}

// A block of columns has 1 to 8 tiles of 64. The sums of 32 rows are added while the next tiles are
// multiplied, a share after each tile. The last block of 1,408 columns has 6 tiles
// (DeepSeek-V2-Lite, Moonlight).
TEST_P(ByteProducts, BlocksOfEveryNumberOfTiles) {
  for (const WeightFormat format : kFormats)
    for (int n_tiles = 1; n_tiles <= 8; ++n_tiles)
      if (format.group == 0 || 64 * n_tiles % format.group == 0)
        expect_same_bits(format, {33, 48, 64 * n_tiles});
  expect_same_bits({DType::kI8}, {33, 48, 1408});
}

void ByteProducts::expect_same_bits(WeightFormat format, Shape shape) const {
  const cpu::KernelTable &t = GetParam().kernels, first = byte_tables().front().kernels;
  const auto [m, n, k] = shape;
  RandomModel store(with_block(128), DType::kBF16);
  const QuantView stored = store.matrix(n, k, DType::kBF16);
  const std::vector<float> x = normal(store.rng, m * k);
  std::vector<int32_t> order(m);
  for (int i = 0; i < m; ++i) order[i] = (i * 5 + 2) % m;
  const auto product = [&, m = m, n = n, k = k](const cpu::KernelTable& table, int step) {
    const Converted weight(table, stored, format);
    const Rows rows(table, cpu::ActivationType::kU8, x, m, k, k);
    std::vector<float> out(m * n, kNaN);
    for (int i = 0, count = step; i < m; i += count, ++count) {
      cpu::Activations part = rows.view;
      part.rows = order.data() + i;
      count = std::min(count, m - i);
      const int cut = count == 1 && n > 64 ? 16 : 5;  // one row takes whole groups of panels
      const cpu::Weight w = kernel_weight(weight.w);
      table.gemm({part, w, 0, &out[i * n], n, count, cut, k});
      table.gemm({part, w, cut, &out[i * n + cut], n, count, n - cut, k, &w});
    }
    std::vector<uint32_t> bits;
    for (const float v : out) bits.push_back(std::bit_cast<uint32_t>(v));
    return bits;
  };
  const std::vector<uint32_t> want = product(first, m);
  SCOPED_TRACE(testing::Message() << name_of(format.dtype) << " group " << format.group << ", " << m
                                  << "x" << n << "x" << k);
  EXPECT_EQ(product(t, m), want);
  EXPECT_EQ(product(t, 1), want) << "batches of 1, 2, 3, ..";
}

INSTANTIATE_TEST_SUITE_P(Isas, ByteProducts, testing::ValuesIn(byte_tables()),
                         [](const auto& table) { return table.param.name; });

}  // namespace
}  // namespace tandem::test
