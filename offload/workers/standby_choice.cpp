#include "offload/workers/standby_choice.h"

#include <algorithm>

namespace tandem {

std::vector<StandbyOrder> standby_orders(std::span<const int> lost,
                                         std::span<const StandbyState> standbys) {
  std::vector<StandbyOrder> orders;
  std::vector<bool> is_free;
  for (const StandbyState& standby : standbys) is_free.push_back(standby.takes_orders);
  for (const int shard : lost) {
    const auto loads = [&](const StandbyState& standby) { return standby.loads[shard]; };
    if (std::any_of(standbys.begin(), standbys.end(), loads)) continue;
    for (size_t i = 0; i < standbys.size(); ++i)
      if (is_free[i] && standbys[i].may_load[shard]) {
        is_free[i] = false;
        orders.push_back({shard, static_cast<int>(i)});
        break;
      }
  }
  return orders;
}

}  // namespace tandem
