// Windows between processes of one machine.
#pragma once
#include <memory>

#include "comm/group.h"

namespace tandem {

// Every rank maps the memory of all, which no file system names: nothing is left behind when ranks
// are killed. All ranks call it together. Throws Error on all of them when one cannot map the
// memory of another, as on two hosts or in two containers.
std::unique_ptr<Window> map_shared_window(Group& group, int64_t bytes);

}  // namespace tandem
