// The rows that the GPU hands down are those that the CPU's kernels would encode, and every expert
// has one owner.
#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <random>
#include <thread>

#include "cpu_kernels/kernels.h"
#include "gpu_kernels/exchange/hand_off.h"
#include "gpu_kernels/stamp.h"
#include "tests/gpu_buffers.h"

namespace tandem::gpu::test {
namespace {

constexpr int kTokens = 5, kActive = 3, kExperts = 9;

struct Routed {
  std::vector<int32_t> ids;
  std::vector<float> weights;

  explicit Routed(std::mt19937& rng) {
    for (int i = 0; i < kTokens * kActive; ++i) {
      ids.push_back(static_cast<int32_t>(rng() % kExperts));
      weights.push_back(0.5f + static_cast<float>(i));
    }
  }
};

void expect_encoded(RowType type, int dim) {
  SCOPED_TRACE(testing::Message() << dim << " numbers of type " << static_cast<int>(type));
  Stream stream;
  std::mt19937 rng(dim);
  const int64_t stride = dim + 3;
  std::vector<float> x(kTokens * stride, NAN);
  for (int t = 0; t < kTokens; ++t)
    for (int c = 0; c < dim; ++c)
      x[t * stride + c] = t == 3 ? 0 : std::normal_distribution<float>(0, 1)(rng);
  const Routed routed(rng);
  const OnGpuBuffer<float> x_on_gpu(stream, x), weights(stream, routed.weights);
  const OnGpuBuffer<int32_t> ids(stream, routed.ids);

  const int64_t columns = cpu::encoded_columns(dim), row_bytes = columns * bytes_of(type);
  const Buffer down_ids(kTokens * kActive * 4, Site::kMapped),
      rows(kTokens * row_bytes, Site::kMapped), down_weights(kTokens * kActive * 4, Site::kMapped),
      scales(kTokens * 4, Site::kMapped);
  hand_down(stream, {.x = {x_on_gpu.data(), stride},
                     .ids = ids.data(),
                     .ids_stride = kActive,
                     .weights = {weights.data(), kActive},
                     .gpu_place = nullptr,
                     .gpu_ids = nullptr,
                     .to = {down_ids.as<int32_t>(), down_weights.as<float>(), scales.as<float>(),
                            rows.as<void>(), row_bytes},
                     .type = type,
                     .tokens = kTokens,
                     .n_active = kActive,
                     .dim = dim});
  stream.wait();

  EXPECT_EQ(std::memcmp(down_ids.as<int32_t>(), routed.ids.data(), kTokens * kActive * 4), 0);
  EXPECT_EQ(std::memcmp(down_weights.as<float>(), routed.weights.data(), kTokens * kActive * 4), 0);
  const cpu::KernelTable reference = cpu::kernels_for(cpu::Isa::kReference);
  alignas(64) std::byte want[4096 * 4];
  for (int t = 0; t < kTokens; ++t) {
    float scale = 0;
    std::memset(want, 0, sizeof want);
    if (type == RowType::kF32)
      std::memcpy(want, x.data() + t * stride, dim * sizeof(float));
    else
      reference.encode(
          {x.data() + t * stride, dim,
           type == RowType::kU8 ? cpu::ActivationType::kU8 : cpu::ActivationType::kBF16, want,
           &scale});
    EXPECT_EQ(std::memcmp(rows.as<std::byte>() + t * row_bytes, want, row_bytes), 0)
        << "token " << t;
    if (type == RowType::kU8) {
      EXPECT_EQ(scales.as<float>()[t], scale);
    }
  }
}

TEST(HandOff, RowsAreEncodedAsTheCpuDoes) {
  for (const RowType type : {RowType::kF32, RowType::kBF16, RowType::kU8})
    for (const int dim : {7168 / 2, 129, 128, 40, 7}) expect_encoded(type, dim);
}

// One raise a launch, by the last of its blocks.
TEST(HandOff, RowsAreThereWhenItIsRaised) {
  constexpr int kDim = 40;
  Stream stream;
  const OnGpuBuffer<float> x(stream, std::vector<float>(kTokens * kDim, 1.5f)),
      weights(stream, std::vector<float>(kTokens, 2));
  const OnGpuBuffer<int32_t> ids(stream, std::vector<int32_t>(kTokens, 7));
  const int64_t row_bytes = cpu::encoded_columns(kDim) * 4;
  SignalToHost handed_down;
  for (const int tokens : {kTokens, 1, 3}) {
    const Buffer down_ids(kTokens * 4, Site::kMapped), rows(kTokens * row_bytes, Site::kMapped),
        down_weights(kTokens * 4, Site::kMapped);
    hand_down(stream, {.x = {x.data(), kDim},
                       .ids = ids.data(),
                       .ids_stride = 1,
                       .weights = {weights.data(), 1},
                       .gpu_place = nullptr,
                       .gpu_ids = nullptr,
                       .to = {down_ids.as<int32_t>(), down_weights.as<float>(), nullptr,
                              rows.as<void>(), row_bytes},
                       .type = RowType::kF32,
                       .tokens = tokens,
                       .n_active = 1,
                       .dim = kDim,
                       .handed_down = handed_down.words()});
    handed_down.await(stream);
    for (int t = 0; t < tokens; ++t) {
      EXPECT_EQ(down_ids.as<int32_t>()[t], 7);
      EXPECT_EQ(down_weights.as<float>()[t], 2);
      for (int c = 0; c < kDim; ++c)
        EXPECT_EQ(rows.as<float>()[t * row_bytes / 4 + c], 1.5f) << t << ", " << c;
    }
    stream.wait();
    EXPECT_FALSE(handed_down.take());
  }
}

// Each launch awaits one raise, whatever its rows, and in turn with await().
TEST(HandOff, AwaitedSumsAreAdded) {
  constexpr int kDim = 2500, kStride = kDim + 2;
  Stream stream;
  const std::string why_not = why_no_hand_off(stream);
  if (!why_not.empty()) GTEST_SKIP() << why_not;
  const Buffer sum(kTokens * kDim * 4, Site::kMapped);
  SignalToStream sum_is_there;
  float number = 0;
  for (const int rows : {kTokens, 1, kTokens, 2}) {
    number += 10;
    const OnGpuBuffer<float> y(stream, std::vector<float>(kTokens * kStride, 0.5f));
    add_awaited(stream, {.y = {y.data(), kStride},
                         .sum = {sum.as<float>(), kDim},
                         .rows = rows,
                         .cols = kDim,
                         .sum_is_there = sum_is_there.words()});
    sum_is_there.await(stream);
    std::this_thread::sleep_for(std::chrono::milliseconds(3));
    std::fill_n(sum.as<float>(), kTokens * kDim, number);
    sum_is_there.raise();
    sum_is_there.raise();
    const std::vector<float> got = y.values(stream);
    for (int i = 0; i < kTokens * kStride; ++i)
      ASSERT_EQ(got[i], i / kStride < rows && i % kStride < kDim ? number + 0.5f : 0.5f) << i;
  }
}

TEST(HandOff, EveryExpertHasOneOwner) {
  Stream stream;
  std::mt19937 rng(1);
  const Routed routed(rng);
  const std::vector<int32_t> place = {-1, 0, -1, -1, 1, 2, -1, 3, -1};
  const OnGpuBuffer<float> x(stream, std::vector<float>(kTokens * 8, 1)),
      weights(stream, routed.weights);
  const OnGpuBuffer<int32_t> ids(stream, routed.ids), gpu_place(stream, place),
      gpu_ids(kTokens * kActive);
  const int64_t row_bytes = cpu::encoded_columns(8) * 2;
  const Buffer down_ids(kTokens * kActive * 4, Site::kMapped),
      rows(kTokens * row_bytes, Site::kMapped), down_weights(kTokens * kActive * 4, Site::kMapped);
  hand_down(stream, {.x = {x.data(), 8},
                     .ids = ids.data(),
                     .ids_stride = kActive,
                     .weights = {weights.data(), kActive},
                     .gpu_place = gpu_place.data(),
                     .gpu_ids = gpu_ids.data(),
                     .to = {down_ids.as<int32_t>(), down_weights.as<float>(), nullptr,
                            rows.as<void>(), row_bytes},
                     .type = RowType::kBF16,
                     .tokens = kTokens,
                     .n_active = kActive,
                     .dim = 8});
  const std::vector<int32_t> on_gpu = gpu_ids.values(stream);
  for (int i = 0; i < kTokens * kActive; ++i) {
    const int32_t id = routed.ids[i];
    EXPECT_EQ(on_gpu[i], place[id]);
    EXPECT_EQ(down_ids.as<int32_t>()[i], place[id] < 0 ? id : -1);
  }
}

// Covers one block and several, and padded rows.
TEST(HandOff, ExpertsArePlaced) {
  Stream stream;
  std::mt19937 rng(2);
  struct Case {
    int tokens, n_active, stride;
  };
  for (const auto& [tokens, n_active, stride] :
       {Case{1, 1, 1}, {5, 3, 4}, {97, 8, 8}, {64, 8, 11}}) {
    SCOPED_TRACE(testing::Message() << tokens << " tokens with " << n_active);
    std::vector<int32_t> place(256), ids(tokens * stride, 1 << 30), want;  // 1 << 30: padding
    for (int32_t& p : place) p = static_cast<int32_t>(rng() % 100) - 1;
    for (int t = 0; t < tokens; ++t)
      for (int i = 0; i < n_active; ++i) {
        ids[t * stride + i] = static_cast<int32_t>(rng() % place.size());
        want.push_back(place[ids[t * stride + i]]);
      }
    want.insert(want.end(), 3, -1);
    const OnGpuBuffer<int32_t> on_gpu(stream, ids), places(stream, place);
    const OnGpuBuffer<int32_t> out(stream, std::vector<int32_t>(want.size(), -1));
    place_experts(stream, {.ids = on_gpu.data(),
                           .ids_stride = stride,
                           .place = places.data(),
                           .out = out.data(),
                           .tokens = tokens,
                           .n_active = n_active});
    EXPECT_EQ(out.values(stream), want);
  }
  place_experts(stream, {});
  hand_down(stream, {});
  add_awaited(stream, {});
  stream.wait();
}

// The GPU's clock agrees with the host's, in recorded stamps too.
TEST(HandOff, StampsAreNanoseconds) {
  using std::chrono::steady_clock, std::chrono::milliseconds;
  Stream stream;
  const Buffer stamps(3 * 8, Site::kMapped);
  auto* const at = stamps.as<uint64_t>();
  const Graph graph = stream.capture([&] {
    stamp(stream, at);
    stamp(stream, at + 1);
  });
  stream.replay(graph);
  stream.wait();
  const uint64_t first = at[0];
  EXPECT_LE(first, at[1]);
  EXPECT_EQ(at[2], ~uint64_t{0}) << "written behind";
  const auto before = steady_clock::now();
  std::this_thread::sleep_for(milliseconds(20));
  stream.replay(graph);
  stream.wait();
  const std::chrono::nanoseconds passed = steady_clock::now() - before;
  EXPECT_GE(at[0] - first, 19'000'000u);
  EXPECT_LE(at[0] - first, static_cast<uint64_t>(passed.count()) + 50'000'000u);
}

}  // namespace
}  // namespace tandem::gpu::test
