// The hand-off between the GPU, real or emulated, and the CPU's experts: whoever is late is waited
// for, nothing is lost, and who does not come is said.
#include <chrono>
#include <future>
#include <map>
#include <nlohmann/json.hpp>
#include <thread>

#include "offload/hybrid_experts.h"
#include "ops/cuda_weights.h"
#include "tests/check_close.h"
#include "tests/error_of.h"
#include "tests/gpu_buffers.h"
#include "tests/random_model.h"

namespace tandem::test {
namespace {

using std::chrono::milliseconds;

constexpr int kLayers = 4, kMaxTokens = 6, kActive = 3, kExperts = 8;

ModelConfig config() {
  ModelConfig c;
  c.dim = 128;
  c.vocab = 8;
  c.n_layers = kLayers;
  c.n_dense_layers = 1;
  c.dense_dim = 32;
  c.expert_dim = 128;
  c.scale_block = 128;
  c.mla = {.n_heads = 1, .q_rank = 0, .kv_rank = 8, .nope_dim = 8, .rope_dim = 8, .v_dim = 8};
  c.router.n_experts = kExperts;
  c.router.n_active = kActive;
  c.router.n_groups = c.router.n_active_groups = 1;
  return c;
}

// Counts, waits or fails on the way to the CPU's experts.
class Interposed final : public RoutedExperts {
 public:
  explicit Interposed(RoutedExperts& experts) : experts_(experts) {}
  void submit(const ExpertBatch& batch) override {
    if (before) before();
    experts_.submit(batch);
  }
  void add_to(TensorView y) override { experts_.add_to(y); }

  std::function<void()> before;

 private:
  RoutedExperts& experts_;
};

// Layer 1 has experts on both, layer 2 only on the CPU, layer 3 only on the card.
std::vector<std::vector<bool>> on_card() {
  std::vector<bool> some(kExperts);
  for (int e = 0; e < kExperts; ++e) some[e] = e % 3 == 1;
  return {{}, some, std::vector<bool>(kExperts, false), std::vector<bool>(kExperts, true)};
}

class HybridHandOff : public testing::Test {
 protected:
  HybridHandOff() : HybridHandOff(DType::kBF16, {}) {}
  HybridHandOff(DType stored, std::optional<WeightFormat> format)
      : random_(config(), stored), whole_(kernels_), part_(kernels_) {
    all_ = reserve_packed(random_.stored, random_.config, whole_, format);
    run_jobs(all_, whole_);
    ExpertsLayout layout(format);
    layout.keep_elsewhere(on_card());
    some_ = reserve_packed(random_.stored, random_.config, part_, layout);
    run_jobs(some_, part_);
    upload();
    cpu_ = std::make_unique<CpuExperts>(kernels_, random_.config, some_.weights, kMaxTokens, team_);
    reference_ =
        std::make_unique<CpuExperts>(kernels_, random_.config, all_.weights, kMaxTokens, team_);
    interposed_ = std::make_unique<Interposed>(*cpu_);
    rows_ = std::make_unique<CudaExpertRows>(random_.config, kMaxTokens, stream_);
    card_experts_ = std::make_unique<CudaExperts>(random_.config, card_weights_, *rows_, stream_);
    std::vector<cpu::ActivationType> rows;
    for (int l = 0; l < kLayers; ++l) rows.push_back(cpu_->activation(l));
    hybrid_ = std::make_unique<HybridExperts>(
        random_.config,
        HybridExperts::Parts{card_weights_, *card_experts_, *interposed_, rows, stream_},
        kMaxTokens);
  }

  void upload() {
    const std::vector<std::vector<bool>> here = on_card();
    const auto for_each = [&](auto visit) {
      for_each_weight(card_weights_, random_.config, [&](const WeightSpec& spec, QuantView& slot) {
        if (spec.use == WeightUse::kExpert && here[spec.layer][spec.expert]) visit(spec, slot);
      });
    };
    std::map<std::string, QuantView> stored;
    for_each_weight(random_.stored, random_.config,
                    [&](const WeightSpec& spec, QuantView& w) { stored[spec.name] = w; });
    int64_t bytes = 0;
    for_each([&](const WeightSpec& spec, QuantView&) {
      bytes += CudaWeights::bytes_of(stored.at(spec.name), spec.use);
    });
    home_.allocate(bytes);
    for_each([&](const WeightSpec& spec, QuantView& slot) {
      const QuantView& from = stored.at(spec.name);
      slot = home_.reserve(from, spec.use);
      home_.upload_rows(from.q.row_data(0), from, slot, 0, from.q.rows);
      if (!slot.scale.empty()) home_.upload_scales(from.scale.row_data(0), slot);
    });
    home_.finish();
  }

