// Which ranks have each expert, and which of them computes it for a token.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "core/tensor.h"
#include "gpu_kernels/exchange/nearest_replica.h"
#include "offload/balance/rebalance.h"

namespace tandem {

// How a token's rank is chosen where several have an expert. A rank always makes the same choice
// from the same rows, so ranks that see the same rows agree.
enum class ReplicaChoice : uint8_t {
  kNearest,  // nearest_replica(): depends on the token alone
  // The rank with the least work so far. An expert's rows stay together, so that it is read once,
  // unless they take longer than reading it.
  kLeastLoaded,
};
constexpr const char* name_of(ReplicaChoice choice) {
  return choice == ReplicaChoice::kNearest ? "nearest" : "least-loaded";
}

// The hosts of ranks, from rank `first` on. host_of_rank: hosts_of_ranks(). Where ranks neither
// follow each other on hosts with as many each, nor are dealt to hosts in turns, all are as near.
RankHosts rank_hosts(const std::vector<int>& host_of_rank, int first);

// Which ranks have each expert of each layer; the same on every rank.
class ExpertOwners {
 public:
  ExpertOwners(int n_layers, int n_experts, RankHosts hosts = {},
               ReplicaChoice choice = ReplicaChoice::kNearest)
      : n_layers_(n_layers),
        n_experts_(n_experts),
        hosts_(hosts),
        choice_(choice),
        ranks_(static_cast<size_t>(n_layers) * n_experts),
        has_replicas_(n_layers) {}
  // `rank` has the expert too. All ranks add replicas in the same order.
  void add(int layer, int expert, int rank);
  // Between steps, on all ranks: from now on the experts have these ranks.
  void apply(std::span<const ExpertChange> changes);
  // Several ranks have replicas. An expert without ranks is left out of all sums.
  const std::vector<int32_t>& ranks(int layer, int expert) const {
    return ranks_[index(layer, expert)];
  }
  int n_layers() const { return n_layers_; }
  int n_experts() const { return n_experts_; }
  int n_ranks() const { return n_ranks_; }  // at least 1
  RankHosts hosts() const { return hosts_; }
  ReplicaChoice choice() const { return choice_; }
  bool has_replicas(int layer) const { return has_replicas_[layer]; }
  bool has_replicas() const;  // in any layer

 private:
  size_t index(int layer, int expert) const;

  int n_layers_, n_experts_;
  int n_ranks_ = 1;  // the highest number of one that has an expert, or had it, plus 1
  RankHosts hosts_;
  ReplicaChoice choice_;
  std::vector<std::vector<int32_t>> ranks_;  // [layers * n_experts]
  std::vector<bool> has_replicas_;           // [layers]
};

// Chooses the ranks of a batch's rows.
class ReplicaChooser {
 public:
  // The owners outlive the object.
  explicit ReplicaChooser(const ExpertOwners& owners);
  // The batch of a layer whose rows follow: ids [rows, n_active].
  void begin(int layer, const TensorView& ids);
  // Writes the rank that computes each of a row's experts to `out` [n_active], -1: none, as for a
  // negative id. source: the rank that has the row; -1: all ranks.
  void choose(const int32_t* ids, int n_active, int source, int32_t* out) const;
  // Writes ids [rows, n_active], rows of the batch that `source` has, to `out`, with -1 for those
  // that another rank than `rank` computes.
  void own_ids(const TensorView& ids, int source, int rank, int32_t* out) const;

 private:
  void spread_load(const TensorView& ids);

  const ExpertOwners& owners_;
  int layer_ = 0;
  // For kLeastLoaded, [experts]: the rows of each expert in the batch, and the rank that computes
  // all of them; -1: several ranks divide them.
  std::vector<int> n_rows_;
  std::vector<int32_t> rank_;
  std::vector<double> load_;  // [ranks]
  std::vector<int32_t> replicated_;
};

}  // namespace tandem
