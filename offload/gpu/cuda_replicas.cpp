#include "offload/gpu/cuda_replicas.h"

#include "gpu_kernels/exchange.h"

namespace tandem {

CudaReplicas::CudaReplicas(const Parts& parts, int max_tokens, int n_active)
    : p_(parts),
      n_active_(n_active),
      owners_(int64_t{parts.owners.n_layers()} * parts.owners.n_experts() * parts.n_ranks *
                  int64_t{sizeof(int32_t)},
              gpu::Site::kDevice),
      ids_(int64_t{max_tokens} * n_active * int64_t{sizeof(int32_t)}, gpu::Site::kDevice) {
  read_owners();
}

void CudaReplicas::read_owners() {
  std::vector<int32_t> all;
  for (int layer = 0; layer < p_.owners.n_layers(); ++layer)
    for (int e = 0; e < p_.owners.n_experts(); ++e) {
      const std::vector<int32_t>& ranks = p_.owners.ranks(layer, e);
      const size_t end = all.size() + p_.n_ranks;
      all.insert(all.end(), ranks.begin(), ranks.end());
      all.resize(end, -1);
    }
  p_.stream.copy(all.data(), owners_.bytes(), owners_.as<int32_t>());
  p_.stream.wait();
}

int64_t CudaReplicas::bytes_for(int n_layers, int n_experts, int n_ranks, int max_tokens,
                                int n_active) {
  return (int64_t{n_layers} * n_experts * n_ranks + int64_t{max_tokens} * n_active) *
         int64_t{sizeof(int32_t)};
}

Ticket CudaReplicas::start(const ExpertBatch& batch) {
  if (!p_.owners.has_replicas(batch.layer)) return p_.mine.submit(batch);
  const TensorView& all = batch.routing.ids;
  const int n_experts = p_.owners.n_experts();
  int32_t* const own = ids_.as<int32_t>() + int64_t{batch.first_row} * n_active_;
  const auto n = static_cast<int>(all.rows);
  gpu::own_ids(p_.stream,
               {.ids = static_cast<const int32_t*>(all.data),
                .ids_stride = all.stride,
                .owners = owners_.as<int32_t>() + int64_t{batch.layer} * n_experts * p_.n_ranks,
                .max_owners = p_.n_ranks,
                .out = own,
                .tokens = n,
                .n_active = n_active_,
                .rank = p_.rank,
                .tokens_of_source = p_.gathered ? n / p_.n_ranks : 0,
                .hosts = p_.owners.hosts()});
  ExpertBatch mine = batch;
  mine.routing.ids = {own, n, n_active_, n_active_, DType::kI32};
  return p_.mine.submit(mine);
}

}  // namespace tandem