  // One layer with random rows on both; `between` the card's hand-down and its sum.
  void run_layer(int layer, int n_tokens, const std::function<void()>& between = {}) {
    const int dim = random_.config.dim;
    const std::vector<float> x = gpu::test::random_floats(rng_, n_tokens * dim, 1);
    std::vector<float> y = gpu::test::random_floats(rng_, n_tokens * dim, 1), weights;
    std::vector<int32_t> ids;
    for (int i = 0; i < n_tokens * kActive; ++i) {
      ids.push_back(static_cast<int32_t>((rng_() % 2 * kActive + i) % kExperts));
      weights.push_back(0.1f + 0.1f * static_cast<float>(i % 7));
    }
    const auto &x_card = keep(x), &y_card = keep(y), &w_card = keep(weights);
    const auto& ids_card = keep(ids);
    const auto matrix = [&](const void* data, int64_t cols, DType dtype) {
      return TensorView{const_cast<void*>(data), n_tokens, cols, cols, dtype};
    };
    const auto batch = [&](const void* rows, const void* chosen, const void* factors) {
      return ExpertBatch{
          layer,
          matrix(rows, dim, DType::kF32),
          {matrix(chosen, kActive, DType::kI32), matrix(factors, kActive, DType::kF32)}};
    };
    if (before_hand_down_) stream_.run_on_host(before_hand_down_);
    hybrid_->submit(batch(x_card.data(), ids_card.data(), w_card.data()));
    if (between) between();
    hybrid_->add_to(matrix(y_card.data(), dim, DType::kF32));
    const std::vector<float> got = y_card.values(stream_);
    reference_->submit(batch(x.data(), ids.data(), weights.data()));
    reference_->add_to(matrix(y.data(), dim, DType::kF32));
    expect_close(got, y, bound_ * largest(y));
  }

  // On the card, where a step that failed may still read it.
  template <class T>
  const gpu::test::OnCard<T>& keep(const std::vector<T>& values) {
    auto on_card = std::make_shared<gpu::test::OnCard<T>>(stream_, values);
    kept_.push_back(on_card);
    return *on_card;
  }

  const cpu::KernelTable kernels_ = cpu::kernels_for(cpu::best_isa());
  RandomModel random_;
  CpuWeights whole_, part_;
  PackedModel all_, some_;
  Team team_{1};
  std::vector<std::shared_ptr<const void>> kept_;
  gpu::Stream stream_;
  CudaWeights home_;
  ModelWeights card_weights_;
  std::unique_ptr<CpuExperts> cpu_, reference_;
  std::unique_ptr<Interposed> interposed_;
  std::unique_ptr<CudaExpertRows> rows_;
  std::unique_ptr<CudaExperts> card_experts_;
  std::unique_ptr<HybridExperts> hybrid_;
  std::mt19937 rng_{5};
  double bound_ = 2e-2;
  std::function<void()> before_hand_down_;
};

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

class ConvertedHandOff : public HybridHandOff {
 protected:
  ConvertedHandOff() : HybridHandOff(DType::kBF16, WeightFormat{DType::kI8}) {}
};
TEST_F(ConvertedHandOff, BytesAreHandedDownToInt8) {
  bound_ = 1e-12;
  for (const int n : {1, kMaxTokens}) run_layer(2, n);
}

class Fp8HandOff : public HybridHandOff {
 protected:
  Fp8HandOff() : HybridHandOff(DType::kF8E4M3, {}) {}
};
TEST_F(Fp8HandOff, PartsAddUp) {
  for (const int layer : {1, 2, 3}) run_layer(layer, 5);
}

// Experts of host memory are brought to the card, more than fit it at a time, layer after layer.
TEST_F(HybridHandOff, ExpertsAreBroughtToTheCard) {
  CudaStreaming streaming(random_.config, *cpu_, *rows_, stream_);
  hybrid_->stream_from(3, streaming);
  int n_handed_down = 0;
  interposed_->before = [&] { ++n_handed_down; };
  for (int round = 0; round < 3; ++round)
    for (const int layer : {1, 2, 3}) run_layer(layer, 3 + round);
  EXPECT_EQ(n_handed_down, 0);
  for (const int layer : {1, 2, 3}) run_layer(layer, 2);
  EXPECT_EQ(n_handed_down, 2);
}
TEST_F(Fp8HandOff, ExpertsAreBroughtToTheCard) {
  CudaStreaming streaming(random_.config, *cpu_, *rows_, stream_);
  hybrid_->stream_from(1, streaming);
  for (int round = 0; round < 3; ++round)
    for (const int layer : {1, 2, 3}) run_layer(layer, 4);
}
TEST_F(ConvertedHandOff, OtherFormatsAreNotBrought) {
  EXPECT_FALSE(CudaStreaming::takes(*cpu_));
  EXPECT_TRUE(says(error_of([&] { CudaStreaming(random_.config, *cpu_, *rows_, stream_); }),
                   "make stream_from_tokens 0"));
}

TEST_F(HybridHandOff, TheCrossoverIsMeasured) {
  CudaStreaming streaming(random_.config, *cpu_, *rows_, stream_);
  const int crossover = hybrid_->measured_crossover(kMaxTokens, streaming);
  EXPECT_TRUE(crossover == 0 || (crossover >= 1 && crossover <= kMaxTokens)) << crossover;
  run_layer(1, kMaxTokens);  // as before
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
