// Kernels of rows that ranks exchange, against the same decisions on the CPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "gpu_kernels/exchange.h"
#include "tests/gpu_weights.h"

namespace tandem::gpu::test {
namespace {

// Rows with ids among others, as they come packed, of tokens that all ranks have or of each rank's.
TEST(GpuExchange, OwnIdsAreThoseThatTheCpuChooses) {
  constexpr int kExperts = 40, kRanks = 6, kActive = 5, kStride = 9;
  Stream stream;
  std::mt19937 rng(11);
  const auto below = [&](int n) { return static_cast<int>(rng() % unsigned(n)); };
  for (int round = 0; round < 12; ++round) {
    const RankHosts hosts = {below(4), 1 + below(kRanks)};
    std::vector<std::vector<int32_t>> owners;
    std::vector<int32_t> table(kExperts * kRanks, -1);
    for (int e = 0; e < kExperts; ++e) {
      std::vector<int32_t> ranks(kRanks);
      for (int r = 0; r < kRanks; ++r) ranks[r] = r;
      std::shuffle(ranks.begin(), ranks.end(), rng);
      ranks.resize(below(3) == 0 ? below(kRanks + 1) : 1);
      std::sort(ranks.begin(), ranks.end());
      std::copy(ranks.begin(), ranks.end(), &table[e * kRanks]);
      owners.push_back(ranks);
    }
    const int of_source = round % 2 ? 1 + below(40) : 0;
    const int tokens = of_source > 0 ? of_source * kRanks : 1 + below(300);
    std::vector<int32_t> ids(tokens * kStride, 12345);
    for (int t = 0; t < tokens; ++t)
      for (int k = 0; k < kActive; ++k) ids[t * kStride + k] = below(9) == 0 ? -1 : below(kExperts);
    const OnGpuBuffer<int32_t> ids_there(stream, ids), table_there(stream, table);
    const int rank = below(kRanks);
    const OnGpuBuffer<int32_t> out(stream, std::vector<int32_t>(tokens * kActive, -77));
    own_ids(stream, {.ids = ids_there.data(),
                     .ids_stride = kStride,
                     .owners = table_there.data(),
                     .max_owners = kRanks,
                     .out = out.data(),
                     .tokens = tokens,
                     .n_active = kActive,
                     .rank = rank,
                     .tokens_of_source = of_source,
                     .hosts = hosts});
    const std::vector<int32_t> got = out.values(stream);
    for (int t = 0; t < tokens; ++t)
      for (int k = 0; k < kActive; ++k) {
        const int32_t id = ids[t * kStride + k];
        // What one rank has, or none, is told apart by the places of experts.
        const bool replicated = id >= 0 && owners[id].size() > 1;
        const bool own =
            !replicated || nearest_replica(owners[id].data(), static_cast<int>(owners[id].size()),
                                           of_source > 0 ? t / of_source : -1, hosts,
                                           hash_of_choice(&ids[t * kStride], kActive), id) == rank;
        EXPECT_EQ(got[t * kActive + k], own ? id : -1) << "token " << t << ", place " << k;
      }
  }
}

}  // namespace
}  // namespace tandem::gpu::test
