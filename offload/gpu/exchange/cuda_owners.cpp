#include "offload/gpu/exchange/cuda_owners.h"

#include "gpu_kernels/exchange/exchange.h"

namespace tandem {

CudaOwners::CudaOwners(const ExpertOwners& owners, int rank, int n_ranks, gpu::Stream& stream)
    : owners_(owners),
      rank_(rank),
      n_ranks_(n_ranks),
      stream_(stream),
      table_(bytes_for(owners.n_layers(), owners.n_experts(), n_ranks), gpu::Site::kDevice) {
  read();
}

int64_t CudaOwners::bytes_for(int n_layers, int n_experts, int n_ranks) {
  return int64_t{n_layers} * n_experts * n_ranks * int64_t{sizeof(int32_t)};
}

void CudaOwners::read() {
  std::vector<int32_t> all;
  for (int layer = 0; layer < owners_.n_layers(); ++layer)
    for (int e = 0; e < owners_.n_experts(); ++e) {
      const std::vector<int32_t>& ranks = owners_.ranks(layer, e);
      const size_t end = all.size() + n_ranks_;
      all.insert(all.end(), ranks.begin(), ranks.end());
      all.resize(end, -1);
    }
  stream_.copy(all.data(), table_.bytes(), table_.as<int32_t>());
  stream_.wait();
}

TensorView CudaOwners::own_ids(int layer, const TensorView& ids, int64_t rows_of_source,
                               int32_t* out) const {
  gpu::own_ids(stream_, {.ids = static_cast<const int32_t*>(ids.data),
                         .ids_stride = ids.stride,
                         .owners = of_layer(layer),
                         .max_owners = n_ranks_,
                         .out = out,
                         .tokens = static_cast<int>(ids.rows),
                         .n_active = static_cast<int>(ids.cols),
                         .rank = rank_,
                         .tokens_of_source = static_cast<int>(rows_of_source),
                         .hosts = hosts()});
  return {out, ids.rows, ids.cols, ids.cols, DType::kI32};
}

}  // namespace tandem
