// The hand-off between the GPU, real or emulated, and the CPU's experts: each side waits for the
// other, no data is lost, and a missing side is reported.
#include <array>
#include <atomic>
#include <chrono>
#include <future>
#include <map>
#include <nlohmann/json.hpp>
#include <thread>
#include <utility>

#include "offload/gpu/cuda_routing_recorder.h"
#include "tests/error_of.h"
#include "tests/hybrid_layers.h"

namespace tandem::test {
namespace {

using std::chrono::milliseconds;

TEST_F(HybridHandOff, PartsAddUp) {
  for (int round = 0; round < 4; ++round)
    for (const int layer : {1, 2, 3})
      for (const int n : {1, 3, kMaxTokens}) {
        SCOPED_TRACE(testing::Message() << "layer " << layer << ", " << n << " tokens");
        run_layer(layer, n);
      }
}

// Experts on the CPU give the same bits as without a GPU, because they get the rows that the CPU
// would have encoded.
TEST_F(HybridHandOff, NothingIsRoundedInTheHandOff) {
  bound_ = 1e-12;
  for (const int n : {1, kMaxTokens}) run_layer(2, n);
}

TEST_F(ConvertedHandOff, BytesAreHandedDownToInt8) {
  bound_ = 1e-12;
  for (const int n : {1, kMaxTokens}) run_layer(2, n);
}

TEST_F(Fp8HandOff, PartsAddUp) {
  for (const int layer : {1, 2, 3}) run_layer(layer, 5);
}

// A step of six tokens through all layers, in one micro-batch, or in two or three that alternate as
// in the forward pass. `before_hand_down_` is the GPU's work before a layer's experts.
class HybridSteps : public HybridHandOff {
 protected:
  HybridSteps() = default;
  explicit HybridSteps(ExpertsLayout layout) : HybridHandOff(DType::kBF16, std::move(layout)) {}

  static constexpr int kTokens = 6;

  MicroBatches parts(int n) const {
    if (n == 1) return {{part(0, kTokens)}, 1};
    MicroBatches some = {{part(0, 4), part(4, 2)}, n};
    if (n == 3) some.at = {part(0, 2), part(2, 2), part(4, 2)};
    for (int i = 0; i < n; ++i) some.at[i].micro_batch = i;
    return some;
  }
  Batch part(int first, int n) const {
    return {std::span(ids_).subspan(first, n), {}, std::span(sequences_).subspan(first, n), {}};
  }
  // Enqueues all layers; the sums are added to y on the GPU.
  void enqueue(int n_parts) {
    const auto begin = [&](int layer, const Batch& part) {
      if (before_hand_down_) stream_.run_on_host(before_hand_down_);
      const auto rows = [&](const auto& of, int64_t cols, DType dtype) {
        return TensorView{const_cast<void*>(static_cast<const void*>(of.data())), kTokens, cols,
                          cols, dtype}
            .rows_from(part.first_row(), part.n());
      };
      tickets_[part.micro_batch] =
          hybrid_->submit({.layer = layer,
                           .x = rows(x_gpu_, dim_, DType::kF32),
                           .routing = {rows(ids_gpu_, kActive, DType::kI32),
                                       rows(weights_gpu_, kActive, DType::kF32)},
                           .first_row = part.first_row(),
                           .micro_batch = part.micro_batch});
      if (between_) between_();
      return hybrid_->waits(tickets_[part.micro_batch]);
    };
    const auto end = [&](const Batch& part) {
      const TensorView y = {const_cast<float*>(y_gpu_.data()), kTokens, dim_, dim_, DType::kF32};
      hybrid_->add_to(tickets_[part.micro_batch], y.rows_from(part.first_row(), part.n()));
    };
    // A micro-batch proceeds until it waits, then the other one does.
    const MicroBatches step = parts(n_parts);
    std::array<size_t, ExpertPool::kMaxTickets> next = {};
    std::array<bool, ExpertPool::kMaxTickets> waits = {};
    const auto resume = [&](int i) {
      const Batch& batch = step.at[i];
      if (std::exchange(waits[i], false)) end(batch);
      while (next[i] < layers_.size()) {
        if ((waits[i] = begin(layers_[next[i]++], batch))) return;
        end(batch);
      }
    };
    for (bool any = true; any;) {
      any = false;
      for (int i = 0; i < step.n; ++i)
        if (next[i] < layers_.size() || waits[i]) {
          resume(i);
          any = true;
        }
    }
    if (!stream_.is_recording()) hybrid_->end_step(all_layers(), step);
  }
  void start() {
    x_ = gpu::test::random_floats(rng_, kTokens * dim_, 1);
    stream_.copy(x_.data(), kTokens * dim_ * int64_t{sizeof(float)}, x_gpu_.data());
    stream_.copy(zeros_.data(), kTokens * dim_ * int64_t{sizeof(float)}, y_gpu_.data());
  }
  void expect_sum() {
    const std::vector<float> got = y_gpu_.values(stream_);
    std::vector<float> y = zeros_;
    const auto matrix = [&](const void* data, int64_t cols, DType dtype) {
      return TensorView{const_cast<void*>(data), kTokens, cols, cols, dtype};
    };
    for (const int layer : layers_) {
      const Ticket ticket = reference_->submit({layer,
                                                matrix(x_.data(), dim_, DType::kF32),
                                                {matrix(ids_.data(), kActive, DType::kI32),
                                                 matrix(weights_.data(), kActive, DType::kF32)}});
      reference_->add_to(ticket, matrix(y.data(), dim_, DType::kF32));
    }
    expect_close(got, y, 2e-2 * largest(y));
  }

