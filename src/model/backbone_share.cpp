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

int64_t unit_of(const ModelConfig& config) {
  return config.scale_block > 0 ? std::lcm(kColumns, int64_t{config.scale_block}) : kColumns;
}

// The smallest number of things of `size` that fill whole units.
int64_t filling(int64_t unit, int64_t size) { return unit / std::gcd(unit, size); }

}  // namespace

BackboneShare share_of_rank(const ModelConfig& config, int rank, int n_ranks, StageLayers layers) {
  return share_of_rank(config, rank, std::vector<bool>(n_ranks, true), layers);
}

BackboneShare share_among_replicas(const ModelConfig& config, int rank, BackboneGrid grid,
                                   SharedByReplicas shared, StageLayers layers) {
  const int part = grid.part_of(rank), n = grid.n_of_stage(), first = part * grid.n_replicas;
  BackboneShare share = share_of_rank(config, part, grid.tp, layers);
  share.by_replicas = shared;
  share.replica = grid.replica_of(rank);
  const int64_t unit = unit_of(config);
  if (shared.dense) share.dense = part_of(config.dense_dim, unit, first + share.replica, n);
  if (!shared.head) return share;
  for (int r = 0; r < grid.tp; ++r) {
    const Slice begin = part_of(config.vocab, unit, r * grid.n_replicas, n),
                end = part_of(config.vocab, unit, (r + 1) * grid.n_replicas - 1, n);
    share.vocab[r] = {begin.first, end.first + end.n - begin.first};
  }
  for (int r = 0; r < grid.n_replicas; ++r)
    share.vocab_of_replicas.push_back(part_of(config.vocab, unit, first + r, n));
  return share;
}

BackboneShare share_of_rank(const ModelConfig& config, int rank, const std::vector<bool>& divide,
                            StageLayers layers) {
  const MlaConfig& m = config.mla;
  const int64_t unit = unit_of(config);
  const int64_t heads = std::lcm(std::lcm(filling(unit, m.qk_dim()), filling(unit, m.v_dim)),
                                 filling(unit, m.nope_dim + m.v_dim));
  const auto n_dividing = static_cast<int>(std::count(divide.begin(), divide.end(), true));
  const auto part_of_rank = [&](int64_t n, int64_t of_unit, int r) -> Slice {
    const auto before = static_cast<int>(std::count(divide.begin(), divide.begin() + r, true));
    if (divide[r]) return part_of(n, of_unit, before, n_dividing);
    return {before < n_dividing ? part_of(n, of_unit, before, n_dividing).first : n, 0};
  };
  BackboneShare share{.rank = rank,
                      .heads = part_of_rank(m.n_heads, heads, rank),
                      .dense = part_of_rank(config.dense_dim, unit, rank),
                      .shared = part_of_rank(config.shared_dim(), unit, rank),
                      .vocab = {},
                      .layers = layers};
  for (int r = 0; r < std::ssize(divide); ++r)
    share.vocab.push_back(part_of_rank(config.vocab, unit, r));
  return share;
}

}  // namespace tandem
