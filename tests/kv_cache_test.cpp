// The KV cache with planes of different widths and types: pages and their copies in host memory
// contain exactly the rows of every plane.
#include "scheduling/kv_cache.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <thread>

#include "engine/host_pages.h"
#include "tests/planner_cases.h"

namespace tandem::test {
namespace {

// A device whose GPU memory and host memory are both host memory.
class TwoMemories final : public Device {
 public:
  Buffer allocate(int64_t bytes) override { return Buffer(bytes); }
  Buffer allocate_on_host(int64_t bytes) override { return Buffer(bytes); }
  void copy(const void* from, int64_t bytes, void* to) override {
    std::memcpy(to, from, static_cast<size_t>(bytes));
  }
  void to_host(TensorView, TensorView) override {}
};

// Layers as in sparse attention: a latent, and in the first layer also the keys of an indexer.
KvCache::Layers two_kinds() {
  const KvPlane latent = {"latent", DType::kBF16, 36, 40};
  return {{latent, {"index key", DType::kF8E4M3, 20, 32}}, {latent}};
}
constexpr int64_t kBytes = kPageSize * (80 + 32 + 80);
constexpr int kPages = 5;

KvCache cache_of_two_kinds() {
  const auto layers = two_kinds();
  return {layers, kPages * kPageSize - 3, Buffer(KvCache::bytes_for(layers, kPages * kPageSize))};
}

void fill(const KvCache& cache, int32_t page, int value) {
  cache.for_each_piece(
      page, [&](std::span<std::byte> piece) { std::memset(piece.data(), value++, piece.size()); });
}

// The value of all bytes of each piece of a page; -1 if they differ.
std::vector<int> values(const KvCache& cache, int32_t page) {
  std::vector<int> found;
  cache.for_each_piece(page, [&](std::span<std::byte> piece) {
    const bool same =
        std::all_of(piece.begin(), piece.end(), [&](std::byte b) { return b == piece.front(); });
    found.push_back(same ? static_cast<int>(piece.front()) : -1);
  });
  return found;
}

TEST(KvCache, PagesHaveTheRowsOfEveryPlane) {
  const KvCache cache = cache_of_two_kinds();
  EXPECT_EQ(cache.n_pages(), kPages);
  EXPECT_EQ(cache.page_bytes(), kBytes);
  for (int page = 0; page < kPages; ++page) fill(cache, page, 10 * page);
  for (int page = 0; page < kPages; ++page)
    EXPECT_EQ(values(cache, page), (std::vector<int>{10 * page, 10 * page + 1, 10 * page + 2}));
  const TensorView keys = cache.plane(0, 1);
  EXPECT_EQ(keys.cols, 20);
  EXPECT_EQ(keys.rows, kPages * kPageSize);
  for (int64_t row = 0; row < keys.rows; ++row) {
    EXPECT_EQ(reinterpret_cast<uintptr_t>(keys.row_data(row)) % 16, 0u);
    EXPECT_EQ(static_cast<int>(*keys.row_data(row)), row / kPageSize * 10 + 1);
  }
}

// Pages, and the places of planes and of copies in host memory, beyond 2^31 bytes. The memory is
// reserved and mostly not touched.
TEST(KvCache, PagesMayBeLarge) {
  const KvPlane wide = {"wide", DType::kBF16, (1 << 25) - 3, 1 << 25};
  const KvCache::Layers layers = {{wide}, {wide}};
  constexpr int64_t kPiece = int64_t{1} << 32;
  EXPECT_EQ(KvCache::bytes_for(layers, 65), 4 * kPiece);
  const KvCache cache(layers, 65, Buffer(4 * kPiece));
  EXPECT_EQ(cache.n_pages(), 2);
  EXPECT_EQ(cache.page_bytes(), 2 * kPiece);
  std::vector<int64_t> places;
  const auto add = [&](std::span<std::byte> piece) {
    places.push_back(piece.data() - static_cast<std::byte*>(cache.plane(0, 0).data));
    EXPECT_EQ(std::ssize(piece), kPiece);
  };
  for (const int page : {0, 1}) cache.for_each_piece(page, add);
  EXPECT_EQ(places, (std::vector<int64_t>{0, 2 * kPiece, kPiece, 3 * kPiece}));
  EXPECT_EQ(KvCache::bytes_for(known_model("r1"), int64_t{1} << 32, DType::kBF16),
            (int64_t{1} << 32) * 70272);
}

TEST(KvCache, CopiesMayBeFarIntoHostMemory) {
  const KvCache cache = cache_of_two_kinds();
  TwoMemories device;
  constexpr int32_t kFar = 200'000;  // times 12 KB
  HostPages host(device, cache, kFar + 1);
  EXPECT_EQ(host.n_pages(), kFar + 1);
  for (int page = 0; page < kPages; ++page) fill(cache, page, 10 * page);
  host.copy({3, kFar, PageCopy::Way::kToHost});
  host.copy({4, kFar - 1, PageCopy::Way::kToHost});
  host.copy({1, kFar, PageCopy::Way::kFromHost});
  host.copy({0, kFar - 1, PageCopy::Way::kFromHost});
  EXPECT_EQ(values(cache, 1), (std::vector<int>{30, 31, 32}));
  EXPECT_EQ(values(cache, 0), (std::vector<int>{40, 41, 42}));
}

// A device that copies when it is waited for: 2 ms for each piece to the host, 6 ms back, and 300
// ms for the very first one.
class SlowDevice final : public Device {
 public:
  Buffer allocate(int64_t bytes) override { return Buffer(bytes); }
  Buffer allocate_on_host(int64_t bytes) override {
    host_ = Buffer(bytes);
    return Buffer(host_.span(), std::make_shared<int>());
  }
  void copy(const void*, int64_t, void* to) override {
    const auto* const at = static_cast<std::byte*>(to);
    const bool to_host = at >= host_.data() && at < host_.data() + host_.bytes();
    enqueued_ += std::chrono::milliseconds(n_copies_++ == 0 ? 300 : to_host ? 2 : 6);
  }
  void to_host(TensorView, TensorView) override {}
  void wait() override {
    std::this_thread::sleep_for(enqueued_);
    enqueued_ = {};
  }

