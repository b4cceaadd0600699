#include "with_gpu/gpu_expert_mover.h"

#include "offload/balance/hot_experts.h"
#include "offload/gpu/cuda_expert_places.h"

namespace tandem {

int GpuExpertMover::begin(std::span<const ExpertChange> changes) {
  changes_.assign(changes.begin(), changes.end());
  moves_ = moves_of(changes, p_.layers, p_.owners ? p_.rank : kGpuOwner,
                    [this](ExpertId id) { return slots_->has(id); });
  return static_cast<int>(moves_.arriving.size() + (p_.on_cpu ? moves_.leaving.size() : 0));
}

void GpuExpertMover::load_experts(const LoadProgress& progress, MoveStatus& result) {
  const LoadOptions options = {p_.n_threads, progress};
  result.n_bytes = slots_->load(moves_.arriving, options, result.prepare_seconds);
  if (!p_.on_cpu) return;
  try {
    result.n_bytes += p_.on_cpu->load(moves_.leaving, options);
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
  if (p_.on_cpu) p_.on_cpu->exchange(moves_.arriving, *p_.cpu_weights);
  slots_->exchange(moves_.leaving, p_.on_cpu ? ExpertPlaces::kOnCpu : ExpertPlaces::kOnOtherRank,
                   followers_.places);
  if (!p_.owners) return;
  p_.owners->apply(changes_);
  followers_.owners();
}

}  // namespace tandem
