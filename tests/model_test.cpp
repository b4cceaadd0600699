// The whole forward pass against the naive double-precision model, in every form in which it runs.
#include <numeric>

#include "tests/check_close.h"
#include "tests/conversations.h"
#include "tests/error_of.h"
#include "tests/naive_deepseek.h"
#include "tests/random_model.h"

namespace tandem::test {
namespace {

ModelConfig v3() {
  ModelConfig c;
  c.dim = 72;
  c.vocab = 97;
  c.n_layers = 3;
  c.n_dense_layers = 1;
  c.dense_dim = 104;
  c.expert_dim = 40;
  c.scale_block = 32;  // ragged blocks in every dimension
  c.mla = {.n_heads = 5, .q_rank = 24, .kv_rank = 40, .nope_dim = 20, .rope_dim = 8, .v_dim = 12};
  c.router.n_experts = 16;
  c.router.n_active = 4;
  c.router.n_groups = 4;
  c.router.n_active_groups = 2;
  c.rope.original_context = 32;
  return c;
}

ModelConfig v2() {
  ModelConfig c = v3();
  c.architecture = "DeepseekV2ForCausalLM";
  c.router.method = TopkMethod::kGroupLimitedGreedy;
  c.router.scoring = Scoring::kSoftmax;
  c.router.normalize = false;
  c.router.scale_normalized = false;
  c.router.scale = 16;
  c.rope.mscale = c.rope.mscale_all_dim = 0.707;
  c.n_shared_experts = 2;
  return c;
}

ModelConfig moonlight() {
  ModelConfig c = v3();
  c.mla.q_rank = 0;
  c.rope.yarn = false;
  c.rope.factor = 1;
  c.norm_eps = 1e-5f;
  c.router.n_groups = c.router.n_active_groups = 1;
  c.tied_head = true;
  return c;
}

struct Family {
  const char* name;
  ModelConfig config;
  DType matrices;
};

std::vector<int32_t> prompt(int n, int vocab, int seed = 3) {
  std::vector<int32_t> tokens(n);
  for (int i = 0; i < n; ++i) tokens[i] = (seed + i * 37 + i * i * 11) % vocab;
  return tokens;
}

class ModelTest : public testing::TestWithParam<Family> {
 protected:
  RandomModel model_{GetParam().config, GetParam().matrices};
  const std::vector<int32_t> tokens_ = prompt(70, GetParam().config.vocab);
  const std::vector<int32_t> pages_ = {5, 2, 9};

  std::vector<std::vector<float>> run(cpu::Isa isa, AttentionForm form, int chunk,
                                      std::vector<int32_t> pages = {},
                                      DType cache_type = DType::kF32) {
    TestEngine engine(model_, isa, form, cache_type);
    return engine.run(tokens_, chunk, pages.empty() ? pages_ : pages);
  }

