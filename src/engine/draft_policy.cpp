#include "engine/draft_policy.h"

#include <algorithm>
#include <bit>
#include <vector>

namespace tandem {
namespace {

constexpr double kKept = 0.99;       // of a draft's weight with each later one
constexpr double kPrior = 4;         // drafts that the usual rate counts for
constexpr double kUsualRate = 0.85;  // V3 report, section 5.4.3: 85 to 90 % of the second tokens
constexpr double kNewest = 0.15;     // weight of the newest value of a mean
constexpr double kOutlier = 2;       // values above so many times the mean are cut
constexpr double kGain = 1.02;       // what drafts must bring to be worth their memory traffic

constexpr int kPlainSteps = 4;    // measured before the first probe
constexpr int kProbe = 8;         // steps with drafts that a probe measures,
constexpr int kProbeSteps = 96;   // within so many: a source may have to prepare a page first
constexpr int kFirstWait = 1024;  // steps without drafts before the next probe; doubled each time
constexpr int kLongestWait = 1 << 13;
constexpr int kRefresh = 64;  // among so many steps with drafts there is one without

size_t size_index(size_t n) { return std::bit_width(n) - 1; }

}  // namespace

void Acceptance::add(int n_accepted, bool rejected) {
  for (int i = 0; i < n_accepted + (rejected ? 1 : 0); ++i) {
    tried_ = tried_ * kKept + 1;
    accepted_ = accepted_ * kKept + (i < n_accepted ? 1 : 0);
  }
}

double Acceptance::rate(double usual) const {
  return (accepted_ + kPrior * usual) / (tried_ + kPrior);
}

void DraftPolicy::Mean::add(double value) {
  if (n_++ == 0) value_ = value;
  const double weight = std::max(kNewest, 1. / n_);
  value_ += weight * (std::min(value, kOutlier * value_) - value_);
}

void DraftPolicy::measured(const Step& step) {
  Size& size = sizes_[size_index(step.n_sequences)];
  const double n = step.n_sequences;
  if (step.n_drafts == 0) return size.plain.add(step.step_seconds / n);
  if (size.plain.n() > 0) {
    const double more = step.step_seconds - size.plain.value() * n;
    size.per_draft.add(std::max(0.0, more) / step.n_drafts);
  }
  size.to_draft[step.longest].add(step.draft_seconds);
  ++size.n_probed;
}

// Longer drafts that were never measured are assumed to take as long for each token.
double DraftPolicy::seconds_to_draft(const Size& size, int longest) const {
  if (size.to_draft[longest].n() > 0) return size.to_draft[longest].value();
  for (int n = longest - 1; n > 0; --n)
    if (size.to_draft[n].n() > 0) return size.to_draft[n].value() * longest / n;
  return 0;
}

// The numbers of drafts with the most expected tokens per second. A draft is only worth its time if
// it is accepted more often than the time would give tokens without drafts. Returns the longest.
int DraftPolicy::best(const Size& size, std::span<const Acceptance* const> sequences,
                      std::span<int> n_drafts) const {
  const double n = static_cast<double>(sequences.size()), usual = all_.rate(kUsualRate);
  const double plain = size.plain.value() * n, threshold = size.per_draft.value() * n / plain;
  int best = 0;
  double best_rate = kGain * n / plain;
  std::vector<int> counts(sequences.size());
  for (int longest = 1; longest <= most_; ++longest) {
    double tokens = n, seconds = plain + seconds_to_draft(size, longest);
    for (size_t i = 0; i < sequences.size(); ++i) {
      const double rate = sequences[i]->rate(usual);
      double chance = rate;
      counts[i] = 0;
      for (; counts[i] < longest && chance > threshold; chance *= rate) {
        tokens += chance;
        seconds += size.per_draft.value();
        ++counts[i];
      }
    }
    if (tokens / seconds <= best_rate) continue;
    best_rate = tokens / seconds;
    best = *std::max_element(counts.begin(), counts.end());
    std::copy(counts.begin(), counts.end(), n_drafts.begin());
  }
  return best;
}

void DraftPolicy::choose(std::span<const Acceptance* const> sequences, std::span<int> n_drafts) {
  std::fill(n_drafts.begin(), n_drafts.end(), 0);
  if (sequences.empty()) return;
  Size& size = sizes_[size_index(sequences.size())];
  follows_ = true;
  if (size.plain.n() < kPlainSteps) return;
  const bool first = size.wait == 0;
  if (first) size.wait = kFirstWait;
  if (first || size.n_idle >= size.wait) {
    size.n_probed = size.probe_steps = size.n_idle = 0;
    size.per_draft = {};
    size.to_draft = {};
  }
  if (size.n_probed < kProbe && size.probe_steps++ < kProbeSteps)
    return std::fill(n_drafts.begin(), n_drafts.end(), 1);
  size.n_probed = kProbe;
  if (size.per_draft.n() > 0 && best(size, sequences, n_drafts) > 0) {
    size.wait = kFirstWait;
    size.n_idle = 0;
    if (++size.n_drafting % kRefresh == 0) std::fill(n_drafts.begin(), n_drafts.end(), 0);
    return;
  }
  follows_ = false;
  if (++size.n_idle == size.wait) size.wait = std::min(2 * size.wait, kLongestWait);
}

}  // namespace tandem
