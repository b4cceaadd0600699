// How often each routed expert was chosen in the last steps of a server: a window that moves on by
// an eighth of its length.
#pragma once
#include <cstdint>
#include <deque>
#include <span>
#include <vector>

#include "model/config.h"

namespace tandem {

// Counts of some steps, of the tokens of all ranks.
struct ExpertUses {
  int64_t n_steps = 0, n_tokens = 0;
  std::vector<std::vector<int64_t>> of_layer = {};  // [n_all_layers][n_experts]; empty: a dense one
};

class ExpertWindow {
 public:
  // An eighth of a window must not count an expert 2^32 times, that is for 343,000 tokens a step.
  static constexpr int kMaxSteps = 100'000;

  // A window of n_steps, from 1 to kMaxSteps. `counts`: what StepRunner::read_expert_uses() gives
  // before the first step; what it counted until then is left out.
  ExpertWindow(const ModelConfig& config, int n_steps, std::span<const uint32_t> counts);

  void add_step(int n_tokens);
  // Whether there was a step since the last read(), and whether read() must be called before the
  // next step.
  bool has_news() const { return now_.n_steps > n_steps_read_; }
  bool is_due() const { return now_.n_steps - marks_.back().n_steps >= n_steps_of_block_; }
  // What is counted now, modulo 2^32, [n_all_layers, n_experts].
  void read(std::span<const uint32_t> counts);

  int n_steps() const { return n_steps_; }
  // The uses in the last steps before read(): in n_steps() of them at most, and in more than seven
  // eighths of n_steps() once there were so many.
  ExpertUses uses() const;

 private:
  // What was counted until a step.
  struct Mark {
    int64_t n_steps = 0, n_tokens = 0;
    std::vector<int64_t> counts;  // [n_all_layers * n_experts]
  };

  const ModelConfig& config_;
  const int n_steps_, n_steps_of_block_;
  std::vector<uint32_t> last_;  // what was read last
  int64_t n_steps_read_ = 0;
  Mark now_;
  std::deque<Mark> marks_;  // where blocks begin, the oldest first; the window begins at the first
};

}  // namespace tandem
