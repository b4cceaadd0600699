#include "engine/micro_batch_policy.h"

#include <algorithm>
#include <bit>

#include "core/check.h"

namespace tandem {

int MicroBatchPolicy::choose(const Step& step) {
  Size& size = size_of(step);
  if (!size.seconds[0].is_known()) return kChoices[0];
  size_t best = 0;
  for (size_t i = 1; i < kChoices.size() && kChoices[i] <= step.most; ++i) {
    if (!size.seconds[i].is_known()) {
      if (promises(size, i)) return kChoices[i];
    } else if (size.seconds[i].value() < size.seconds[best].value()) {
      best = i;
    }
  }
  if (++size.n_steps < kUsualSteps) return kChoices[best];
  size.n_steps = 0;
  size.next = (size.next + 1) % kChoices.size();
  const bool may_try = size.next == 0 || promises(size, size.next);
  return may_try && kChoices[size.next] <= step.most ? kChoices[size.next] : kChoices[best];
}

// At best, n micro-batches take as long as all of them are computed, or as long as one of them is
// computed and waits.
bool MicroBatchPolicy::promises(const Size& size, size_t choice) const {
  if (!size.waited.is_known()) return true;
  const double seconds = size.seconds[0].value(), waited = size.waited.value();
  const double computed = seconds - waited;
  return std::max(computed, computed / kChoices[choice] + waited) < kWorthTrying * seconds;
}

void MicroBatchPolicy::measured(const Step& step, int n, double seconds,
                                std::optional<double> seconds_waited) {
  Size& size = size_of(step);
  const auto choice = std::find(kChoices.begin(), kChoices.end(), n) - kChoices.begin();
  check(choice < std::ssize(kChoices), "micro-batches that are chosen");
  size.seconds[choice].add(seconds / step.n_tokens);
  if (choice == 0 && seconds_waited) size.waited.add(*seconds_waited / step.n_tokens);
}

MicroBatchPolicy::Size& MicroBatchPolicy::size_of(const Step& step) {
  const auto bits = std::bit_width(static_cast<unsigned>(step.n_tokens));
  return sizes_[step.is_decode ? 1 : 0][std::min<size_t>(bits, kSizes - 1)];
}

void MicroBatchPolicy::Mean::add(double value) {
  constexpr int kWindow = 8;
  if (++n_ <= kSkipped) return;
  value_ += (value - value_) / std::min(n_ - kSkipped, kWindow);
}

}  // namespace tandem
