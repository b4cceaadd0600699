#include "model/backbone_share.h"

#include <algorithm>
#include <numeric>

#include "core/rounding.h"

namespace tandem {
namespace {

constexpr int64_t kColumns = 64;  // products read whole groups of so many columns

// Rank `rank`'s part of `n` things, in whole units.
Slice part_of(int64_t n, int64_t unit, int rank, int n_ranks) {
  const int64_t n_units = ceil_div(n, unit);
  const auto begin = [&](int64_t r) { return std::min(n, n_units * r / n_ranks * unit); };
  return {begin(rank), begin(rank + 1) - begin(rank)};
}

// The smallest number of things of `size` that fill whole units.
int64_t filling(int64_t unit, int64_t size) { return unit / std::gcd(unit, size); }

}  // namespace

BackboneShare share_of_rank(const ModelConfig& config, int rank, int n_ranks, StageLayers layers) {
  const MlaConfig& m = config.mla;
  const int64_t unit =
      config.scale_block > 0 ? std::lcm(kColumns, int64_t{config.scale_block}) : kColumns;
  const int64_t heads = std::lcm(std::lcm(filling(unit, m.qk_dim()), filling(unit, m.v_dim)),
                                 filling(unit, m.nope_dim + m.v_dim));
  BackboneShare share{.rank = rank,
                      .heads = part_of(m.n_heads, heads, rank, n_ranks),
                      .dense = part_of(config.dense_dim, unit, rank, n_ranks),
                      .shared = part_of(config.shared_dim(), unit, rank, n_ranks),
                      .vocab = {},
                      .layers = layers};
  for (int r = 0; r < n_ranks; ++r) share.vocab.push_back(part_of(config.vocab, unit, r, n_ranks));
  return share;
}

}  // namespace tandem
