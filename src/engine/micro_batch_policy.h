// Decides in how many micro-batches the ranks of a model make a step, from what was measured: the
// time of steps, and how much of it the deciding rank waited for rows of other ranks. A function of
// its inputs alone, without a clock.
#pragma once
#include <array>
#include <cstdint>
#include <optional>

#include "model/batch.h"

namespace tandem {

// The last kMost of the values that were added.
class RecentValues {
 public:
  static constexpr int kMost = 7;

  void add(double value) { values_[n_++ % kMost] = value; }
  void clear() { n_ = 0; }
  int n() const { return n_ < kMost ? static_cast<int>(n_) : kMost; }
  // The median of the last n values, of which there must be one; the lower of two in the middle.
  double median(int n = kMost) const;

 private:
  std::array<double, kMost> values_ = {};
  int64_t n_ = 0;  // that were added
};

// One choice is used. One beside it, of half or twice as many micro-batches, is tried now and then.
// Steps of a trial alternate with steps of the used choice and are compared with those beside them,
// so that a host that is slow for a while makes both slow. A trial ends when it is clear, beyond
// the noise of steps, which choice is faster. What its steps took longer is a debt, of which each
// later step pays a fixed share, and no trial begins before it is paid. The next trial of the same
// choice comes after twice as many steps, or when the time of the used one has changed.
class MicroBatchPolicy {
 public:
  struct Step {
    int n_tokens;    // of the replica with the most
    bool is_decode;  // each sequence has its next token, with drafts or without
    int most;        // micro-batches that this replica can fill
  };
  // 1, or another number of kChoices that is at most step.most. The same until a step of it was
  // measured.
  int choose(const Step& step);
  // What a step in n micro-batches took, and how long of it this rank waited for others, if known.
  void measured(const Step& step, int n, double seconds, std::optional<double> seconds_waited);

  static constexpr std::array kChoices = {1, 2, kMaxMicroBatches};

 private:
  static constexpr size_t kNone = kChoices.size();
  static constexpr int kSizes = 17;  // by powers of two

  // A choice that is not used.
  struct Other {
    double ratio = 0;  // of its time to that of the used one; 0: not known
    int n_steps = 0;   // of the used one since the last trial; no more than the longest interval
    int interval = 0;  // of n_steps between trials
  };
  // What is known of steps with about as many tokens, of which as many choices are possible.
  struct Size {
    bool has_begun = false;
    size_t used = 0;
    RecentValues seconds;  // of steps of the used choice, per token
    double noise = 0;      // how far they are from their median on average, as a share of it
    int n_noise = 0;       // steps in `noise`
    double usual = 0;      // their median after the last trial; 0: there was none
    std::array<Other, kChoices.size()> others;
    RecentValues waited;       // shares of whole steps; none: not known
    size_t tried = kNone;      // in a trial
    bool is_turn = false;      // of the tried one
    double tried_seconds = 0;  // per token, of the trial's last step; 0: that was compared
    RecentValues ratios;       // of the trial's steps, as Other::ratio
    double debt = 0;           // in steps of the used choice
  };
  struct Place {
    int kind;  // 1: decode
    int size, n_choices;
  };

  static Place place_of(const Step& step);
  Size& size_of(const Place& place);
  static void used_took(Size& size, size_t n_choices, double seconds);
  static void compare(Size& size);
  static void begin_trial(Size& size, size_t n_choices);
  static void use(Size& size, size_t choice, double ratio);
  static bool has_changed(const Size& size);
  static bool promises(const Size& size, size_t choice);

  std::array<std::array<std::array<Size, kSizes>, kChoices.size()>, 2> sizes_;  // as Place has them
  // The largest size of each kind and choice that was computed; -1: none.
  std::array<std::array<int, kChoices.size()>, 2> largest_ = {{{-1, -1, -1}, {-1, -1, -1}}};
};

}  // namespace tandem
