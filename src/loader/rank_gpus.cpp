#include "loader/rank_gpus.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <span>
#include <vector>

#include "comm/agreement.h"
#include "comm/hosts.h"
#include "core/check.h"
#include "loader/gpu_model.h"

namespace tandem {
namespace {

// What tells the GPU of a rank from others, also of other hosts; empty: it has none.
using GpuId = std::array<char, 128>;
GpuId gpu_id(int host) {
  GpuId id{};
  // What NCCL takes for the host, too: under two names of it, two ranks can test NCCL on one GPU.
  const char* const host_of_nccl = std::getenv("NCCL_HOSTID");
  const std::string text =
      fmt::format("{} {} {}", id_of_gpu(), host, host_of_nccl ? host_of_nccl : "");
  text.copy(id.data(), id.size() - 1);
  return id;
}

}  // namespace

GpusOfRanks choose_gpus_of_ranks(const Ranks& ranks, DeviceChoice device) {
  Group& group = *ranks.group;
  const std::vector<int> hosts = hosts_of_ranks(group);
  const bool may = device != DeviceChoice::kCpu;
  std::vector<char> others_may(group.size());
  group.all_gather_values(static_cast<char>(may), std::span(others_may));
  int number = 0;  // among those of the host that may
  for (int r = 0; r < group.rank(); ++r) number += others_may[r] && hosts[r] == hosts[group.rank()];
  std::string why_not;
  if (may) {
    choose_gpu(number);
    why_not = why_no_gpu();
  }
  run_on_all(group, [&] {
    require(device != DeviceChoice::kCuda || why_not.empty(),
            "rank {}, which is number {} on its host, needs a GPU of its own: {}", group.rank(),
            number, why_not);
  });
  const bool has = may && why_not.empty();
  std::vector<GpuId> ids(group.size());
  group.all_gather_values(has ? gpu_id(hosts[group.rank()]) : GpuId{}, std::span(ids));
  GpusOfRanks gpus;
  for (int r = 0; r < group.size(); ++r) {
    const auto first = std::find(ids.begin(), ids.begin() + r, ids[r]) - ids.begin();
    gpus.have.push_back(ids[r] != GpuId{} && first == r);
    if (ids[r] != GpuId{} && first < r && gpus.why_not.empty())
      gpus.why_not = fmt::format(
          "ranks {} and {} of one host have the same GPU: give each one of its own "
          "(CUDA_VISIBLE_DEVICES, srun --gpus-per-task 1), or use --device cpu",
          first, r);
  }
  run_on_all(group, [&] {
    require(device != DeviceChoice::kCuda || gpus.have[group.rank()], "{}", gpus.why_not);
  });
  if (gpus.why_not.empty()) {
    const std::string first = text_of_first(group, why_not);
    gpus.why_not = first.empty() ? "not every rank has a GPU of its own" : first;
  }
  return gpus;
}

}  // namespace tandem
