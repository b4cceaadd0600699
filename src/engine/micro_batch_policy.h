// Decides in how many micro-batches the ranks of a model make a step, from what was measured: the
// time of steps, and how much of it the deciding rank waited for rows of other ranks. A function of
// its inputs alone, without a clock.
#pragma once
#include <array>
#include <optional>

#include "model/batch.h"

namespace tandem {

class MicroBatchPolicy {
 public:
  struct Step {
    int n_tokens;    // of the replica with the most
    bool is_decode;  // each sequence has its next token, with drafts or without
    int most;        // micro-batches that this replica can fill
  };
  // 1, or another number of kChoices that is at most step.most.
  int choose(const Step& step);
  // What a step in n micro-batches took, and how long of it this rank waited for others, if known.
  void measured(const Step& step, int n, double seconds, std::optional<double> seconds_waited);

  static constexpr std::array kChoices = {1, 2, kMaxMicroBatches};

 private:
  // A mean in which old values count less. The first value does not count at all: it touches
  // memory.
  class Mean {
   public:
    void add(double value);
    double value() const { return value_; }
    bool is_known() const { return n_ > kSkipped + kNeeded - 1; }

   private:
    static constexpr int kSkipped = 1, kNeeded = 2;
    double value_ = 0;
    int n_ = 0;
  };
  // What is known of steps with about as many tokens.
  struct Size {
    std::array<Mean, kChoices.size()> seconds;
    Mean waited;      // in one micro-batch; not known: any number of them may be faster
    int n_steps = 0;  // since another choice than the best was made
    size_t next = 0;  // choice to be tried next
  };
  static constexpr int kSizes = 17;  // by powers of two
  static constexpr int kUsualSteps = 64;
  // What is tried must promise so much less time.
  static constexpr double kWorthTrying = 0.95;

  Size& size_of(const Step& step);
  bool promises(const Size& size, size_t choice) const;

  std::array<std::array<Size, kSizes>, 2> sizes_;  // of prompts, of decode
};

}  // namespace tandem