  void expect_like_naive(const std::vector<std::vector<float>>& got, double relative) {
    const auto want = naive_logits(model_.config, model_.stored, tokens_);
    for (size_t t = 0; t < want.size(); ++t)
      expect_close(got[t], want[t], relative * largest(want[t]));
  }
};

TEST_P(ModelTest, ReferenceAbsorbedMatchesNaiveModel) {
  expect_like_naive(run(cpu::Isa::kReference, AttentionForm::kAbsorbed, 70), 2e-5);
}

TEST_P(ModelTest, ReferenceNaiveFormMatchesNaiveModel) {
  expect_like_naive(run(cpu::Isa::kReference, AttentionForm::kNaive, 70), 2e-5);
}

// Root mean square of the difference, relative to that of the logits.
double relative_error(const std::vector<std::vector<float>>& got,
                      const std::vector<std::vector<double>>& want) {
  double error = 0, size = 0;
  for (size_t t = 0; t < want.size(); ++t) {
    for (size_t i = 0; i < want[t].size(); ++i) {
      error += (got[t][i] - want[t][i]) * (got[t][i] - want[t][i]);
      size += want[t][i] * want[t][i];
    }
  }
  return std::sqrt(error / size);
}

// BF16 activations round every input of a product by up to 2^-9. Near ties of experts change single
// tokens much, so the bound is on the median token.
double median_error(const std::vector<std::vector<float>>& got,
                    const std::vector<std::vector<double>>& want) {
  std::vector<double> errors;
  for (size_t t = 0; t < want.size(); ++t) errors.push_back(relative_error({got[t]}, {want[t]}));
  std::nth_element(errors.begin(), errors.begin() + errors.size() / 2, errors.end());
  return errors[errors.size() / 2];
}

TEST_P(ModelTest, EveryIsaMatchesNaiveModel) {
  const auto want = naive_logits(model_.config, model_.stored, tokens_);
  for (int i = 1; i <= static_cast<int>(cpu::best_isa()); ++i) {
    const auto isa = static_cast<cpu::Isa>(i);
    const cpu::KernelTable table = cpu::kernels_for(isa);
    const auto type = static_cast<int>(kernel_type(model_.stored.layers[0].attn.o.q.dtype));
    for (const AttentionForm form : {AttentionForm::kNaive, AttentionForm::kAbsorbed}) {
      SCOPED_TRACE(table.name);
      if (table.activation[type] == cpu::ActivationType::kF32 &&
          table.attention == cpu::ActivationType::kF32) {
        expect_like_naive(run(isa, form, 70), 2e-5);
      } else {
        EXPECT_LE(median_error(run(isa, form, 70), want), 0.03);
      }
    }
  }
}

// A BF16 cache rounds every latent by up to 2^-9. In these random models a near tie of two experts
// sometimes changes the choice, so the bound is on the root mean square over all tokens.
TEST_P(ModelTest, Bf16CacheIsClose) {
  const auto want = naive_logits(model_.config, model_.stored, tokens_);
  const double error =
      relative_error(run(cpu::best_isa(), AttentionForm::kAbsorbed, 70, {}, DType::kBF16), want);
  EXPECT_LE(error, 0.25);
  EXPECT_GT(error, 0) << "the cache was not BF16";
}

TEST_P(ModelTest, ChunksDoNotChangeABitOfTheReference) {
  const auto whole = run(cpu::Isa::kReference, AttentionForm::kAbsorbed, 70);
  EXPECT_EQ(run(cpu::Isa::kReference, AttentionForm::kAbsorbed, 1), whole);
  EXPECT_EQ(run(cpu::Isa::kReference, AttentionForm::kAbsorbed, 13), whole);
}

TEST_P(ModelTest, PagesDoNotChangeABit) {
  for (int i = 0; i <= static_cast<int>(cpu::best_isa()); ++i)
    for (const AttentionForm form : {AttentionForm::kNaive, AttentionForm::kAbsorbed})
      EXPECT_EQ(run(cpu::Isa(i), form, 33, {0, 1, 2}), run(cpu::Isa(i), form, 33, {7, 15, 3}));
}

// One step has a decode, a prompt's first chunk and a later chunk, on interleaved pages.
TEST_P(ModelTest, BatchOfSeveralSequencesMatchesEachAlone) {
  for (const AttentionForm form : {AttentionForm::kAbsorbed, AttentionForm::kNaive}) {
    const auto a = prompt(67, model_.config.vocab, 11), b = prompt(9, model_.config.vocab, 29),
               c = tokens_;
    const std::vector<int32_t> pages_a = {4, 1}, pages_b = {3}, pages_c = {2, 0};
    TestEngine alone(model_, cpu::Isa::kReference, form),
        together(model_, cpu::Isa::kReference, form);
    const auto want_a = alone.run(a, 67, {0, 1}), want_b = alone.run(b, 9, {2}),
               want_c = alone.run(c, 70, {3, 4});

    together.step({{std::span(a).first(66), 0, pages_a}, {std::span(c).first(30), 0, pages_c}});
    const auto got = together.step({{std::span(a).subspan(66), 66, pages_a},
                                    {b, 0, pages_b},
                                    {std::span(c).subspan(30), 30, pages_c}});
    ASSERT_EQ(got.size(), 1u + 9 + 40);
    EXPECT_EQ(got[0], want_a[66]);
    for (int t = 0; t < 9; ++t) EXPECT_EQ(got[1 + t], want_b[t]) << t;
    for (int t = 0; t < 40; ++t) EXPECT_EQ(got[10 + t], want_c[30 + t]) << t;
  }
}

// One step in which some sequences use one form of attention and some the other.
TEST_P(ModelTest, FormsMixInOneStep) {
  const std::vector<int32_t> pages_a = {4, 1}, pages_b = {3}, pages_c = {2, 0};
  const auto a = prompt(67, model_.config.vocab, 11), b = prompt(1, model_.config.vocab, 29);
  TestEngine engine(model_, cpu::Isa::kReference, AttentionForm::kAuto);
  const auto got = engine.step({{a, 0, pages_a}, {b, 0, pages_b}, {tokens_, 0, pages_c}});
  const auto want = [&](const std::vector<int32_t>& tokens) {
    return naive_logits(model_.config, model_.stored, tokens);
  };
  const auto want_a = want(a), want_b = want(b), want_c = want(tokens_);
  expect_close(got[66], want_a[66], 2e-5 * largest(want_a[66]));
  expect_close(got[67], want_b[0], 2e-5 * largest(want_b[0]));
  expect_close(got[137], want_c[69], 2e-5 * largest(want_c[69]));
}

TEST_P(ModelTest, ThreadsDoNotChangeABit) {
  const auto run_with = [&](int n_threads) {
    TestEngine engine(model_, cpu::best_isa(), AttentionForm::kAbsorbed, DType::kBF16, n_threads);
    return engine.run(tokens_, 20, pages_);
  };
  const auto one = run_with(1);
  for (int n = 2; n <= std::min(n_cores(), 8); ++n) EXPECT_EQ(run_with(n), one) << n;
}

// Adds its sums only in add_to(), like a pool on another device, and prefers two micro-batches.
class Elsewhere final : public ExpertPool {
 public:
  struct Call {
    char what;
    int layer, first_row;
    bool operator==(const Call&) const = default;
  };
  Elsewhere(ExpertPool& experts, int max_tokens, int dim)
      : experts_(experts), dim_(dim), sums_(max_tokens * dim) {}

