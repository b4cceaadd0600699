// Copying within a process, for calls whose input may lie at its place in the output.
#pragma once
#include <cstring>

#include "comm/group.h"

namespace tandem {

inline void copy_bytes(ConstBytes from, std::byte* to) {
  if (!from.empty() && from.data() != to) std::memcpy(to, from.data(), from.size());
}

}  // namespace tandem
