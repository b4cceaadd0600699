#include "offload/ranks/rank_experts.h"

#include <algorithm>

namespace tandem {

ExpertOwners even_owners(const ModelConfig& config, int n_ranks) {
  const int n = config.router.n_experts;
  ExpertOwners owners(config.n_all_layers(), n);
  for (int layer = 0; layer < config.n_all_layers(); ++layer)
    for (int e = 0; config.is_moe(layer) && e < n; ++e) owners.add(layer, e, e % n_ranks);
  return owners;
}

ExpertOwners owners_of(const std::vector<std::vector<std::vector<int>>>& ranks_of_expert,
                       const ModelConfig& config, int n_ranks, RankHosts hosts,
                       ReplicaChoice choice) {
  if (ranks_of_expert.empty()) return even_owners(config, n_ranks);
  ExpertOwners owners(config.n_all_layers(), config.router.n_experts, hosts, choice);
  for (int layer = 0; layer < std::ssize(ranks_of_expert); ++layer)
    for (int e = 0; e < std::ssize(ranks_of_expert[layer]); ++e)
      for (const int rank : ranks_of_expert[layer][e]) owners.add(layer, e, rank);
  return owners;
}

std::vector<std::vector<std::vector<int>>> ranks_beside_workers(
    const std::vector<std::vector<bool>>& on_workers, int n_ranks) {
  std::vector<std::vector<std::vector<int>>> ranks;
  for (const std::vector<bool>& layer : on_workers) {
    int n_dealt = 0;
    std::vector<std::vector<int>>& of_layer = ranks.emplace_back();
    for (const bool on_worker : layer) of_layer.push_back({on_worker ? 0 : n_dealt++ % n_ranks});
  }
  return ranks;
}

Elsewhere elsewhere_of(const ExpertOwners& owners, const ModelConfig& config, int rank,
                       const BackboneShare& share) {
  Elsewhere elsewhere{.experts = {}, .backbone = false, .share = share};
  elsewhere.experts.resize(config.n_all_layers());
  for (int layer = 0; layer < config.n_all_layers(); ++layer)
    for (int e = 0; config.is_moe(layer) && e < config.router.n_experts; ++e) {
      const std::vector<int32_t>& ranks = owners.ranks(layer, e);
      const bool here = std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
      elsewhere.experts[layer].push_back(!here || !has_layer(share.layers, layer));
    }
  return elsewhere;
}

Ticket RankExperts::start(const ExpertBatch& batch) {
  const TensorView& all = batch.routing.ids;
  const auto n_active = static_cast<int>(all.cols);
  const Ticket ticket = batch.micro_batch;
  std::vector<int32_t>& ids = ids_[ticket];
  ids.resize(all.rows * n_active);
  chooser_.begin(batch.layer, all);
  chooser_.own_ids(all, -1, p_.rank, ids.data());
  own_[ticket] = batch;
  own_[ticket].routing.ids = {ids.data(), all.rows, n_active, n_active, DType::kI32};
  if (p_.workers) step_.unless_failed([&] { p_.workers->submit(own_[ticket]); });
  return ticket;
}

// The experts in this rank's memory have one ticket, so a batch waits for its turn.
void RankExperts::add_to(Ticket ticket, TensorView y) {
  if (p_.workers) return step_.unless_failed([&] { p_.workers->add_to(ticket, y); });
  p_.mine.add_to(p_.mine.submit(own_[ticket]), y);
}

void RankExperts::begin_step(std::span<const Batch> replicas, int n_micro_batches) {
  n_micro_batches_ = n_micro_batches;
  if (p_.workers) p_.workers->begin_step(replicas, n_micro_batches);
}

std::optional<double> RankExperts::seconds_waited() const {
  return p_.workers ? p_.workers->seconds_waited() : std::nullopt;
}

std::vector<WorkerStatus> RankExperts::workers() const {
  return p_.workers ? p_.workers->workers() : std::vector<WorkerStatus>();
}

void RankExperts::end_step(LayerRange layers, const MicroBatches& step) {
  ExpertPool::end_step(layers, step);
  step_.end();
}

}  // namespace tandem
