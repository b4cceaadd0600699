#include "offload/ranks/expert_owners.h"

#include <algorithm>

#include "core/check.h"

namespace tandem {
namespace {

// A CPU computes so many rows of an expert in the time of reading it (docs/few_rows.md).
constexpr int kRowsPerRead = 8;

double work_of(double n_rows) { return std::max<double>(n_rows, kRowsPerRead); }

}  // namespace

RankHosts rank_hosts(const std::vector<int>& host_of_rank, int first) {
  const auto n = static_cast<int>(host_of_rank.size());
  const int n_hosts = n > 0 ? *std::max_element(host_of_rank.begin(), host_of_rank.end()) + 1 : 1;
  if (n_hosts == 1 || n % n_hosts != 0) return {};
  for (const RankHosts hosts :
       {RankHosts{0, n / n_hosts}, RankHosts{.first = 0, .n_in_turns = n_hosts}}) {
    int n_alike = 0;
    for (int rank = 0; rank < n; ++rank) n_alike += hosts.of(rank) == host_of_rank[rank];
    if (n_alike == n) return {first, hosts.n_of_host, hosts.n_in_turns};
  }
  return {};
}

size_t ExpertOwners::index(int layer, int expert) const {
  check(layer < n_layers_ && expert >= 0 && expert < n_experts_, "number of an expert");
  return static_cast<size_t>(layer) * n_experts_ + expert;
}

void ExpertOwners::add(int layer, int expert, int rank) {
  std::vector<int32_t>& ranks = ranks_[index(layer, expert)];
  ranks.push_back(rank);
  n_ranks_ = std::max(n_ranks_, rank + 1);
  if (ranks.size() > 1) has_replicas_[layer] = true;
}

void ExpertOwners::apply(std::span<const ExpertChange> changes) {
  for (const auto& [layer, expert, ranks] : changes) {
    ranks_[index(layer, expert)].clear();
    for (const int32_t rank : ranks) add(layer, expert, rank);
    const auto first = ranks_.begin() + static_cast<int64_t>(index(layer, 0));
    has_replicas_[layer] = std::any_of(first, first + n_experts_,
                                       [](const auto& of_expert) { return of_expert.size() > 1; });
  }
}

bool ExpertOwners::has_replicas() const {
  return std::find(has_replicas_.begin(), has_replicas_.end(), true) != has_replicas_.end();
}

ReplicaChooser::ReplicaChooser(const ExpertOwners& owners)
    : owners_(owners),
      n_rows_(owners.n_experts()),
      rank_(owners.n_experts()),
      load_(owners.n_ranks()) {
  replicated_.reserve(owners.n_experts());
}

void ReplicaChooser::begin(int layer, const TensorView& ids) {
  layer_ = layer;
  if (owners_.choice() == ReplicaChoice::kLeastLoaded) spread_load(ids);
}

// Experts with one owner are where they are. The others follow, those with the most rows first.
void ReplicaChooser::spread_load(const TensorView& ids) {
  std::fill(n_rows_.begin(), n_rows_.end(), 0);
  load_.assign(owners_.n_ranks(), 0);  // experts may have moved to a rank that had none
  replicated_.clear();
  for (int64_t t = 0; t < ids.rows; ++t)
    for (int64_t k = 0; k < ids.cols; ++k)
      if (const int32_t id = ids.row<int32_t>(t)[k]; id >= 0) ++n_rows_[id];
  for (int e = 0; e < owners_.n_experts(); ++e) {
    if (n_rows_[e] == 0) continue;
    const std::vector<int32_t>& ranks = owners_.ranks(layer_, e);
    const auto n = static_cast<int>(ranks.size());
    const bool divided = n > 1 && n_rows_[e] >= n * kRowsPerRead;
    rank_[e] = n == 0 || divided ? -1 : ranks[0];
    if (n > 1 && !divided) {
      replicated_.push_back(e);
    } else {
      for (const int32_t rank : ranks) load_[rank] += work_of(1.0 * n_rows_[e] / n);
    }
  }
  std::sort(replicated_.begin(), replicated_.end(), [&](int32_t a, int32_t b) {
    return n_rows_[a] != n_rows_[b] ? n_rows_[a] > n_rows_[b] : a < b;
  });
  for (const int32_t e : replicated_) {
    const std::vector<int32_t>& ranks = owners_.ranks(layer_, e);
    rank_[e] = *std::min_element(ranks.begin(), ranks.end(),
                                 [&](int32_t a, int32_t b) { return load_[a] < load_[b]; });
    load_[rank_[e]] += work_of(n_rows_[e]);
  }
}

void ReplicaChooser::choose(const int32_t* ids, int n_active, int source, int32_t* out) const {
  const bool loads = owners_.choice() == ReplicaChoice::kLeastLoaded;
  uint32_t hash = 0;
  bool has_hash = false;
  for (int k = 0; k < n_active; ++k) {
    out[k] = -1;
    if (ids[k] < 0) continue;
    const std::vector<int32_t>& ranks = owners_.ranks(layer_, ids[k]);
    if (ranks.empty()) continue;
    out[k] = ranks[0];
    if (ranks.size() == 1) continue;
    if (loads && rank_[ids[k]] >= 0) {
      out[k] = rank_[ids[k]];
      continue;
    }
    if (!has_hash) hash = hash_of_choice(ids, n_active);
    has_hash = true;
    out[k] = nearest_replica(ranks.data(), static_cast<int>(ranks.size()), loads ? -1 : source,
                             owners_.hosts(), hash, ids[k]);
  }
}

void ReplicaChooser::own_ids(const TensorView& ids, int source, int rank, int32_t* out) const {
  const auto n_active = static_cast<int>(ids.cols);
  for (int64_t t = 0; t < ids.rows; ++t, out += n_active) {
    choose(ids.row<int32_t>(t), n_active, source, out);
    for (int k = 0; k < n_active; ++k) out[k] = out[k] == rank ? ids.row<int32_t>(t)[k] : -1;
  }
}

}  // namespace tandem
