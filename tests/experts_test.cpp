// Routed experts on the CPU in every weight format against double precision: several work items per
// expert, more tokens for one expert than a group takes, weights that all differ.
#include "tests/check_close.h"
#include "tests/kernel_cases.h"
#include "tests/kernel_tables.h"
#include "tests/topologies.h"

namespace tandem::test {
namespace {

constexpr int kTokens = 300;

ModelConfig config() {
  ModelConfig c;
  c.dim = 256;
  c.vocab = 8;
  c.n_layers = 2;
  c.n_dense_layers = 1;
  c.dense_dim = 32;
  c.expert_dim = 160;  // two and a half items
  c.scale_block = 32;
  c.mla = {.n_heads = 1, .q_rank = 0, .kv_rank = 8, .nope_dim = 8, .rope_dim = 8, .v_dim = 8};
  c.router.n_experts = 6;
  c.router.n_active = 3;
  c.router.n_groups = c.router.n_active_groups = 1;
  return c;
}

struct Converted {
  CpuWeights home;
  PackedModel model;

  Converted(const cpu::KernelTable& t, RandomModel& m, std::optional<WeightFormat> format,
            const Topology& topology = {})
      : home(t, topology), model(reserve_packed(m.stored, m.config, home, format)) {
    run_jobs(model, home);
  }
  const FfnWeights& expert(int e) const { return model.weights.layers[1].experts[e]; }
};

// The decoded matrix, row by row, from the reference layout.
Vec decoded(const QuantView& w) {
  const cpu::KernelTable reference = cpu::kernels_for(cpu::Isa::kReference);
  Vec all;
  std::vector<float> row(w.q.cols);
  for (int64_t r = 0; r < w.q.rows; ++r) {
    reference.decode({w.q.row_data(r), kernel_type(w.q.dtype), row.data(), w.q.cols});
    for (int64_t c = 0; c < w.q.cols; ++c)
      all.push_back(w.scale.empty()
                        ? row[c]
                        : double{row[c]} * w.scale.row<float>(r / w.block_rows)[c / w.block_cols]);
  }
  return all;
}

double dot(const double* w, const auto* x, int64_t n) {
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += w[i] * x[i];
  return sum;
}

struct Routed {
  std::vector<float> x, weights;
  std::vector<int32_t> ids;

