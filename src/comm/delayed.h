// A slow network, for tests and benchmarks: what a rank sends arrives some time later, which no
// rank spends computing.
#pragma once
#include <chrono>
#include <memory>

#include "comm/group.h"

namespace tandem {

// The calls of `group`, whose ranks have the same steady clock: processes of one host, or threads.
// A call returns no earlier than `delay` after each other rank began it, and a number of a window
// is seen `delay` after it was told. All ranks call it; the group outlives what is returned.
std::unique_ptr<Group> make_delayed(Group& group, std::chrono::duration<double> delay);

}  // namespace tandem