  std::vector<int> layers_ = {1, 2, 3};
  Ticket tickets_[ExpertPool::kMaxTickets] = {};
  std::function<void()> between_;  // enqueues the shared expert, between submit() and waits()
  const int dim_ = random_.config.dim;
  const std::vector<int32_t> ids_ = {0, 1, 2, 5, 6, 7, 1, 3, 4, 0, 2, 7, 3, 4, 5, 6, 1, 0};
  const std::vector<float> zeros_ = std::vector<float>(kTokens * dim_, 0.f),
                           weights_ = std::vector<float>(kTokens * kActive, 0.5f);
  const std::vector<Sequence> sequences_ = {{0, 1, 1, {}}, {1, 1, 1, {}}, {2, 1, 1, {}},
                                            {3, 1, 1, {}}, {4, 1, 1, {}}, {5, 1, 1, {}}};
  const gpu::test::OnGpuBuffer<float>&x_gpu_ = keep(zeros_), &y_gpu_ = keep(zeros_),
        &weights_gpu_ = keep(weights_);
  const gpu::test::OnGpuBuffer<int32_t>& ids_gpu_ = keep(ids_);
  std::vector<float> x_;
};

TEST_F(HybridSteps, MicroBatchesGiveTheSameSum) {
  for (int round = 0; round < 6; ++round) {
    const auto gpu = std::chrono::microseconds(round % 3 == 1 ? 200 * round : 0);
    const auto cpu = std::chrono::microseconds(round % 3 == 2 ? 200 * round : 0);
    before_hand_down_ = [=] { std::this_thread::sleep_for(gpu); };
    interposed_->before = [=] { std::this_thread::sleep_for(cpu); };
    start();
    enqueue(1 + round % 2);
    expect_sum();
  }
}

// Rows of bytes have one scale each.
class ConvertedSteps : public HybridSteps {
 protected:
  ConvertedSteps() : HybridSteps(ExpertsLayout(WeightFormat{DType::kI8})) {}
};
TEST_F(ConvertedSteps, MicroBatchesGiveTheSameSum) {
  for (const int n_parts : {1, 2, 2}) {
    start();
    enqueue(n_parts);
    expect_sum();
  }
}

// Layer 1 has rows of one byte a column, layer 2 of two or four. While the CPU still reads the
// second micro-batch's rows of one layer, the GPU hands down the first micro-batch's rows of the
// next.
class MixedSteps : public HybridSteps {
 protected:
  MixedSteps() : HybridSteps(ExpertsLayout({{}, WeightFormat{DType::kI8}, {}, {}}, {})) {}
};
TEST_F(MixedSteps, RowsOfALayerStayWhileTheNextOneIsHandedDown) {
  layers_ = {1, 2, 1, 2};
  std::atomic<int> n_submitted = 0;  // submissions whose enqueued work is done
  int n_served = 0, n_parts = 1;
  between_ = [&] { stream_.run_on_host([&] { ++n_submitted; }); };
  interposed_->before = [&] {
    const int n = std::min(n_served++ + n_parts, n_parts * static_cast<int>(layers_.size()));
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(5);
    while (n_submitted < n && std::chrono::steady_clock::now() < end)
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    EXPECT_GE(n_submitted, n);
  };
  for (n_parts = 1; n_parts <= 2; ++n_parts) {
    n_submitted = n_served = 0;
    start();
    enqueue(n_parts);
    expect_sum();
  }
}

TEST_F(HybridSteps, MicroBatchesOnTheTimeline) {
  Timeline timeline;
  hybrid_->record(timeline);
  const double first = StepTrace::now();
  for (const int n_parts : {1, 2}) {
    start();
    enqueue(n_parts);
    expect_sum();
  }
  const double last = StepTrace::now();
  ASSERT_EQ(timeline.n_steps(), 2);
  std::map<std::string, int> n_spans;
  for (const Timeline::Span& s : timeline.spans()) {
    EXPECT_GE(s.end, s.begin) << s.name << " of layer " << s.layer;
    // GPU and CPU are on one clock, as exactly as a launch takes.
    EXPECT_GT(s.begin, first - 0.1) << s.name;
    EXPECT_LT(s.end, last + 0.1) << s.name;
    n_spans[fmt::format("{} {} {}", s.name, s.step, s.half)]++;
  }
  for (const char* part : {"0 0", "1 0", "1 1"}) {
    EXPECT_EQ(n_spans[fmt::format("experts {}", part)], 2);
    EXPECT_EQ(n_spans[fmt::format("shared expert {}", part)], 3);
  }
  EXPECT_EQ(n_spans["experts 0 1"], 0);
  // The mean of a layer includes both micro-batches.
  double gpu = 0;
  for (const Timeline::Span& s : timeline.spans())
    if (s.step == 1 && std::string(s.name) == "shared expert") gpu += (s.end - s.begin) / 3;
  Timeline second;
  second.start_step(kTokens);
  for (const Timeline::Span& s : timeline.spans())
    if (s.step == 1) second.add(s);
  const auto json = nlohmann::json::parse(timeline_json(second));
  EXPECT_NEAR(json["mean_seconds_a_layer"][0]["parts"]["GPU: shared expert"], gpu, 1e-9);
}

// Where GPU and CPU take equally long, two micro-batches take little more than half of the time.
TEST_F(HybridSteps, MicroBatchesOverlap) {
  layers_.assign(8, 2);  // no experts on the GPU, whose kernels are slow when emulated
  const auto seconds = [&](int n_parts, int work) {
    const auto busy = milliseconds(work / n_parts);
    before_hand_down_ = interposed_->before = [=] { std::this_thread::sleep_for(busy); };
    start();
    const auto begin = std::chrono::steady_clock::now();
    enqueue(n_parts);
    stream_.wait();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  };
  // Other programs may delay the emulated kernels, beside which the work is then made longer.
  double best = 0;
  for (int work = 24; work <= 192 && best < 1.3; work *= 2)
    best = std::max(best, seconds(1, work) / seconds(2, work));
  EXPECT_GE(best, 1.3);
}

// Workers have the rows of every micro-batch before the sums of the first are awaited, kernel by
// kernel and in recorded steps.
TEST_F(HybridSteps, WorkersHaveSeveralMicroBatchesAtATime) {
  interposed_->elsewhere = true;
  std::string order;
  interposed_->submitted = [&](Ticket ticket) { order += fmt::format(" rows {}", ticket); };
  interposed_->before_sum = [&](Ticket ticket) { order += fmt::format(" sum {}", ticket); };
  layers_ = {1, 3, 2};
  const std::map<int, std::string> orders = {
      {1, " rows 0 sum 0 rows 0 sum 0"},
      {2, " rows 0 rows 1 sum 0 rows 0 sum 1 rows 1 sum 0 sum 1"},
      {3, " rows 0 rows 1 rows 2 sum 0 rows 0 sum 1 rows 1 sum 2 rows 2 sum 0 sum 1 sum 2"}};
  for (const auto& [n_parts, want] : orders) {
    SCOPED_TRACE(testing::Message() << n_parts << " parts");
    start();
    enqueue(n_parts);
    expect_sum();
    EXPECT_EQ(order, want);
    order.clear();
    const gpu::Graph graph = stream_.capture([&, n = n_parts] { enqueue(n); });
    start();
    stream_.replay(graph);
    hybrid_->follow({1, 3}, parts(n_parts));
    expect_sum();
    EXPECT_EQ(order, want) << "recorded";
    order.clear();
  }
}

// Where workers answer after as long as the GPU computes, three micro-batches hide half of that.
TEST_F(HybridSteps, RoundTripsAreHidden) {
  using Clock = std::chrono::steady_clock;
  layers_.assign(6, 2);
  interposed_->elsewhere = true;
  const auto seconds = [&](int n_parts, int work) {
    std::array<Clock::time_point, ExpertPool::kMaxTickets> answered = {};
    before_hand_down_ = [=] { std::this_thread::sleep_for(milliseconds(work / n_parts)); };
    interposed_->submitted = [&](Ticket t) { answered[t] = Clock::now() + milliseconds(work); };
    interposed_->before_sum = [&](Ticket t) { std::this_thread::sleep_until(answered[t]); };
    start();
    const auto begin = Clock::now();
    enqueue(n_parts);
    stream_.wait();
    return std::chrono::duration<double>(Clock::now() - begin).count();
  };
  // Other programs may delay the emulated kernels, beside which the work is then made longer.
  double best = 0;
  for (int work = 12; work <= 192 && best < 1.3; work *= 2)
    best = std::max(best, seconds(1, work) / seconds(3, work));
  EXPECT_GE(best, 1.3);
}

// The rest of a failed step is not computed, and the next step is a whole one.
TEST_F(HybridSteps, NobodyIsAskedAfterAFailure) {
  for (const bool elsewhere : {false, true})
    for (const int n_parts : {1, 2}) {
      SCOPED_TRACE(testing::Message() << n_parts << " parts" << (elsewhere ? ", elsewhere" : ""));
      interposed_->elsewhere = elsewhere;
      int n_calls = 0;
      interposed_->before = [&] {
        if (++n_calls == n_parts) throw StepFailed("no worker is up");
      };
      start();
      EXPECT_THROW(enqueue(n_parts), StepFailed);
      EXPECT_EQ(n_calls, n_parts) << "of the 2 layers with experts on the CPU";
      interposed_->before = {};
      start();
      enqueue(n_parts);
      expect_sum();
    }
}

// A micro-batch of a step of few tokens may be empty, also of one whose routing is counted.
TEST_F(HybridSteps, MicroBatchesWithoutTokens) {
  interposed_->elsewhere = true;
  CudaRoutingRecorder recorder(random_.config, kTokens, stream_);
  hybrid_->observe(&recorder);
  MicroBatches step = {{part(0, kTokens), part(kTokens, 0), part(kTokens, 0)}, 3};
  for (int i = 0; i < step.n; ++i) step.at[i].micro_batch = i;
  start();
  const TensorView nothing = {nullptr, 0, dim_, dim_};
  const Routing nowhere = {{nullptr, 0, kActive, kActive, DType::kI32},
                           {nullptr, 0, kActive, kActive}};
  const gpu::Graph graph = stream_.capture([&] {
    for (int i = 1; i < step.n; ++i) {
      const Ticket ticket = hybrid_->submit(
          {.layer = 1, .x = nothing, .routing = nowhere, .first_row = kTokens, .micro_batch = i});
      EXPECT_FALSE(hybrid_->waits(ticket));
      hybrid_->add_to(ticket, nothing);
    }
    enqueue(1);
  });
  stream_.replay(graph);
  hybrid_->follow(all_layers(), step);
  expect_sum();
}

// The CPU's part ends only after the GPU has done the work between submit() and waits(), of both
// micro-batches. The GPU must therefore not wait for the CPU earlier, in recorded steps and kernel
// by kernel.
TEST_F(HybridSteps, TheSharedExpertRunsWhileTheCpuComputes) {
  std::atomic<int> n_done = 0;  // number of shared experts
  int n_begun = 0, n_late = 0, n_parts = 1;
  between_ = [&] { stream_.run_on_host([&] { ++n_done; }); };
  interposed_->before = [&] {
    const int n_before_await = n_begun++ + n_parts;
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(n_late > 0 ? 0 : 5);
    while (n_done < n_before_await && std::chrono::steady_clock::now() < end)
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    n_late += n_done < n_before_await;
  };
  for (const bool recorded : {false, true})
    for (n_parts = 1; n_parts <= 2; ++n_parts) {
      SCOPED_TRACE(testing::Message() << n_parts << " parts" << (recorded ? ", recorded" : ""));
      n_done = n_begun = 0;
      start();
      if (recorded) {
        const gpu::Graph graph = stream_.capture([&] { enqueue(n_parts); });
        stream_.replay(graph);
        hybrid_->follow(all_layers(), parts(n_parts));
        expect_sum();
      } else {
        enqueue(n_parts);
        expect_sum();
      }
      EXPECT_EQ(n_begun, 2 * n_parts) << "layers 1 and 2 have experts on the CPU";
      EXPECT_EQ(n_done, 3 * n_parts);
      EXPECT_EQ(n_late, 0) << "the GPU waited for the CPU before the shared expert";
    }
}

// A recorded step does not call submit() and add_to().
TEST_F(HybridSteps, TheCpuFollowsAReplay) {
  constexpr int kReplays = 12;
  const gpu::Graph one = stream_.capture([&] { enqueue(1); });
  const gpu::Graph two = stream_.capture([&] { enqueue(2); });
  for (int replay = 0; replay < kReplays; ++replay) {
    start();
    if (replay % 5 == 1) stream_.run_on_host([] { std::this_thread::sleep_for(milliseconds(3)); });
    const int n_parts = 1 + replay % 3 / 2;
    stream_.replay(n_parts == 1 ? one : two);
    if (replay % 5 == 2) std::this_thread::sleep_for(milliseconds(3));
    hybrid_->follow(all_layers(), parts(n_parts));
    expect_sum();
  }
  // If the CPU fails during a step, the GPU does not wait in later layers.
  for (const int n_parts : {1, 2}) {
    int n_calls = 0;
    interposed_->before = [&] {
      if (++n_calls == n_parts) fail("out of everything");
    };
    stream_.replay(n_parts == 1 ? one : two);
    const std::string said = error_of([&] { hybrid_->follow(all_layers(), parts(n_parts)); });
    EXPECT_TRUE(says(said, n_parts == 1 ? "out of everything" : "an earlier step failed"));
    stream_.wait();
  }
}

// A recorded step does not stream, whatever its number of tokens, and its timeline shows that.
TEST_F(HybridSteps, AReplayOnTheTimelineDoesNotStream) {
  CudaStreaming streaming(random_.config, *cpu_, *rows_, kMaxTokens, stream_);
  hybrid_->divide({.stream_from = 1, .streaming = &streaming});
  Timeline timeline;
  hybrid_->record(timeline);
  const gpu::Graph graph = stream_.capture([&] { enqueue(1); });
  start();
  stream_.replay(graph);
  hybrid_->follow(all_layers(), parts(1));
  hybrid_->end_step(all_layers(), parts(1));
  expect_sum();
  std::map<std::string, int> n_spans;
  for (const Timeline::Span& s : timeline.spans()) ++n_spans[s.name];
  EXPECT_EQ(n_spans["waits for the CPU"], 2);
  EXPECT_EQ(n_spans["experts of host memory"], 0);
}

// The timeline has the parts of every layer with non-negative lengths, and is valid JSON.
TEST_F(HybridHandOff, ATimelineHasAllParts) {
  Timeline timeline;
  hybrid_->record(timeline);
  for (int step = 0; step < 2; ++step) {
    for (const int layer : {1, 2, 3}) run_layer(layer, 1 + step);
    end_step(1 + step);
  }
  EXPECT_EQ(timeline.n_steps(), 2);
  EXPECT_EQ(timeline.n_tokens(1), 2);
  std::map<std::string, int> n_spans;
  for (const Timeline::Span& s : timeline.spans()) {
    EXPECT_GE(s.end, s.begin) << s.name << " of layer " << s.layer;
    ++n_spans[s.name];
  }
  EXPECT_EQ(n_spans["experts"], 4) << "of the CPU in layers 1 and 2";
  EXPECT_EQ(n_spans["waits for the CPU"], 4);
  EXPECT_EQ(n_spans["experts, down"], 4) << "of the GPU in layers 1 and 3";
  EXPECT_EQ(n_spans["shared expert"], 6);
  LayerTime planned;
  planned[Part::kCpuExperts] = 3;
  planned[Part::kAttention] = planned[Part::kRouter] = 1;
  planned.seconds = 7;
  const auto json = nlohmann::json::parse(timeline_json(timeline, {{2, planned}}));
  EXPECT_EQ(json["traceEvents"].size(), timeline.spans().size() + 4);
  ASSERT_EQ(json["mean_seconds_a_layer"].size(), 2u);
  const auto &one = json["mean_seconds_a_layer"][0], &two = json["mean_seconds_a_layer"][1];
  EXPECT_GT(two["parts"]["CPU: experts"], 0);
  EXPECT_FALSE(one.contains("beside_planned")) << "nothing was planned of one token";
  const auto& beside = two["beside_planned"];
  EXPECT_EQ(beside["cpu_experts"]["predicted"], 3);
  EXPECT_NEAR(beside["cpu_experts"]["measured"],
              2. / 3 * two["parts"]["CPU: experts"].get<double>(), 1e-12)
      << "two of three layers have experts on the CPU";
  EXPECT_EQ(beside["attention_and_router"]["predicted"], 2);
  EXPECT_EQ(beside["layer"]["predicted"], 7);
  double gpu = 0;
  for (const Timeline::Span& s : timeline.spans())
    if (s.step == 1 && s.track == Timeline::Track::kGpu) gpu += (s.end - s.begin) / 3;
  EXPECT_NEAR(beside["layer"]["measured"], gpu, 1e-9);
}

// Short delays end while the CPU polls, long ones while it sleeps.
TEST_F(HybridHandOff, ALateSideIsAwaited) {
  for (int round = 0; round < 60; ++round) {
    const auto gpu = std::chrono::microseconds(round % 3 == 1 ? 20 * round : 0);
    const auto cpu = std::chrono::microseconds(round % 3 == 2 ? 20 * round : 0);
    before_hand_down_ = [=] { std::this_thread::sleep_for(round == 31 ? milliseconds(30) : gpu); };
    interposed_->before = [=] { std::this_thread::sleep_for(cpu); };
    run_layer(1 + round % 3, 1 + round % kMaxTokens,
              [=] { std::this_thread::sleep_for(round == 32 ? milliseconds(30) : cpu / 2); });
  }
}

// The GPU hangs: the CPU gives up, and the GPU does not wait when it continues.
TEST_F(HybridHandOff, AMissingGpuIsReported) {
  std::promise<void> release;
  std::shared_future<void> released = release.get_future().share();
  before_hand_down_ = [released] { released.wait(); };
  patience_ = milliseconds(100);
  SetUp();
  const auto start = std::chrono::steady_clock::now();
  const std::string said = error_of([&] { run_layer(1, 2); });
  EXPECT_TRUE(says(said, "the GPU did not reach layer 1 in 0.1 s"));
  EXPECT_GT(std::chrono::steady_clock::now() - start, milliseconds(99));
  release.set_value();
  stream_.wait();
  before_hand_down_ = {};
  EXPECT_TRUE(says(error_of([&] { run_layer(1, 2); }), "an earlier step failed"));
}

// The CPU's part fails: the step fails, and the GPU does not wait.
TEST_F(HybridHandOff, AFailingCpuIsReported) {
  interposed_->before = [] { fail("out of everything"); };
  EXPECT_TRUE(says(error_of([&] { run_layer(2, 1); }), "out of everything"));
  stream_.wait();
  interposed_->before = {};
  EXPECT_TRUE(says(error_of([&] { run_layer(2, 1); }), "an earlier step failed"));
}

}  // namespace
}  // namespace tandem::test
