// What a GPU needs so that rows cross once to each host: the GPUs that it reaches directly, which
// are those of its host and one of every other host, and which of them have an expert.
#pragma once
#include "comm/host_groups.h"
#include "gpu_kernels/exchange/collectives.h"
#include "offload/gpu/exchange/cuda_owners.h"

namespace tandem {

class CudaHosts {
 public:
  // The owners, by their ranks in groups.all(), what connects the GPUs of groups.within() and
  // plane(), and the stream outlive the object. The hosts have as many ranks each.
  CudaHosts(const ExpertOwners& owners, const HostGroups& groups, gpu::Collectives& within,
            gpu::Collectives& plane, gpu::Stream& stream);
  static int64_t bytes_for(int n_layers, int n_experts, const HostLayout& layout);

  // Between steps: the owners have changed.
  void read();

  int host() const { return host_; }                    // this rank's, in the layout
  gpu::Collectives& within() const { return within_; }  // the GPUs of this rank's host
  gpu::Collectives& plane() const { return plane_; }    // one GPU of every host
  const CudaOwners& ranks() const { return ranks_; }    // of within() that have an expert
  const CudaOwners& hosts() const { return hosts_; }    // by their GPUs of plane()

 private:
  const int host_;
  gpu::Collectives &within_, &plane_;
  CudaOwners ranks_, hosts_;
};

}  // namespace tandem
