// Buffers own aligned pages, huge ones where they fill them, and nothing more; an arena hands out
// parts of its memory.
#include "core/memory.h"

#include <gtest/gtest.h>

#include <fstream>
#include <vector>

#include "tests/error_of.h"

namespace tandem {
namespace {

constexpr int64_t kHugePage = 2 << 20, kPage = 4096;

// Bytes of address space that this process has mapped.
int64_t mapped() {
  int64_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  return pages * kPage;
}

TEST(Buffer, MapsWholePagesAndReturnsThem) {
  if (TANDEM_SANITIZED) GTEST_SKIP() << "sanitizers map memory of their own";
  mapped();  // the first call allocates
  for (const int64_t bytes : {int64_t{1}, kHugePage - 1, kHugePage, kHugePage + 1, 5 * kHugePage}) {
    const int64_t before = mapped();
    {
      const Buffer buffer(bytes);
      EXPECT_EQ(buffer.bytes(), bytes);
      EXPECT_EQ(reinterpret_cast<uintptr_t>(buffer.data()) % kHugePage, 0u);
      EXPECT_EQ(mapped() - before, (bytes + kPage - 1) / kPage * kPage) << bytes;
      buffer.data()[bytes - 1] = std::byte{1};
    }
    EXPECT_EQ(mapped(), before) << bytes;
  }
}

// Bytes of the process's memory that are resident.
int64_t resident() {
  int64_t mapped = 0, pages = 0;
  std::ifstream("/proc/self/statm") >> mapped >> pages;
  return pages * kPage;
}

// A first use of a huge page clears all of it.
TEST(Buffer, ClearsNoHugePageThatItDoesNotFill) {
  if (TANDEM_SANITIZED) GTEST_SKIP() << "sanitizers map memory of their own";
  std::vector<Buffer> buffers;
  buffers.reserve(100);
  const int64_t before = resident();
  for (int i = 0; i < 100; ++i) buffers.emplace_back(kHugePage / 2).data()[0] = std::byte{1};
  EXPECT_LT(resident() - before, 100 * kHugePage / 8);
}

TEST(Buffer, IsMovedWithItsMemory) {
  Buffer one(100);
  one.data()[99] = std::byte{7};
  const std::byte* at = one.data();
  Buffer two(std::move(one));
  EXPECT_EQ(two.data(), at);
  EXPECT_EQ(two.bytes(), 100);
  Buffer three;
  three = std::move(two);
  EXPECT_EQ(three.data(), at);
  EXPECT_EQ(three.data()[99], std::byte{7});
  EXPECT_EQ(Buffer(0).data(), nullptr);
}

TEST(Buffer, LeavesTheMemoryOfAnotherOwner) {
  auto memory = std::make_shared<std::vector<std::byte>>(10);
  const std::weak_ptr<const void> alive = memory;
  {
    const Buffer buffer(std::span<std::byte>(*memory), memory);
    EXPECT_EQ(buffer.data(), memory->data());
    memory.reset();
    EXPECT_FALSE(alive.expired());
    buffer.data()[9] = std::byte{1};
  }
  EXPECT_TRUE(alive.expired());
}

TEST(Buffer, IsMovedWithItsOwner) {
  auto memory = std::make_shared<std::vector<std::byte>>(10);
  const std::weak_ptr<const void> alive = memory;
  {
    Buffer one(std::span<std::byte>(*memory), memory);
    memory.reset();
    Buffer two(std::move(one));
    Buffer three(7);
    three = std::move(two);
    EXPECT_EQ(three.bytes(), 10);
    three.data()[9] = std::byte{1};
  }
  EXPECT_TRUE(alive.expired());
}

TEST(Buffer, ThatDoesNotFitTheAddressSpaceIsRefused) {
  EXPECT_EQ(error_of([] { Buffer buffer(int64_t{1} << 50); }),
            "no memory: 1125899.91 GB could not be reserved; use a smaller model, --ctx or format");
}

TEST(Arena, GivesAlignedPartsThatDoNotOverlap) {
  TensorView a, b, c;
  const auto all = [&](auto visit) {
    visit(a, 3, 5, DType::kF32);      // 60 bytes
    visit(b, 2, 64, DType::kI4);      // 64 bytes
    visit(c, 1, 65, DType::kF8E4M3);  // 65 bytes
  };
  EXPECT_EQ(Arena::bytes_of(all), 64 + 64 + 128);
  const Arena arena = Arena::holding(all);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(a.data) % 64, 0u);
  EXPECT_EQ(static_cast<std::byte*>(b.data) - static_cast<std::byte*>(a.data), 64);
  EXPECT_EQ(static_cast<std::byte*>(c.data) - static_cast<std::byte*>(b.data), 64);
  EXPECT_EQ(c.rows, 1);
  EXPECT_EQ(c.cols, 65);
  EXPECT_EQ(c.dtype, DType::kF8E4M3);
}

// Matrices and views of more than 2^31 numbers. The memory is reserved and not touched.
TEST(Arena, GivesPartsBeyondTwoGigabytes) {
  TensorView a, b;
  const auto all = [&](auto visit) {
    visit(a, int64_t{3} << 20, 1 << 10, DType::kF32);
    visit(b, 1 << 10, int64_t{7} << 20, DType::kI4);
  };
  EXPECT_EQ(Arena::bytes_of(all), (int64_t{3} << 32) + (int64_t{7} << 29));
  const Arena arena = Arena::holding(all);
  const auto offset = [&](const void* at) {
    return static_cast<const std::byte*>(at) - arena.memory().data();
  };
  EXPECT_EQ(offset(b.data), int64_t{3} << 32);
  EXPECT_EQ(offset(a.row_data((int64_t{3} << 20) - 1)), (int64_t{3} << 32) - 4096);
  EXPECT_EQ(offset(a.row<float>(int64_t{5} << 19)), int64_t{5} << 31);
  EXPECT_EQ(offset(a.rows_from(int64_t{5} << 19, 2).data), int64_t{5} << 31);
  const TensorView wide = a.reshape(2, int64_t{3} << 29);
  EXPECT_EQ(wide.row_bytes(), int64_t{3} << 31);
  EXPECT_EQ(offset(wide.row_data(1)), int64_t{3} << 31);
  const TensorView right = wide.cols_from(int64_t{1} << 30, 5);
  EXPECT_EQ(offset(right.data), int64_t{1} << 32);
  EXPECT_EQ(right.stride, int64_t{3} << 29);
  EXPECT_EQ(right.cols, 5);
  EXPECT_EQ(offset(b.cols_from(6, 2).data), (int64_t{3} << 32) + 3);
}

// A row beyond the matrix and numbers of another type are bugs, which end the program.
TEST(TensorView, HasRowsOfItsTypeOnly) {
  float numbers[2] = {};
  const TensorView view = {numbers, 2, 1, 1, DType::kF32};
  EXPECT_EQ(view.row<float>(1), numbers + 1);
  EXPECT_DEATH(view.row<float>(2), "TensorView::row");
  EXPECT_DEATH(view.row<int32_t>(0), "TensorView::row");
}

// A part of a weight has the scale blocks that overlap it, and knows where its first one begins.
TEST(QuantView, PartsHaveTheScalesOfTheirBlocks) {
  std::vector<std::byte> numbers(300 * 260);
  std::vector<float> scales(5 * 4);  // blocks of 64 rows and 80 columns
  const QuantView whole = {.q = {numbers.data(), 300, 260, 260, DType::kF8E4M3},
                           .scale = {scales.data(), 5, 4, 4, DType::kF32},
                           .block_rows = 64,
                           .block_cols = 80};
  const auto at = [&](const QuantView& part) {
    const int64_t number = static_cast<std::byte*>(part.q.data) - numbers.data();
    const int64_t scale = static_cast<float*>(part.scale.data) - scales.data();
    return std::vector<int64_t>{number / 260,    number % 260,    scale / 4, scale % 4,
                                part.scale.rows, part.scale.cols, part.row0, part.col0};
  };
  using Ints = std::vector<int64_t>;
  EXPECT_EQ(at(whole.rows_from(64, 64)), (Ints{64, 0, 1, 0, 1, 4, 0, 0}));
  EXPECT_EQ(at(whole.rows_from(63, 2)), (Ints{63, 0, 0, 0, 2, 4, 63, 0}));
  EXPECT_EQ(at(whole.rows_from(130, 126)), (Ints{130, 0, 2, 0, 2, 4, 2, 0}));
  EXPECT_EQ(at(whole.rows_from(130, 127)), (Ints{130, 0, 2, 0, 3, 4, 2, 0}));
  EXPECT_EQ(at(whole.rows_from(130, 127).rows_from(61, 2)), (Ints{191, 0, 2, 0, 2, 4, 63, 0}));
  EXPECT_EQ(at(whole.cols_from(80, 80)), (Ints{0, 80, 0, 1, 5, 1, 0, 0}));
  EXPECT_EQ(at(whole.cols_from(79, 2)), (Ints{0, 79, 0, 0, 5, 2, 0, 79}));
  EXPECT_EQ(at(whole.cols_from(85, 155)), (Ints{0, 85, 0, 1, 5, 2, 0, 5}));
  EXPECT_EQ(at(whole.cols_from(85, 156)), (Ints{0, 85, 0, 1, 5, 3, 0, 5}));
  EXPECT_EQ(at(whole.cols_from(85, 156).cols_from(74, 2)), (Ints{0, 159, 0, 1, 5, 2, 0, 79}));
  QuantView plain = whole;
  plain.scale = {};
  EXPECT_TRUE(plain.rows_from(64, 64).scale.empty());
  EXPECT_EQ(plain.rows_from(64, 64).row0, 0);
  EXPECT_EQ(plain.cols_from(80, 80).col0, 0);
}

}  // namespace
}  // namespace tandem
