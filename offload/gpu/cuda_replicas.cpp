#include "offload/gpu/cuda_replicas.h"

namespace tandem {

CudaReplicas::CudaReplicas(const CudaOwners& owners, ExpertPool& mine, int max_tokens, int n_active)
    : owners_(owners), mine_(mine), ids_(bytes_for(max_tokens, n_active), gpu::Site::kDevice) {}

int64_t CudaReplicas::bytes_for(int max_tokens, int n_active) {
  return int64_t{max_tokens} * n_active * int64_t{sizeof(int32_t)};
}

Ticket CudaReplicas::start(const ExpertBatch& batch) {
  if (!owners_.has_replicas(batch.layer)) return mine_.submit(batch);
  const TensorView& ids = batch.routing.ids;
  int32_t* const own = ids_.as<int32_t>() + batch.first_row * ids.cols;
  ExpertBatch mine = batch;
  mine.routing.ids = owners_.own_ids(batch.layer, ids, 0, own);
  return mine_.submit(mine);
}

}  // namespace tandem
