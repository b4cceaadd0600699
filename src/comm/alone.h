// The group of one rank: its calls cost nothing, and copy only between different places.
#pragma once
#include <memory>

#include "comm/group.h"

namespace tandem {

std::unique_ptr<Group> make_alone();

}  // namespace tandem
