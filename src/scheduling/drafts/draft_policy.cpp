#include "scheduling/drafts/draft_policy.h"

#include <algorithm>
#include <bit>
#include <vector>

namespace tandem {
namespace {

constexpr double kKept = 0.99;       // of a draft's weight with each later one
constexpr double kPrior = 4;         // drafts that the usual rate counts for
constexpr double kUsualRate = 0.85;  // V3 report, section 5.4.3: 85 to 90 % of the second tokens
constexpr double kNewest = 0.15;     // weight of the newest value of a mean
constexpr double kOutlier = 2;       // times above so many times the expected one are cut
constexpr double kGain = 1.05;       // what drafts must be expected to bring, above the noise

constexpr int kPlainSteps = 8;    // measured before the first probe
constexpr int kProbe = 16;        // steps with drafts that a probe measures,
constexpr int kProbeSteps = 96;   // within so many: a source may have to prepare a page first
constexpr int kFirstWait = 2048;  // steps without drafts before the next probe; doubled each time
constexpr int kLongestWait = 1 << 13;
constexpr int kRefresh = 64;  // among so many steps with drafts there is one without

size_t size_index(size_t n) { return std::bit_width(n) - 1; }

}  // namespace

void Acceptance::add(int n_accepted, bool rejected) {
  for (int i = 0; i < n_accepted + (rejected ? 1 : 0); ++i) {
    of_[i].tried = of_[i].tried * kKept + 1;
    of_[i].accepted = of_[i].accepted * kKept + (i < n_accepted ? 1 : 0);
  }
}

double Acceptance::rate(int draft, double usual) const {
  return (of_[draft].accepted + kPrior * usual) / (of_[draft].tried + kPrior);
}

Acceptance::Rates Acceptance::rates(double usual) const {
  Rates rates;
  for (int i = 0; i < kMaxDraftTokens; ++i) rates[i] = usual = rate(i, usual);
  return rates;
}

void DraftPolicy::Mean::add(double value) {
  ++n_;
  value_ += std::max(kNewest, 1. / n_) * (value - value_);
}

void DraftPolicy::measured(const Step& step) {
  Size& size = sizes_[size_index(step.n_sequences)];
  const double n = step.n_sequences, plain = size.plain.value() * n;
  if (size.plain.n() == 0) {
    if (step.n_drafts == 0) size.plain.add(step.step_seconds / n);
    return;
  }
  const double longest_step = kOutlier * (1 + step.n_drafts) * plain;
  if (step.n_drafts == 0) return size.plain.add(std::min(step.step_seconds, longest_step) / n);
  size.per_draft.add((std::min(step.step_seconds, longest_step) - plain) / step.n_drafts);
  size.to_draft[step.longest].add(std::min(step.draft_seconds, longest_step));
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
  const auto n = static_cast<double>(sequences.size());
  const Acceptance::Rates usual = all_.rates(kUsualRate);
  const double plain = size.plain.value() * n, per_draft = std::max(0.0, size.per_draft.value());
  const double threshold = per_draft * n / plain;
  int best = 0;
  double best_rate = kGain * n / plain;
  std::vector<int> counts(sequences.size());
  for (int longest = 1; longest <= most_; ++longest) {
    double tokens = n, seconds = plain + seconds_to_draft(size, longest);
    for (size_t i = 0; i < sequences.size(); ++i) {
      double chance = 1;
      counts[i] = 0;
      for (; counts[i] < longest; ++counts[i]) {
        chance *= sequences[i]->rate(counts[i], usual[counts[i]]);
        if (chance <= threshold) break;
        tokens += chance;
        seconds += per_draft;
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
  if (first || size.n_idle >= size.wait) {
    size.wait = first ? kFirstWait : std::min(2 * size.wait, kLongestWait);
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
    // More often at first, because the first steps of a process are slow.
    const auto n = static_cast<unsigned>(++size.n_drafting);
    if (n % kRefresh == 0 || std::has_single_bit(n)) std::fill(n_drafts.begin(), n_drafts.end(), 0);
    return;
  }
  follows_ = false;
  ++size.n_idle;
}

}  // namespace tandem
