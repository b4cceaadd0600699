#include "offload/gpu/exchange/cuda_hosts.h"

namespace tandem {
namespace {

// [ranks] the number of each in its host, -1 on other hosts than this rank's.
std::vector<int32_t> numbers_in_host(const HostLayout& layout, int rank) {
  std::vector<int32_t> numbers(layout.n_ranks(), -1);
  for (const int r : layout.ranks_of(layout.host_of(rank))) numbers[r] = layout.number_in_host(r);
  return numbers;
}

// [ranks] the number in this rank's plane of the rank through which it reaches the host of each.
std::vector<int32_t> hosts_in_plane(const HostGroups& groups) {
  const HostLayout& layout = groups.layout();
  std::vector<int32_t> numbers;
  for (const int host : layout.host_of_rank())
    numbers.push_back(groups.rank_in_plane(layout.gateway(groups.all().rank(), host)));
  return numbers;
}

constexpr RankHosts kOneHost = {};
constexpr RankHosts kHostOfEach = {.n_of_host = 1};

}  // namespace

CudaHosts::CudaHosts(const ExpertOwners& owners, const HostGroups& groups, gpu::Collectives& within,
                     gpu::Collectives& plane, gpu::Stream& stream)
    : host_(groups.layout().host_of(groups.all().rank())),
      within_(within),
      plane_(plane),
      ranks_(owners,
             {numbers_in_host(groups.layout(), groups.all().rank()), within.n_ranks(),
              within.rank(), kOneHost},
             stream),
      hosts_(owners, {hosts_in_plane(groups), plane.n_ranks(), plane.rank(), kHostOfEach}, stream) {
}

int64_t CudaHosts::bytes_for(int n_layers, int n_experts, const HostLayout& layout) {
  return CudaOwners::bytes_for(n_layers, n_experts, layout.n_hosts()) +
         CudaOwners::bytes_for(n_layers, n_experts, static_cast<int>(layout.ranks_of(0).size()));
}

void CudaHosts::read() {
  ranks_.read();
  hosts_.read();
}

}  // namespace tandem
