// Which row of a table of simulated choices (SimulatedChoices) a token takes: the same on CPUs and
// GPUs, and on all ranks.
#pragma once
#include <cstdint>

#include "core/split_mix.h"

namespace tandem {

// token: its number in the step, among the tokens of all replicas. position: in its sequence.
// `varies`: the row follows from a hash of both, so that steps differ; else tokens take turns.
constexpr int64_t simulated_row(int64_t token, int32_t position, int64_t n_rows, bool varies) {
  if (!varies) return token % n_rows;
  const uint64_t h =
      split_mix(static_cast<uint64_t>(token) << 32 ^ static_cast<uint32_t>(position));
  return static_cast<int64_t>(h % static_cast<uint64_t>(n_rows));
}

}  // namespace tandem
