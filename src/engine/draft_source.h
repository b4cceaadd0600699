// Proposes tokens that may come next, for the engine to verify.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "engine/scheduler.h"

namespace tandem {

struct DraftSource {
  virtual ~DraftSource() = default;
  // At most `most` drafts that follow the tokens of a sequence: its prompt and its answer so far.
  virtual std::vector<int32_t> draft(SequenceId id, std::span<const int32_t> tokens, int most) = 0;
};

}  // namespace tandem