 private:
  Buffer host_;
  int n_copies_ = 0;
  std::chrono::milliseconds enqueued_{};
};

TEST(HostPages, MeasureTheLink) {
  const KvCache cache = cache_of_two_kinds();
  SlowDevice device;
  const HostPages host(device, cache, 4);
  const double out = static_cast<double>(kBytes) / (3 * 0.002),
               back = static_cast<double>(kBytes) / (3 * 0.006);
  EXPECT_LE(host.rates().to_host_bytes_per_second, out);
  EXPECT_GT(host.rates().to_host_bytes_per_second, out / 8) << "without the first copy";
  EXPECT_LE(host.rates().to_gpu_bytes_per_second, back);
  EXPECT_GT(host.rates().to_gpu_bytes_per_second, back / 8);
}

TEST(KvCache, APageIsCopiedFromAnother) {
  const KvCache cache = cache_of_two_kinds();
  for (int page = 0; page < kPages; ++page) fill(cache, page, 10 * page);
  cache.for_each_pair(3, 1, [](std::span<std::byte> from, std::span<std::byte> to) {
    ASSERT_EQ(from.size(), to.size());
    std::copy(from.begin(), from.end(), to.begin());
  });
  for (int page = 0; page < kPages; ++page)
    EXPECT_EQ(values(cache, page)[2], 10 * (page == 1 ? 3 : page) + 2) << page;
  EXPECT_EQ(values(cache, 1), values(cache, 3));
}

TEST(KvCache, PagesAreCopiedToHostMemoryAndBack) {
  const KvCache cache = cache_of_two_kinds();
  TwoMemories device;
  HostPages host(device, cache, 4);
  EXPECT_EQ(host.rates().page_bytes, kBytes);
  for (int page = 0; page < kPages; ++page) fill(cache, page, 10 * page);
  for (const int32_t page : {0, 2, 4})
    host.copy({page, page == 4 ? 1 : page, PageCopy::Way::kToHost});
  for (int page = 0; page < kPages; ++page) fill(cache, page, 200);
  host.copy({3, 2, PageCopy::Way::kFromHost});
  host.copy({0, 1, PageCopy::Way::kFromHost});
  EXPECT_EQ(values(cache, 3), (std::vector<int>{20, 21, 22}));
  EXPECT_EQ(values(cache, 0), (std::vector<int>{40, 41, 42}));
  EXPECT_EQ(values(cache, 1), (std::vector<int>{200, 201, 202}));
}

TEST(KvCache, Fp8HasRoomForTheDimensionsOfDeepSeek) {
  EXPECT_TRUE(takes_fp8_cache({}));
  EXPECT_TRUE(takes_fp8_cache({.kv_rank = 512, .rope_dim = 64}));
  EXPECT_FALSE(takes_fp8_cache({.kv_rank = 513, .rope_dim = 64}));
  EXPECT_FALSE(takes_fp8_cache({.kv_rank = 512, .rope_dim = 65}));
}

// The planner counts the same bytes as the cache takes.
TEST(KvCache, BytesAreThoseThatThePlannerCounts) {
  for (const char* name : {"r1", "v2-lite", "k2"})
    for (const DType type : {DType::kBF16, DType::kF8E4M3}) {
      const ModelConfig config = known_model(name);
      EXPECT_EQ(KvCache::bytes_for(config, 10 * kPageSize, type),
                10 * kPageSize * kv_bytes_per_token(config, type))
          << name;
    }
  EXPECT_EQ(kv_planes(known_model("r1"), 0, DType::kBF16).token_bytes(), 1152);
  EXPECT_EQ(kv_planes(known_model("r1"), 60, DType::kF8E4M3).token_bytes(), 656);
}

}  // namespace
}  // namespace tandem::test
