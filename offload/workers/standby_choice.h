// Which standby is to load the experts that have no owner left. Pure.
#pragma once
#include <span>
#include <vector>

namespace tandem {

// What the choice depends on, of each standby in the order in which they are listed.
struct StandbyState {
  bool takes_orders;           // it is up, and has answered all that it was asked
  std::vector<bool> loads;     // [shards] it was asked for and has not answered
  std::vector<bool> may_load;  // [shards] that it neither has nor has refused, and can compute
};

struct StandbyOrder {
  int shard, standby;
  bool operator==(const StandbyOrder&) const = default;
};

// Each of the shards `lost` that no standby loads goes to the first that may load it and takes
// orders. One standby gets one order at a time, so that several load at the same time.
std::vector<StandbyOrder> standby_orders(std::span<const int> lost,
                                         std::span<const StandbyState> standbys);

}  // namespace tandem
