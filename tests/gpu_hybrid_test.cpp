// The hand-off between the GPU, real or emulated, and the CPU's experts: whoever is late is waited
// for, nothing is lost, and who does not come is said.
#include <chrono>
#include <future>
#include <map>
#include <nlohmann/json.hpp>
#include <thread>

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

// What the CPU alone computes is the same to the bit: it gets the rows that it would have encoded.
TEST_F(HybridHandOff, NothingIsRoundedOnTheWay) {
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

// A recorded step goes through its layers without submit() and add_to().
TEST_F(HybridHandOff, TheCpuFollowsAReplay) {
  constexpr int kTokens = 2, kReplays = 30;
  const int dim = random_.config.dim;
  const std::vector<float> zeros(kTokens * dim, 0.f), weights(kTokens * kActive, 0.5f);
  const auto &x_card = keep(zeros), &y_card = keep(zeros), &w_card = keep(weights);
  const auto& ids_card = keep(std::vector<int32_t>{0, 1, 2, 5, 6, 7});
  const auto matrix = [&](const void* data, int64_t cols, DType dtype) {
    return TensorView{const_cast<void*>(data), kTokens, cols, cols, dtype};
  };
  const gpu::Graph graph = stream_.capture([&] {
    for (const int layer : {1, 2, 3}) {
      hybrid_->submit({layer,
                       matrix(x_card.data(), dim, DType::kF32),
                       {matrix(ids_card.data(), kActive, DType::kI32),
                        matrix(w_card.data(), kActive, DType::kF32)}});
      hybrid_->add_to(matrix(y_card.data(), dim, DType::kF32));
    }
  });
  const std::vector<int32_t> ids = {0, 1, 2, 5, 6, 7};
  for (int replay = 0; replay < kReplays; ++replay) {
    const std::vector<float> x = gpu::test::random_floats(rng_, kTokens * dim, 1);
    stream_.copy(x.data(), kTokens * dim * int64_t{sizeof(float)}, x_card.data());
    stream_.copy(zeros.data(), kTokens * dim * int64_t{sizeof(float)}, y_card.data());
    if (replay % 5 == 1) stream_.run_on_host([] { std::this_thread::sleep_for(milliseconds(3)); });
    stream_.replay(graph);
    if (replay % 5 == 2) std::this_thread::sleep_for(milliseconds(3));
    hybrid_->follow(kTokens);
    const std::vector<float> got = y_card.values(stream_);
    std::vector<float> y = zeros;
    for (const int layer : {1, 2, 3}) {
      reference_->submit({layer,
                          matrix(x.data(), dim, DType::kF32),
                          {matrix(ids.data(), kActive, DType::kI32),
                           matrix(weights.data(), kActive, DType::kF32)}});
      reference_->add_to(matrix(y.data(), dim, DType::kF32));
    }
    expect_close(got, y, 2e-2 * largest(y));
  }
  // In the middle of a step the CPU fails: the card is not held up in the layers that follow.
  int n_calls = 0;
  interposed_->before = [&] {
    if (++n_calls == 1) fail("out of everything");
  };
  stream_.replay(graph);
  EXPECT_TRUE(says(error_of([&] { hybrid_->follow(kTokens); }), "out of everything"));
  stream_.wait();
}

// What was when: parts of every layer, none of negative length, and as JSON.
TEST_F(HybridHandOff, ATimelineHasAllParts) {
  Timeline timeline;
  hybrid_->record(timeline);
  for (int step = 0; step < 2; ++step)
    for (const int layer : {1, 2, 3}) run_layer(layer, 1 + step);
  EXPECT_EQ(timeline.n_steps(), 2);
  EXPECT_EQ(timeline.n_tokens(1), 2);
  std::map<std::string, int> n_spans;
  for (const Timeline::Span& s : timeline.spans()) {
    EXPECT_GE(s.end, s.begin) << s.name << " of layer " << s.layer;
    ++n_spans[s.name];
  }
  EXPECT_EQ(n_spans["experts"], 4) << "of the CPU in layers 1 and 2";
  EXPECT_EQ(n_spans["waits for the CPU"], 4);
  EXPECT_EQ(n_spans["experts, down"], 4) << "of the card in layers 1 and 3";
  EXPECT_EQ(n_spans["shared expert"], 6);
  LayerTime planned;
  planned[Part::kCpuExperts] = 3;
  planned[Part::kAttention] = planned[Part::kRouter] = 1;
  planned.seconds = 7;
  const auto json = nlohmann::json::parse(timeline_json(timeline, {{2, planned}}));
  EXPECT_EQ(json["traceEvents"].size(), timeline.spans().size() + 3);
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

// Short delays fall into the CPU's polling, long ones into its sleep.
TEST_F(HybridHandOff, WhoeverIsLateIsAwaited) {
  for (int round = 0; round < 60; ++round) {
    const auto card = std::chrono::microseconds(round % 3 == 1 ? 20 * round : 0);
    const auto cpu = std::chrono::microseconds(round % 3 == 2 ? 20 * round : 0);
    before_hand_down_ = [=] { std::this_thread::sleep_for(round == 31 ? milliseconds(30) : card); };
    interposed_->before = [=] { std::this_thread::sleep_for(cpu); };
    run_layer(1 + round % 3, 1 + round % kMaxTokens,
              [=] { std::this_thread::sleep_for(round == 32 ? milliseconds(30) : cpu / 2); });
  }
}

// The card hangs: the CPU gives up, and once the card goes on it is not held up by that.
TEST_F(HybridHandOff, ACardThatDoesNotComeIsSaid) {
  std::promise<void> release;
  std::shared_future<void> released = release.get_future().share();
  before_hand_down_ = [released] { released.wait(); };
  hybrid_->set_patience(milliseconds(100));
  const auto start = std::chrono::steady_clock::now();
  const std::string said = error_of([&] { run_layer(1, 2); });
  EXPECT_TRUE(says(said, "the GPU has not come to layer 1 in 0.1 s"));
  EXPECT_GT(std::chrono::steady_clock::now() - start, milliseconds(99));
  release.set_value();
  stream_.wait();
  before_hand_down_ = {};
  EXPECT_TRUE(says(error_of([&] { run_layer(1, 2); }), "an earlier step failed"));
}

// The CPU's part fails: so does the step, and the card is not held up.
TEST_F(HybridHandOff, ACpuThatFailsIsSaid) {
  interposed_->before = [] { fail("out of everything"); };
  EXPECT_TRUE(says(error_of([&] { run_layer(2, 1); }), "out of everything"));
  stream_.wait();
  interposed_->before = {};
  EXPECT_TRUE(says(error_of([&] { run_layer(2, 1); }), "an earlier step failed"));
}

}  // namespace
}  // namespace tandem::test
