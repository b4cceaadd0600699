#include "offload/gpu/exchange/cuda_owners.h"

#include <algorithm>
#include <numeric>

#include "gpu_kernels/exchange/exchange.h"

namespace tandem {

namespace {

std::vector<int32_t> all_numbers(int n) {
  std::vector<int32_t> numbers(n);
  std::iota(numbers.begin(), numbers.end(), 0);
  return numbers;
}

}  // namespace

CudaOwners::CudaOwners(const ExpertOwners& owners, Ranks ranks, gpu::Stream& stream)
    : owners_(owners),
      ranks_(std::move(ranks)),
      stream_(stream),
      table_(bytes_for(owners.n_layers(), owners.n_experts(), ranks_.n), gpu::Site::kDevice) {
  read();
}

CudaOwners::CudaOwners(const ExpertOwners& owners, int rank, int n_ranks, gpu::Stream& stream)
    : CudaOwners(owners, {all_numbers(n_ranks), n_ranks, rank, owners.hosts()}, stream) {}

int64_t CudaOwners::bytes_for(int n_layers, int n_experts, int n_ranks) {
  return int64_t{n_layers} * n_experts * n_ranks * int64_t{sizeof(int32_t)};
}

void CudaOwners::read() {
  std::vector<int32_t> all, numbers;
  for (int layer = 0; layer < owners_.n_layers(); ++layer)
    for (int e = 0; e < owners_.n_experts(); ++e) {
      numbers.clear();
      for (const int32_t rank : owners_.ranks(layer, e))
        if (ranks_.number[rank] >= 0) numbers.push_back(ranks_.number[rank]);
      std::sort(numbers.begin(), numbers.end());
      numbers.erase(std::unique(numbers.begin(), numbers.end()), numbers.end());
      const size_t end = all.size() + ranks_.n;
      all.insert(all.end(), numbers.begin(), numbers.end());
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
                         .max_owners = ranks_.n,
                         .out = out,
                         .tokens = static_cast<int>(ids.rows),
                         .n_active = static_cast<int>(ids.cols),
                         .rank = ranks_.own,
                         .tokens_of_source = static_cast<int>(rows_of_source),
                         .hosts = hosts()});
  return {out, ids.rows, ids.cols, ids.cols, DType::kI32};
}

}  // namespace tandem
