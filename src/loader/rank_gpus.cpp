#include "loader/rank_gpus.h"

#include <fmt/format.h>

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

// Why two ranks share a GPU; empty: none do.
std::string why_shared(Group& group) {
  std::array<char, 128> id{};
  // What NCCL takes for the host, too: under two names of it, two ranks can test NCCL on one GPU.
  const char* const host_of_nccl = std::getenv("NCCL_HOSTID");
  const std::string text = id_of_gpu() + " " + (host_of_nccl ? host_of_nccl : "");
  text.copy(id.data(), id.size() - 1);
  const std::vector<int> hosts = hosts_of_ranks(group);
  std::vector<std::array<char, 128>> ids(group.size());
  group.all_gather_values(id, std::span(ids));
  for (int r = 0; r < group.size(); ++r)
    for (int other = 0; other < r; ++other)
      if (hosts[r] == hosts[other] && ids[r] == ids[other])
        return fmt::format(
            "ranks {} and {} of one host have the same GPU: give each one of its own "
            "(CUDA_VISIBLE_DEVICES, srun --gpus-per-task 1), or use --device cpu",
            other, r);
  return "";
}

}  // namespace

std::string choose_gpu_of_rank(const Ranks& ranks, bool needs_gpus) {
  Group& group = *ranks.group;
  choose_gpu(ranks.on_host.of_host);
  std::string why_not = why_no_gpu();
  if (needs_gpus)
    run_on_all(group, [&] {
      require(why_not.empty(),
              "rank {}, which is number {} on its host, needs a GPU of its own: {}", group.rank(),
              ranks.on_host.of_host, why_not);
    });
  if (least_on_all(group, why_not.empty()) > 0)
    why_not = why_shared(group);
  else if (why_not.empty())
    why_not = "not every rank has a GPU of its own";
  if (needs_gpus && !why_not.empty()) run_on_all(group, [&] { fail("{}", why_not); });
  return why_not;
}

}  // namespace tandem
