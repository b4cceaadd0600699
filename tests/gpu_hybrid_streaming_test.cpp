// Experts in host memory that are streamed to the GPU, real or emulated, while the CPU computes the
// others.
#include <chrono>
#include <cstdlib>
#include <thread>

#include "tests/error_of.h"
#include "tests/hybrid_layers.h"

namespace tandem::test {
namespace {

ExpertRates rates_of(double link, double cpu_row) {
  return {link, link / 10, {{{1, link / 10}}}, {{{1, cpu_row}}}};
}
const ExpertRates kAllToTheGpu = rates_of(1e-9, 1), kAllToTheCpu = rates_of(1e9, 1e-9);

// Streams more experts than the stages hold at a time, in several layers.
TEST_F(HybridHandOff, ExpertsAreStreamed) {
  CudaStreaming streaming(random_.config, *cpu_, *rows_, kMaxTokens, stream_);
  streaming.divide_by(kAllToTheGpu);
  hybrid_->divide({.stream_from = 3, .streaming = &streaming});
  int n_handed_down = 0;
  interposed_->before = [&] { ++n_handed_down; };
  for (int round = 0; round < 3; ++round)
    for (const int layer : {1, 2, 3}) {
      run_layer(layer, 3 + round);
      if (layer == 2) {
        EXPECT_GE(streaming.division().n_on_gpu, 3) << "all that were asked for";
      }
    }
  EXPECT_EQ(n_handed_down, 0);
  for (const int layer : {1, 2, 3}) run_layer(layer, 2);
  EXPECT_EQ(n_handed_down, 2);
}
TEST_F(Fp8HandOff, ExpertsAreStreamed) {
  CudaStreaming streaming(random_.config, *cpu_, *rows_, kMaxTokens, stream_);
  streaming.divide_by(kAllToTheGpu);
  hybrid_->divide({.stream_from = 1, .streaming = &streaming});
  for (int round = 0; round < 3; ++round)
    for (const int layer : {1, 2, 3}) run_layer(layer, 4);
}

// The sum is the same for any division, from all experts on one device to all on the other, and for
// any experts streamed ahead because of the previous step.
template <class Fixture>
class Divided : public Fixture {
 protected:
  void any_division() {
    CudaStreaming streaming(this->random_.config, *this->cpu_, *this->rows_, kMaxTokens,
                            this->stream_);
    this->hybrid_->divide({.stream_from = 1, .streaming = &streaming});
    std::mt19937 rng(9);
    std::vector<int> n_brought(kExperts + 1);
    int n_shared = 0;
    for (int round = 0; round < 96; ++round) {
      const bool all_to_cpu = round / 2 % 8 < 3, all_to_gpu = round / 2 % 8 == 5;
      streaming.divide_by(all_to_cpu   ? kAllToTheCpu
                          : all_to_gpu ? kAllToTheGpu
                                       : rates_of(1, 0.05 * (1. + rng() % 40)));
      const int layer = 1 + round % 2;
      SCOPED_TRACE(testing::Message() << "round " << round << ", layer " << layer);
      this->run_layer(layer, 1 + static_cast<int>(rng() % kMaxTokens));
      const int n = streaming.division().n_on_gpu;
      ++n_brought[n];
      n_shared += n > 0 && !all_to_cpu && !all_to_gpu;
    }
    EXPECT_GE(std::count_if(n_brought.begin(), n_brought.end(), [](int n) { return n > 0; }), 5);
    EXPECT_GE(n_brought[0], 3);
    EXPECT_GE(n_shared, 20);
  }
};
using DividedBf16 = Divided<HybridHandOff>;
using DividedFp8 = Divided<Fp8HandOff>;
TEST_F(DividedBf16, AnyDivisionGivesTheSameSum) { any_division(); }
TEST_F(DividedFp8, AnyDivisionGivesTheSameSum) { any_division(); }

// The experts with the most rows in one step are streamed ahead of the router in the next one;
// fewer are, once streaming does not pay.
TEST_F(HybridHandOff, LikelyExpertsAreStreamedAhead) {
  CudaStreaming streaming(random_.config, *cpu_, *rows_, kMaxTokens, stream_);
  hybrid_->divide({.stream_from = 1, .streaming = &streaming});
  const auto brought = [&](const ExpertRates& rates, std::vector<int32_t> asked) {
    streaming.divide_by(rates);
    asked_ = std::move(asked);
    run_layer(2, kMaxTokens);
    const auto begin = streaming.division().order.begin();
    return std::vector<int>(begin, begin + streaming.division().n_on_gpu);
  };
  using Ids = std::vector<int>;
  constexpr int64_t kExpertBytes = int64_t{3} * 128 * 128 * sizeof(uint16_t);
  EXPECT_EQ(brought(kAllToTheGpu, {0, 1, 2}), (Ids{0, 1, 2}));
  EXPECT_EQ(streaming.bytes_streamed(), 3 * kExpertBytes) << "and nothing between them";
  EXPECT_EQ(brought(kAllToTheGpu, {5, 6, 7}), (Ids{0, 1, 5, 6, 7}));
  Ids ahead = brought(kAllToTheCpu, {3, 4, 2});
  ahead.resize(3);
  std::sort(ahead.begin(), ahead.end());
  EXPECT_EQ(ahead, (Ids{5, 6, 7}));
  EXPECT_EQ(brought(kAllToTheCpu, {3, 4, 2}).size(), 2u);
  EXPECT_EQ(brought(kAllToTheCpu, {3, 4, 2}).size(), 0u);
}

TEST_F(HybridHandOff, ATimelineHasBothParts) {
  CudaStreaming streaming(random_.config, *cpu_, *rows_, kMaxTokens, stream_);
  streaming.divide_by(rates_of(1, 0.5));
  hybrid_->divide({.stream_from = 1, .streaming = &streaming});
  Timeline timeline;
  hybrid_->record(timeline);
  for (const int layer : {1, 2, 3}) run_layer(layer, kMaxTokens);
  end_step(kMaxTokens);
  std::map<std::string, int> n_spans;
  for (const Timeline::Span& s : timeline.spans()) {
    EXPECT_GE(s.end, s.begin) << s.name << " of layer " << s.layer;
    ++n_spans[s.name];
  }
  EXPECT_EQ(n_spans["copies and experts"], 2);
  EXPECT_EQ(n_spans["experts of host memory"], 2);
  EXPECT_EQ(n_spans["waits for the GPU"], 2);
  EXPECT_EQ(n_spans["adds the CPU's sum"], 0) << "a part of those";
}

// Delays the copies of streams that are made while the object exists, on an emulated GPU.
class LateCopies {
 public:
  LateCopies() { setenv("TANDEM_GPU_COPY_DELAY", "3000", 1); }
  ~LateCopies() { unsetenv("TANDEM_GPU_COPY_DELAY"); }
};

// A slow link and then a slow GPU: each waits for the other, and the team waits for the link.
TEST_F(HybridHandOff, ALateLinkIsAwaited) {
  const LateCopies late;
  CudaStreaming streaming(random_.config, *cpu_, *rows_, kMaxTokens, stream_);
  hybrid_->divide({.stream_from = 1, .streaming = &streaming});
  for (int round = 0; round < 4; ++round) {
    streaming.divide_by(round % 2 == 0 ? kAllToTheGpu : rates_of(1, 0.5));
    for (const int layer : {1, 2}) run_layer(layer, kMaxTokens);
  }
}
// Copies of 3 ms are in the CPU's part of the timeline, and 5 ms of the GPU before them are in its
// wait.
TEST_F(HybridHandOff, LateCopiesAreOnTheTimeline) {
  if (!gpu::open_gpu().emulated) GTEST_SKIP() << "the copies of a GPU are not late";
  const LateCopies late;
  CudaStreaming streaming(random_.config, *cpu_, *rows_, kMaxTokens, stream_);
  streaming.divide_by(kAllToTheGpu);
  hybrid_->divide({.stream_from = 1, .streaming = &streaming});
  Timeline timeline;
  hybrid_->record(timeline);
  before_hand_down_ = [] { std::this_thread::sleep_for(std::chrono::milliseconds(5)); };
  for (const int layer : {1, 2}) run_layer(layer, kMaxTokens);
  run_layer(3, kMaxTokens);
  end_step(kMaxTokens);
  int n = 0;
  for (const Timeline::Span& s : timeline.spans()) {
    const std::string name = s.name;
    if (name == "copies and experts") {
      EXPECT_GE(s.end - s.begin, 2e-3) << s.layer;
      ++n;
    }
    if (name == "waits for the GPU") {
      EXPECT_GE(s.end - s.begin, 2e-3) << s.layer;
    }
  }
  EXPECT_EQ(n, 2);
}
TEST_F(HybridHandOff, ALateGpuIsAwaitedByTheLink) {
  CudaStreaming streaming(random_.config, *cpu_, *rows_, kMaxTokens, stream_);
  streaming.divide_by(kAllToTheGpu);
  hybrid_->divide({.stream_from = 1, .streaming = &streaming});
  const auto delay = [&] {
    stream_.run_on_host([] { std::this_thread::sleep_for(std::chrono::milliseconds(10)); });
  };
  for (int round = 0; round < 4; ++round)
    for (const int layer : {1, 2}) run_layer(layer, kMaxTokens, delay);
}

// The CPU's experts have the bits of the CPU engine, in several parts or in one.
TEST_F(HybridHandOff, ExpertsOnTheCpuAreExact) {
  CudaStreaming streaming(random_.config, *cpu_, *rows_, kMaxTokens, stream_);
  streaming.divide_by(kAllToTheCpu);
  hybrid_->divide({.stream_from = 1, .streaming = &streaming});
  bound_ = 1e-12;
  for (const int n : {1, kMaxTokens}) run_layer(2, n);
  EXPECT_EQ(streaming.division().n_on_gpu, 0);
}

TEST_F(HybridHandOff, RatesAreMeasured) {
  CudaStreaming streaming(random_.config, *cpu_, *rows_, kMaxTokens, stream_);
  const ExpertRates rates = streaming.measured_rates(kMaxTokens);
  EXPECT_GT(rates.link_seconds, 0);
  EXPECT_GT(rates.copy_seconds, 0);
  for (const SecondsByRows& s : {rates.gpu, rates.cpu}) {
    ASSERT_EQ(s.points.size(), 2u) << "of 2 tokens, who use all five experts, and of 6";
    EXPECT_EQ(s.points[0].rows, 1);
    EXPECT_EQ(s.points[1].rows, 4) << "18 by 5";
    EXPECT_GT(std::min(s.points[0].seconds, s.points[1].seconds), 0);
  }
  streaming.divide_by(rates);
  hybrid_->divide({.stream_from = 1, .streaming = &streaming});
  for (const int layer : {1, 2, 3}) run_layer(layer, kMaxTokens);
}

TEST_F(ConvertedHandOff, OtherFormatsAreNotStreamed) {
  EXPECT_FALSE(CudaStreaming::takes(*cpu_));
  EXPECT_TRUE(
      says(error_of([&] { CudaStreaming(random_.config, *cpu_, *rows_, kMaxTokens, stream_); }),
           "set stream_from_tokens to 0"));
}

TEST_F(HybridHandOff, TheCrossoverIsMeasured) {
  CudaStreaming streaming(random_.config, *cpu_, *rows_, kMaxTokens, stream_);
  streaming.divide_by(streaming.measured_rates(kMaxTokens));
  const int crossover = hybrid_->measured_crossover(kMaxTokens, streaming);
  EXPECT_TRUE(crossover == 0 || (crossover >= 1 && crossover <= kMaxTokens)) << crossover;
  run_layer(1, kMaxTokens);  // the next layer is unaffected
}

}  // namespace
}  // namespace tandem::test
