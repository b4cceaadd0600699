// Real experts on several ranks, each of which has some of the packed weights, against one rank
// that has all: the same bits where a row comes back for each expert.
#include "comm/local_ranks.h"
#include "offload/ranks/expert_exchange.h"
#include "tests/check_close.h"
#include "tests/kernel_cases.h"
#include "tests/small_config.h"
#include "tests/topologies.h"

namespace tandem::test {
namespace {

constexpr int kTokens = 20, kLayer = 1;

ModelConfig config() {
  ModelConfig c = small_config();
  c.dim = 256;
  c.expert_dim = 96;
  c.scale_block = 32;
  c.router.n_experts = 12;
  c.router.n_groups = c.router.n_active_groups = 1;
  return c;
}

// The tokens of one rank.
struct Tokens {
  Tokens(const ModelConfig& c, int rank) : config(c) {
    std::mt19937 rng(rank);
    x = normal(rng, kTokens * c.dim);
    for (int t = 0; t < kTokens; ++t) {
      std::vector<int32_t> experts(c.router.n_experts);
      std::iota(experts.begin(), experts.end(), 0);
      std::shuffle(experts.begin(), experts.end(), rng);
      ids.insert(ids.end(), experts.begin(), experts.begin() + c.router.n_active);
      for (int k = 0; k < c.router.n_active; ++k)
        weights.push_back(0.1f + 0.01f * static_cast<float>(rng() % 100));
    }
  }
  ExpertBatch batch() {
    const int n_active = config.router.n_active;
    return {kLayer,
            {x.data(), kTokens, config.dim, config.dim},
            {{ids.data(), kTokens, n_active, n_active, DType::kI32},
             {weights.data(), kTokens, n_active, n_active}}};
  }
  const ModelConfig config;
  std::vector<float> x, weights;
  std::vector<int32_t> ids;
};

TensorView matrix(std::vector<float>& numbers, int64_t cols) {
  return {numbers.data(), std::ssize(numbers) / cols, cols, cols};
}

std::vector<float> computed(CpuExperts& experts, const ExpertBatch& batch) {
  std::vector<float> y(batch.x.rows * batch.x.cols, 0.f);
  experts.add_to(experts.submit(batch), matrix(y, batch.x.cols));
  return y;
}

class RankExperts : public testing::TestWithParam<DType> {};

TEST_P(RankExperts, AreThoseOfOneRank) {
  const ModelConfig c = config();
  RandomModel stored(c, GetParam());
  const cpu::KernelTable kernels = cpu::kernels_for(cpu::best_isa());
  const Topology one_core = topology_of({1});
  CpuWeights home(kernels, one_core);
  PackedModel packed(reserve_packed(stored.stored, c, home, {}));
  run_jobs(packed, home);
  // The kernels round rows of FP8 and BF16 weights to BF16 themselves, so BF16 rows lose nothing.
  const bool rounds =
      kernels.activation[int(kernel_type(GetParam()))] == cpu::ActivationType::kBF16;

  run_local_ranks({3}, [&](Group& group) {
    const HostGroups hosts(group, HostLayout::one_host(3));
    ExpertOwners owners(c.n_layers, c.router.n_experts);
    ModelWeights mine = packed.weights;
    for (int e = 0; e < c.router.n_experts; ++e) {
      owners.add(kLayer, e, e % 3);
      if (e < 2) owners.add(kLayer, e, (e + 1) % 3);
      const std::vector<int>& ranks = owners.ranks(kLayer, e);
      if (std::find(ranks.begin(), ranks.end(), group.rank()) == ranks.end())
        mine.layers[kLayer].experts[e] = {};
    }
    for (const auto mode :
         {ExchangeMode::kGather, ExchangeMode::kAllToAll, ExchangeMode::kLowLatency})
      for (const auto returned : {ReturnedRows::kPerRank, ReturnedRows::kPerExpert}) {
        const ExchangeShape shape{.dim = c.dim,
                                  .n_active = c.router.n_active,
                                  .max_tokens = kTokens,
                                  .there = rounds ? RowFormat::kBf16 : RowFormat::kF32,
                                  .returned = returned};
        const auto exchange = make_exchange(mode, hosts, owners, kernels, shape);
        Team team(one_core);
        CpuExperts all(kernels, c, packed.weights, kTokens, team);
        CpuExperts some(kernels, c, mine, int(exchange->max_rows()), team);
        Tokens tokens(c, group.rank());
        const std::vector<float> want = computed(all, tokens.batch());

        exchange->begin(std::vector<int64_t>(group.size(), kTokens));
        const ExpertBatch batch = exchange->dispatch(tokens.batch());
        std::vector<float> sums = computed(some, batch), got(want.size(), 0.f);
        exchange->combine(matrix(sums, c.dim), matrix(got, c.dim));

        SCOPED_TRACE(fmt::format("mode {}, returned {}", int(mode), int(returned)));
        expect_close(got, want, 1e-6 * largest(want));
        const bool by_rows = mode == ExchangeMode::kAllToAll || mode == ExchangeMode::kLowLatency;
        EXPECT_TRUE(got == want || !by_rows || returned == ReturnedRows::kPerRank);
      }
  });
}

INSTANTIATE_TEST_SUITE_P(Formats, RankExperts,
                         testing::Values(DType::kF8E4M3, DType::kBF16, DType::kF32));

}  // namespace
}  // namespace tandem::test
