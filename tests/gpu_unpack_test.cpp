// Panels packed by the CPU's kernels are unpacked to the original rows, padded with zeros.
#include <gtest/gtest.h>

#include <cstring>

#include "cpu_kernels/kernels.h"
#include "gpu_kernels/unpack.h"
#include "tests/gpu_buffers.h"

namespace tandem::gpu::test {
namespace {

void expect_same(Number type, int rows, int cols) {
  SCOPED_TRACE(testing::Message() << rows << " x " << cols << ", " << bytes_of(type) << " bytes");
  const cpu::KernelTable kernels = cpu::kernels_for(cpu::best_isa());
  if (kernels.layout != cpu::Layout::kPanels) GTEST_SKIP() << "this CPU packs no panels";
  const auto packed_type =
      type == Number::kBF16 ? cpu::WeightType::kBF16 : cpu::WeightType::kF8E4M3;
  std::mt19937 rng(rows + cols);
  std::vector<uint8_t> stored(rows * cols * bytes_of(type));
  for (uint8_t& byte : stored) byte = static_cast<uint8_t>(rng());
  const int64_t panel_bytes = cpu::panel_bytes(packed_type, cols);
  const Buffer packed((rows + 15) / 16 * panel_bytes, Site::kMapped);
  kernels.pack({stored.data(), packed.as<void>(), packed_type, 0, rows, cols});

  const int64_t used = cols * bytes_of(type), row_bytes = (used + 15) / 16 * 16 + 32;
  Stream stream;
  const OnGpuBuffer<uint8_t> on_gpu(stream,
                                    {packed.as<uint8_t>(), packed.as<uint8_t>() + packed.bytes()});
  const OnGpuBuffer<uint8_t> out(stream, std::vector<uint8_t>(rows * row_bytes, 0xee));
  unpack_panels(stream, {.panels = on_gpu.data(),
                         .panel_bytes = panel_bytes,
                         .type = type,
                         .out = out.data(),
                         .row_bytes = row_bytes,
                         .rows = rows,
                         .bytes = static_cast<int>((used + 15) / 16 * 16)});
  std::vector<uint8_t> want(rows * row_bytes, 0xee);
  for (int r = 0; r < rows; ++r) {
    std::memset(want.data() + r * row_bytes, 0, (used + 15) / 16 * 16);
    std::memcpy(want.data() + r * row_bytes, stored.data() + r * used, used);
  }
  EXPECT_EQ(out.values(stream), want);
}

TEST(Unpack, RowsAreTheCheckpoints) {
  for (const Number type : {Number::kBF16, Number::kF8E4M3})
    for (const auto& [rows, cols] :
         {std::pair{16, 64}, {48, 256}, {50, 136}, {3, 8}, {130, 1000}, {64, 2048}})
      expect_same(type, rows, cols);
}

}  // namespace
}  // namespace tandem::gpu::test
