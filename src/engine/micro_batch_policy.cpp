#include "engine/micro_batch_policy.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <utility>

#include "core/check.h"

namespace tandem {
namespace {

constexpr double kPaid = 0.02;  // of the debt by each step, in steps
// The most of a trial's step that is owed: what takes longer than two steps was disturbed.
constexpr double kMostOwed = 1;
constexpr int kLeastInterval = 16, kMostInterval = 256;
// Steps of the used choice that a tried one is compared with; as many come before the first trial.
constexpr int kBeside = 3;

// What a choice takes, over the used one.
constexpr double kWorthTrying = 0.95;  // at best
constexpr double kFaster = 0.97;
constexpr double kSlower = 1.05;
constexpr double kMuchSlower = 1.12;  // one step is enough

constexpr double kChanged = 0.15;   // of the used choice's usual time
constexpr double kMostNoise = 0.5;  // of one step
constexpr int kNoiseWindow = 32;    // steps

}  // namespace

double RecentValues::median(int n) const {
  check(n_ > 0, "a median of values");
  n = std::min(n, this->n());
  std::array<double, kMost> sorted = {};
  for (int i = 0; i < n; ++i) sorted[i] = values_[(n_ - 1 - i) % kMost];
  const auto middle = sorted.begin() + (n - 1) / 2;
  std::nth_element(sorted.begin(), middle, sorted.begin() + n);
  return *middle;
}

int MicroBatchPolicy::choose(const Step& step) {
  const Size& size = size_of(place_of(step));
  return kChoices[size.is_turn ? size.tried : size.used];
}

// A step that is larger than those before touches memory and says nothing about later ones.
void MicroBatchPolicy::measured(const Step& step, int n, double seconds,
                                std::optional<double> seconds_waited) {
  const Place place = place_of(step);
  const size_t choice = std::find(kChoices.begin(), kChoices.end(), n) - kChoices.begin();
  check(choice < kChoices.size(), "micro-batches that are chosen");
  int& largest = largest_[place.kind][choice];
  if (place.size > largest) {
    largest = place.size;
    return;
  }
  Size& size = size_of(place);
  if (choice == 0 && seconds_waited) size.waited.add(*seconds_waited / seconds);
  if (choice == size.used)
    used_took(size, place.n_choices, seconds / step.n_tokens);
  else if (choice == size.tried) {
    size.tried_seconds = seconds / step.n_tokens;
    size.is_turn = false;
  }
}

void MicroBatchPolicy::used_took(Size& size, size_t n_choices, double seconds) {
  if (size.seconds.n() > 0) {
    const double off = std::abs(seconds / size.seconds.median() - 1);
    size.n_noise = std::min(size.n_noise + 1, kNoiseWindow);
    size.noise += (std::min(off, kMostNoise) - size.noise) / size.n_noise;
  }
  size.seconds.add(seconds);
  size.debt = std::max(0., size.debt - kPaid);
  for (Other& other : size.others) other.n_steps = std::min(other.n_steps + 1, kMostInterval);
  if (size.tried_seconds > 0) compare(size);
  if (size.tried == kNone) begin_trial(size, n_choices);
  size.is_turn = size.tried != kNone;
}

void MicroBatchPolicy::begin_trial(Size& size, size_t n_choices) {
  if (size.seconds.n() < kBeside) return;
  if (has_changed(size))
    for (Other& other : size.others) other.interval = 0;
  if (size.debt > 0) return;
  for (size_t choice = 0; choice < n_choices; ++choice) {
    const bool is_beside = choice + 1 == size.used || choice == size.used + 1;
    const Other& other = size.others[choice];
    if (is_beside && other.n_steps >= other.interval && promises(size, choice)) size.tried = choice;
  }
  size.ratios.clear();
}

bool MicroBatchPolicy::has_changed(const Size& size) {
  if (size.usual == 0) return false;
  const double change = std::abs(std::log(size.seconds.median() / size.usual));
  return change > std::max(kChanged, 2 * size.noise);
}

// At best, n micro-batches take as long as all of them are computed, or as long as one of them is
// computed and waits.
bool MicroBatchPolicy::promises(const Size& size, size_t choice) {
  if (choice < size.used || size.waited.n() == 0) return true;
  const double waited = size.waited.median(), computed = 1 - waited;
  const double whole = size.used == 0 ? 1 : size.others[0].ratio;
  return std::max(computed, computed / kChoices[choice] + waited) * whole < kWorthTrying;
}

// Compares the last step of a trial with the steps of the used choice beside it. Where steps have a
// mean deviation d from their median, the standard error of a median of n of them is about
// 1.5 d / sqrt(n).
void MicroBatchPolicy::compare(Size& size) {
  const double last = size.tried_seconds / size.seconds.median(kBeside);
  size.tried_seconds = 0;
  size.debt += std::clamp(last - 1, 0., kMostOwed);
  size.ratios.add(last);
  const int n = size.ratios.n();
  const double ratio = size.ratios.median();
  const double error = 1.5 * size.noise * std::sqrt(2. / n);
  Other& other = size.others[size.tried];
  const bool was_slower = other.ratio > kSlower;
  const bool is_slower =
      ratio > std::max(n == 1 ? kMuchSlower : kSlower, 1 + error) && (n >= 2 || was_slower);
  const bool is_faster = n >= 3 && ratio < std::min(kFaster, 1 - error);
  if (!is_slower && !is_faster && n < RecentValues::kMost) return;
  other = {ratio, 0, std::clamp(2 * other.interval, kLeastInterval, kMostInterval)};
  size.usual = size.seconds.median();
  const size_t tried = std::exchange(size.tried, kNone);
  if (is_faster) use(size, tried, ratio);
}

void MicroBatchPolicy::use(Size& size, size_t choice, double ratio) {
  size.others[size.used] = {1, 0, kLeastInterval};
  for (Other& other : size.others) other.ratio /= ratio;
  size.used = choice;
  size.usual *= ratio;
  size.seconds.clear();
  for (int i = 0; i < kBeside; ++i) size.seconds.add(size.usual);
}

MicroBatchPolicy::Place MicroBatchPolicy::place_of(const Step& step) {
  int n_choices = 1;
  while (n_choices < std::ssize(kChoices) && kChoices[n_choices] <= step.most) ++n_choices;
  const int bits = std::bit_width(static_cast<unsigned>(step.n_tokens));
  return {step.is_decode ? 1 : 0, std::min(bits, kSizes - 1), n_choices};
}

// A size begins with what is known of one beside it, if a trial has ended there.
MicroBatchPolicy::Size& MicroBatchPolicy::size_of(const Place& place) {
  auto& sizes = sizes_[place.kind][place.n_choices - 1];
  Size& size = sizes[place.size];
  if (size.has_begun) return size;
  size.has_begun = true;
  for (const int beside : {place.size - 1, place.size + 1}) {
    if (beside < 0 || beside >= kSizes || sizes[beside].usual == 0) continue;
    size.used = sizes[beside].used;
    size.others = sizes[beside].others;
    size.waited = sizes[beside].waited;
    for (Other& other : size.others) other.n_steps = 0;
    break;
  }
  return size;
}

}  // namespace tandem
