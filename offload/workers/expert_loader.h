// Loads more experts of a worker's model while the worker computes those that it has.
#pragma once
#include <cstdint>

#include "transport/expert_messages.h"

namespace tandem {

class ExpertLoader {
 public:
  virtual ~ExpertLoader() = default;
  enum class State : uint8_t { kIdle, kLoading, kEnded };
  struct Progress {
    State state = State::kIdle;
    int64_t bytes_done = 0, bytes_total = 0;
  };
  // Begins to load experts that were not loaded before. Only when idle.
  virtual void begin(const ExpertsOfLayers& experts) = 0;
  // Thread-safe.
  virtual Progress progress() const = 0;
  // The experts of a load that has ended are computed from now on, and the loader is idle. Called
  // while nothing is computed. Throws Error that says why they were not loaded.
  virtual void finish() = 0;
  // For a worker whose experts move, only when idle. Whether there is memory for these experts too.
  virtual bool has_room(const ExpertsOfLayers&) const { return true; }
  // These experts are not computed from now on, and others get their memory. Called while nothing
  // is computed.
  virtual void drop(const ExpertsOfLayers&) {}
};

}  // namespace tandem