  bool waits(Ticket) override { return true; }
  void add_to(Ticket ticket, TensorView y) override {
    const ExpertBatch& batch = batches_[ticket];
    calls.push_back({'a', batch.layer, batch.first_row});
    if (std::ssize(calls) == fails_at) fail("out of everything");
    const TensorView sum = sums_of(batch.first_row, y.rows);
    for (int64_t t = 0; t < y.rows; ++t)
      for (int i = 0; i < dim_; ++i) y.row<float>(t)[i] += sum.row<float>(t)[i];
  }
  int micro_batches(std::span<const Batch> replicas, bool is_decode) const override {
    return is_decode && std::ssize(replicas[0].sequences) >= 3 ? 2 : 1;
  }

  std::vector<Call> calls;
  int fails_at = 0;  // number of the call of add_to() that fails; 0: none

 private:
  Ticket start(const ExpertBatch& batch) override {
    calls.push_back({'s', batch.layer, batch.first_row});
    const TensorView sum = sums_of(batch.first_row, batch.x.rows);
    std::fill_n(sum.row<float>(0), batch.x.rows * dim_, 0.f);
    experts_.add_to(experts_.submit(batch), sum);
    const Ticket ticket = batch.micro_batch;
    batches_[ticket] = batch;
    return ticket;
  }
  TensorView sums_of(int first, int64_t n) {
    return {&sums_[first * dim_], n, dim_, dim_, DType::kF32};
  }
  ExpertPool& experts_;
  const int dim_;
  std::vector<float> sums_;
  ExpertBatch batches_[kMaxTickets] = {};
};

// An engine whose decode steps of three or more sequences have two micro-batches.
struct WithMicroBatches {
  explicit WithMicroBatches(RandomModel& m)
      : engine(m, cpu::best_isa(), AttentionForm::kAuto, DType::kBF16),
        elsewhere(engine.experts, 256, m.config.dim),
        runner({m.config, engine.packed.weights, engine.device, engine.ops, elsewhere}, {256, 256},
               AttentionForm::kAuto) {}
  TestEngine engine;
  Elsewhere elsewhere;
  StepRunner runner;
};

// One micro-batch starts while a layer of the other is in flight; the bits do not change.
TEST_P(ModelTest, MicroBatchesTakeTurns) {
  const ModelConfig& c = model_.config;
  TestEngine engine(model_, cpu::best_isa(), AttentionForm::kAuto, DType::kBF16);
  WithMicroBatches other(model_);
  Elsewhere& elsewhere = other.elsewhere;
  Conversations one(engine.model, engine.cache, 1, 5), two(other.runner, other.engine.cache, 2, 5);
  std::vector<Conversations::Part> step;
  for (int s = 0; s < 5; ++s) step.push_back({s, prompt(9 + 20 * s, c.vocab, s)});
  EXPECT_EQ(one.step(step), two.step(step)) << "prompts";
  for (const int n : {5, 4, 3, 2}) {
    step.clear();
    for (int s = 0; s < n; ++s) step.push_back({s, {17 * s + n}});
    elsewhere.calls.clear();
    EXPECT_EQ(one.step(step), two.step(step)) << n;
    std::vector<Elsewhere::Call> expected;
    const std::vector<int> parts = n >= 3 ? std::vector<int>{0, (n + 1) / 2} : std::vector<int>{0};
    for (int l = 0; l <= c.n_layers; ++l)
      for (const int first : parts) {
        if (l > 0 && c.is_moe(l - 1)) expected.push_back({'a', l - 1, first});
        if (l < c.n_layers && c.is_moe(l)) expected.push_back({'s', l, first});
      }
    EXPECT_EQ(elsewhere.calls, expected) << n;
  }
}

// The first or the second pass fails while the other is in flight: the step throws, and later steps
// are correct.
TEST_P(ModelTest, StepsContinueAfterAFailedPass) {
  const ModelConfig& c = model_.config;
  TestEngine engine(model_, cpu::best_isa(), AttentionForm::kAuto, DType::kBF16);
  WithMicroBatches other(model_);
  Elsewhere& elsewhere = other.elsewhere;
  Conversations one(engine.model, engine.cache, 1, 4), two(other.runner, other.engine.cache, 2, 4);
  for (const int fails_at : {0, 3, 5}) {  // both passes submit, then each adds and submits
    std::vector<Conversations::Part> prompts, step;
    for (int s = 0; s < 4; ++s) prompts.push_back({s, prompt(3 + s, c.vocab, s)});
    for (int s = 0; s < 4; ++s) step.push_back({s, {11 * s + 1}});
    EXPECT_EQ(one.step(prompts), two.step(prompts)) << fails_at;
    elsewhere.calls.clear();
    elsewhere.fails_at = fails_at;
    const std::string said =
        error_of([&] { EXPECT_EQ(one.step(step), two.step(step)) << fails_at; });
    EXPECT_EQ(says(said, "out of everything"), fails_at > 0) << fails_at;
    elsewhere.fails_at = 0;
    for (int s = 0; s < 4; ++s) {
      one.forget(s);
      two.forget(s);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Families, ModelTest,
                         testing::Values(Family{"V3Fp8", v3(), DType::kF8E4M3},
                                         Family{"V3F32", v3(), DType::kF32},
                                         Family{"V2Bf16", v2(), DType::kBF16},
                                         Family{"MoonlightBf16", moonlight(), DType::kBF16}),
                         [](const auto& family) { return family.param.name; });

}  // namespace
}  // namespace tandem::test
