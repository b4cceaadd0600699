// Buffers own whole huge pages, aligned, and nothing more; an arena hands out parts of its memory.
#include "core/memory.h"

#include <gtest/gtest.h>

#include <fstream>
#include <vector>

#include "tests/error_of.h"

namespace tandem {
namespace {

constexpr int64_t kHugePage = 2 << 20;

// Bytes of address space that this process has mapped.
int64_t mapped() {
  int64_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  return pages * 4096;
}

TEST(Buffer, MapsWholeHugePagesAndReturnsThem) {
  if (TANDEM_SANITIZED) GTEST_SKIP() << "sanitizers map memory of their own";
  mapped();  // the first call allocates
  for (const int64_t bytes : {int64_t{1}, kHugePage - 1, kHugePage, kHugePage + 1, 5 * kHugePage}) {
    const int64_t before = mapped();
    {
      const int64_t whole = (bytes + kHugePage - 1) / kHugePage * kHugePage;
      const Buffer buffer(bytes);
      EXPECT_EQ(buffer.bytes(), bytes);
      EXPECT_EQ(reinterpret_cast<uintptr_t>(buffer.data()) % kHugePage, 0u);
      EXPECT_EQ(mapped() - before, whole) << bytes;
      buffer.data()[bytes - 1] = std::byte{1};
    }
    EXPECT_EQ(mapped(), before) << bytes;
  }
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

}  // namespace
}  // namespace tandem