  explicit Routed(const ModelConfig& c) {
    std::mt19937 rng(3);
    x = normal(rng, kTokens * c.dim);
    for (int t = 0; t < kTokens; ++t)
      for (int k = 0; k < 3; ++k) {
        ids.push_back(k == 0 ? 4
                             : (k + t + t / 5) % 4);  // all tokens choose expert 4, none chooses 5
        weights.push_back(0.1f + 0.01f * static_cast<float>(rng() % 100));
      }
  }
  ExpertBatch batch(const ModelConfig& c, int first, int n) {
    return {1,
            {x.data() + first * c.dim, n, c.dim, c.dim, DType::kF32},
            {{ids.data() + first * 3, n, 3, 3, DType::kI32},
             {weights.data() + first * 3, n, 3, 3, DType::kF32}}};
  }
};

// The expected output [tokens, dim] in double precision.
std::vector<Vec> expected(const Routed& routed, const ModelConfig& c, const Converted& w) {
  std::vector<Vec> gate, up, down, y(kTokens, Vec(c.dim));
  for (int e = 0; e < c.router.n_experts; ++e) {
    gate.push_back(decoded(w.expert(e).gate));
    up.push_back(decoded(w.expert(e).up));
    down.push_back(decoded(w.expert(e).down));
  }
  for (int i = 0; i < kTokens * 3; ++i) {
    const int t = i / 3, e = routed.ids[i];
    const float* const x = routed.x.data() + t * c.dim;
    Vec act(c.expert_dim);
    for (int r = 0; r < c.expert_dim; ++r) {
      const double g = dot(&gate[e][r * c.dim], x, c.dim);
      act[r] = g / (1 + std::exp(-g)) * dot(&up[e][r * c.dim], x, c.dim);
    }
    for (int r = 0; r < c.dim; ++r)
      y[t][r] += routed.weights[i] * dot(&down[e][r * c.expert_dim], act.data(), c.expert_dim);
  }
  return y;
}

std::vector<float> run(CpuExperts& experts, ExpertBatch batch) {
  std::vector<float> y(batch.x.rows * batch.x.cols, 0.f);
  experts.add_to(experts.submit(batch),
                 {y.data(), batch.x.rows, batch.x.cols, batch.x.cols, DType::kF32});
  return y;
}

// Activations are rounded twice, to BF16 or to bytes with a step of 1/127 of a row's largest
// number.
TEST(Experts, EveryFormatMatchesDoubleAndEveryBatchTheSameBits) {
  const ModelConfig c = config();
  Routed routed(c);
  for (const DType stored_as : {DType::kF8E4M3, DType::kF32}) {
    RandomModel model(c, stored_as);
    for (const std::optional<WeightFormat> format : {std::optional<WeightFormat>(),
                                                     {{DType::kI8}},
                                                     {{DType::kI4, 32}},
                                                     {{DType::kI4TwoLevel, 32}}}) {
      const auto want =
          expected(routed, c, Converted(cpu::kernels_for(cpu::Isa::kReference), model, format));
      for (int isa = 0; isa <= static_cast<int>(cpu::best_isa()); ++isa) {
        const cpu::KernelTable table = cpu::kernels_for(cpu::Isa(isa));
        SCOPED_TRACE(testing::Message()
                     << table.name << " " << name_of(format ? format->dtype : stored_as));
        const Converted w(table, model, format);
        const auto type = static_cast<int>(kernel_type(format ? format->dtype : stored_as));
        const bool exact = table.activation[type] == cpu::ActivationType::kF32;
        Team all(0), one(1);
        CpuExperts alone(table, c, w.model.weights, kTokens, one),
            together(table, c, w.model.weights, kTokens, all);
        const std::vector<float> got = run(together, routed.batch(c, 0, kTokens));
        for (int t = 0; t < kTokens; ++t) {
          const Vec& y = want[t];
          expect_close(std::span(got).subspan(t * c.dim, c.dim), y,
                       (exact ? 1e-5 : 0.05) * largest(y));
        }
        for (int first = 0, n = 1; first < kTokens;
             first += n, n = std::min(n * 3, kTokens - first)) {
          const std::vector<float> some = run(alone, routed.batch(c, first, n));
          ASSERT_TRUE(std::equal(some.begin(), some.end(), got.begin() + first * c.dim))
              << n << " tokens from " << first;
        }
      }
    }
  }
}

// Where products take tiled rows, experts with several rows get them. Expert 4 has every token, the
// others less than a tile of them, and a single token none.
TEST(Experts, TiledRows) {
  ModelConfig c = config();
  c.scale_block = 128;
  c.expert_dim = 192;
  Routed routed(c);
  constexpr int kSome = 37;
  for (const NamedTable& table : all_tables()) {
    if (!table.kernels.tile) continue;
    for (const DType stored_as : {DType::kF8E4M3, DType::kBF16}) {
      RandomModel model(c, stored_as);
      for (const std::optional<WeightFormat> format :
           {std::optional<WeightFormat>(), {{DType::kI8}}, {{DType::kI4TwoLevel, 64}}}) {
        SCOPED_TRACE(testing::Message()
                     << table.name << " " << name_of(format ? format->dtype : stored_as));
        const Converted w(table.kernels, model, format);
        ASSERT_TRUE(table.kernels.takes_tiles(kernel_weight(w.expert(4).gate)));
        const auto want =
            expected(routed, c, Converted(cpu::kernels_for(cpu::Isa::kReference), model, format));
        Team team(2);
        CpuExperts experts(table.kernels, c, w.model.weights, kSome, team);
        const std::vector<float> got = run(experts, routed.batch(c, 0, kSome));
        for (int t = 0; t < kSome; ++t) {
          expect_close(std::span(got).subspan(t * c.dim, c.dim), want[t], 0.05 * largest(want[t]));
          const std::vector<float> one = run(experts, routed.batch(c, t, 1));
          ASSERT_TRUE(std::equal(one.begin(), one.end(), got.begin() + t * c.dim)) << t;
        }
        if (format) continue;
        Team many(topology_of({8}));  // some of which wait for a core while others go on
        CpuExperts waiting(table.kernels, c, w.model.weights, kSome, many);
        for (int i = 0; i < 8; ++i) ASSERT_EQ(run(waiting, routed.batch(c, 0, kSome)), got);
      }
    }
  }
}

// With many rows for few experts an item of the second pass has 256 output rows; the last has 64.
TEST(Experts, LongItemsOfTheSecondPass) {
  ModelConfig c = config();
  c.dim = 8 * 256 + 64;
  c.expert_dim = 32;
  Routed routed(c);
  RandomModel model(c, DType::kF8E4M3);
  const auto want =
      expected(routed, c, Converted(cpu::kernels_for(cpu::Isa::kReference), model, {}));
  const cpu::KernelTable table = cpu::kernels_for(cpu::best_isa());
  const Converted w(table, model, {});
  Team team(1);
  CpuExperts experts(table, c, w.model.weights, kTokens, team);
  const std::vector<float> got = run(experts, routed.batch(c, 0, kTokens));
  for (int t = 0; t < kTokens; ++t)
    expect_close(std::span(got).subspan(t * c.dim, c.dim), want[t], 0.05 * largest(want[t]));
  const std::vector<float> some = run(experts, routed.batch(c, 7, 1));
  EXPECT_TRUE(std::equal(some.begin(), some.end(), got.begin() + 7 * c.dim));
}

// Experts are computed in several parts, some of them empty, each on all nodes.
TEST(Experts, PartsGiveTheSameBits) {
  const ModelConfig c = config();
  Routed routed(c);
  for (const DType stored_as : {DType::kBF16, DType::kF8E4M3}) {
    RandomModel model(c, stored_as);
    const cpu::KernelTable table = cpu::kernels_for(cpu::best_isa());
    const Topology topology = topology_of({1, 1});
    const Converted w(table, model, {}, topology);
    Team team(topology);
    CpuExperts experts(table, c, w.model.weights, kTokens, team);
    const ExpertBatch batch = routed.batch(c, 0, kTokens);
    const std::vector<float> want = run(experts, batch);
    for (const std::vector<int>& below :
         {std::vector<int>{1, 2, 6}, {0, 0, 3, 3, 6}, {5, 6, 6}, {6}}) {
      std::vector<float> y(want.size(), 0.f);
      experts.begin(batch);
      for (const int expert : below) experts.compute_below(expert);
      experts.add_to(0, {y.data(), batch.x.rows, c.dim, c.dim, DType::kF32});
      EXPECT_EQ(y, want);
    }
  }
}

// Every node gets some columns, and slices do not begin at scale blocks.
ModelConfig wide_config() {
  ModelConfig c = config();
  c.expert_dim = 8 * 128 + 32;
  c.scale_block = 96;
  return c;
}

std::vector<Topology> topologies() {
  return {topology_of({1}),    topology_of({1, 1}),       topology_of({2, 2, 2}),
          topology_of({1, 3}), topology_of({1, 3, 2, 1}), topology_of({1, 1, 1, 1, 1, 1, 1, 1})};
}

// Slices change the order of sums; where numbers become bytes, each slice is rounded separately;
// and with two-level scales each slice has its own row scale and therefore other codes.
TEST(Experts, AnyNodesComputeTheSame) {
  const ModelConfig c = wide_config();
  Routed routed(c);
  for (const DType stored_as : {DType::kF8E4M3, DType::kBF16}) {
    RandomModel model(c, stored_as);
    for (const std::optional<WeightFormat> format : {std::optional<WeightFormat>(),
                                                     {{DType::kI8}},
                                                     {{DType::kI4, 32}},
                                                     {{DType::kI4TwoLevel, 32}}}) {
      for (int isa = 0; isa <= static_cast<int>(cpu::best_isa()); ++isa) {
        const cpu::KernelTable table = cpu::kernels_for(cpu::Isa(isa));
        std::vector<float> want;
        for (const Topology& topology : topologies()) {
          SCOPED_TRACE(testing::Message()
                       << table.name << " " << name_of(format ? format->dtype : stored_as) << " on "
                       << topology.n_nodes() << " nodes");
          const Converted w(table, model, format, topology);
          Team team(topology);
          CpuExperts experts(table, c, w.model.weights, kTokens, team);
          const std::vector<float> got = run(experts, routed.batch(c, 0, 40));
          if (want.empty()) want = got;
          const double rounding = !format                               ? 1e-5
                                  : format->dtype == DType::kI4TwoLevel ? 0.15
                                                                        : 0.05;
          expect_close(got, want, rounding * largest(want));
          for (const int n : {1, 7}) {
            const std::vector<float> some = run(experts, routed.batch(c, 3, n));
            ASSERT_TRUE(std::equal(some.begin(), some.end(), got.begin() + 3 * c.dim)) << n;
          }
        }
      }
    }
  }
}

// The slices are the same and the number of threads differs.
TEST(Experts, ThreadsOfNodesDoNotChangeABit) {
  const ModelConfig c = wide_config();
  Routed routed(c);
  RandomModel model(c, DType::kF8E4M3);
  const cpu::KernelTable table = cpu::kernels_for(cpu::best_isa());
  std::vector<float> want;
  for (const Topology& topology : {topology_of({1, 1}), topology_of({2, 2}), topology_of({4, 4})}) {
    const Converted w(table, model, {}, topology);
    Team team(topology);
    CpuExperts experts(table, c, w.model.weights, kTokens, team);
    const std::vector<float> got = run(experts, routed.batch(c, 0, kTokens));
    if (want.empty()) want = got;
    EXPECT_EQ(got, want);
  }
}

// Topologies in hwloc's synthetic syntax.
TEST(Experts, SyntheticTopologies) {
  const ModelConfig c = wide_config();
  Routed routed(c);
  RandomModel model(c, DType::kF8E4M3);
  const cpu::KernelTable table = cpu::kernels_for(cpu::best_isa());
  std::vector<float> want;
  for (const char* words :
       {"numa:1 core:2 pu:1", "numa:2 core:3 pu:2", "pack:2 numa:2 core:1 pu:1"}) {
    const Topology topology = synthetic_topology(words);
    const Converted w(table, model, {}, topology);
    EXPECT_TRUE(w.home.is_bound());
    Team team(topology);
    CpuExperts experts(table, c, w.model.weights, kTokens, team);
    const std::vector<float> got = run(experts, routed.batch(c, 0, 9));
    if (want.empty()) want = got;
    expect_close(got, want, 1e-5 * largest(want));
  }
}

}  // namespace
}  // namespace tandem::test
