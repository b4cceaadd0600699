#include "with_gpu/gpu_expert_mover.h"

#include <algorithm>

#include "offload/cuda_expert_places.h"
#include "offload/plan/hot_experts.h"

namespace tandem {
namespace {

bool has(std::span<const int32_t> owners, int owner) {
  return std::find(owners.begin(), owners.end(), owner) != owners.end();
}

}  // namespace

int GpuExpertMover::begin(std::span<const ExpertChange> changes) {
  changes_.assign(changes.begin(), changes.end());
  to_gpu_.clear();
  from_gpu_.clear();
  const int here = p_.owners ? p_.rank : kGpuOwner;
  for (const ExpertChange& change : changes_) {
    if (!has_layer(p_.layers, change.layer)) continue;
    const bool is_here = p_.owners ? has(p_.owners->ranks(change.layer, change.expert), here)
                                   : slots_->has({change.layer, change.expert});
    const bool will_be = has(change.ranks, here);
    if (will_be && !is_here) to_gpu_.push_back({change.layer, change.expert});
    if (is_here && !will_be) from_gpu_.push_back({change.layer, change.expert});
  }
  return static_cast<int>(to_gpu_.size() + (p_.on_cpu ? from_gpu_.size() : 0));
}

void GpuExpertMover::load_experts(const LoadProgress& progress, MoveStatus& result) {
  const LoadOptions options = {p_.n_threads, progress};
  result.n_bytes = slots_->load(to_gpu_, options, result.prepare_seconds);
  if (!p_.on_cpu) return;
  try {
    result.n_bytes += p_.on_cpu->load(from_gpu_, options);
  } catch (...) {
    slots_->drop();
    throw;
  }
}

void GpuExpertMover::drop() {
  slots_->drop();
  if (p_.on_cpu) p_.on_cpu->drop();
}

void GpuExpertMover::exchange() {
  if (p_.on_cpu) p_.on_cpu->exchange(to_gpu_, *p_.cpu_weights);
  slots_->exchange(from_gpu_, p_.on_cpu ? ExpertPlaces::kOnCpu : ExpertPlaces::kOnOtherRank,
                   followers_.places);
  if (!p_.owners) return;
  for (const ExpertChange& change : changes_)
    p_.owners->set(change.layer, change.expert, change.ranks);
  followers_.owners();
}

}  // namespace tandem
