// Which ranks have each expert, in the memory of a GPU.
#pragma once
#include "gpu_kernels/runtime.h"
#include "offload/ranks/expert_owners.h"

namespace tandem {

class CudaOwners {
 public:
  // The ranks of a table as those of some owners.
  struct Ranks {
    std::vector<int32_t> number;  // [ranks of the owners] in the table, -1: none; several may share
    int n = 1, own = 0;           // of the table, and this one's number there
    RankHosts hosts;              // of those of the table
  };
  // The owners, ReplicaChoice::kNearest, and the stream outlive the object.
  CudaOwners(const ExpertOwners& owners, Ranks ranks, gpu::Stream& stream);
  // For all of the n_ranks that share the experts, of which this is number `rank`.
  CudaOwners(const ExpertOwners& owners, int rank, int n_ranks, gpu::Stream& stream);
  // Bytes on the GPU.
  static int64_t bytes_for(int n_layers, int n_experts, int n_ranks);

  // Between steps: the owners have changed.
  void read();

  int rank() const { return ranks_.own; }
  int n_ranks() const { return ranks_.n; }
  RankHosts hosts() const { return ranks_.hosts; }
  bool has_replicas(int layer) const { return owners_.has_replicas(layer); }
  // In GPU memory: [n_experts, n_ranks] ascending, then -1.
  const int32_t* of_layer(int layer) const {
    return table_.as<int32_t>() + int64_t{layer} * owners_.n_experts() * ranks_.n;
  }
  // Writes the ids of a layer's rows, [rows, n_active], to `out`, which is returned, with -1 for
  // those that the replica of another rank computes. rows_of_source: consecutive rows are of rank
  // 0, 1, ..; 0: all ranks have all rows.
  TensorView own_ids(int layer, const TensorView& ids, int64_t rows_of_source, int32_t* out) const;

 private:
  const ExpertOwners& owners_;
  const Ranks ranks_;
  gpu::Stream& stream_;
  const gpu::Buffer table_;  // [layers, n_experts, n_ranks]
};

}  // namespace tandem
