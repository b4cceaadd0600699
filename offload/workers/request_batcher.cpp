#include "offload/workers/request_batcher.h"

#include <algorithm>
#include <bit>

namespace tandem {
namespace {

using Time = RequestBatcher::Time;

constexpr double kLeastSaving = 0.1;    // of a batch's time, for requests to share the batch
constexpr double kLeastGain = 0.05;     // of a layer's time, for requests to wait
constexpr double kMostStepRatio = 1.5;  // of the steps of two backbones that wait for each other
constexpr int kLeastSteps = 2;          // that are measured before waiting
constexpr double kOtherStep = 4;        // a time that differs by more is of another kind of step
constexpr double kOverdue = 0.125;      // of its step, in which a late beginning is still awaited
constexpr std::chrono::seconds kForgotten(10);
constexpr int kLeastTimes = 3;  // that are measured before they count
constexpr int kFirstTimes = 8;  // of which the shortest counts: others may have been interrupted

Clock::duration duration_of(double seconds) {
  return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

void approach(double& mean, double value, double weight) { mean += weight * (value - mean); }

// 0 to 7 rows have their own, then there are four for each power of two.
size_t bucket_of(int n_rows) {
  const auto n = static_cast<unsigned>(n_rows);
  if (n < 8) return n;
  const int shift = std::bit_width(n) - 3;
  return std::min<size_t>(63, 4 * shift + (n >> shift));
}

}  // namespace

void BatchTimes::add(int n_rows, double seconds, Clock::time_point now) {
  Entry& entry = entries_[bucket_of(n_rows)];
  if (now - entry.at > kForgotten) entry.n = 0;
  if (entry.n == 0 || (entry.n < kFirstTimes && seconds < entry.seconds))
    entry.seconds = seconds;
  else if (entry.n >= kFirstTimes)
    approach(entry.seconds, std::min(seconds, 2 * entry.seconds), 0.125);
  ++entry.n;
  entry.at = now;
}

double BatchTimes::of(int n_rows, Clock::time_point now) const {
  const auto is_known = [&](const Entry& entry) {
    return entry.n >= kLeastTimes && now - entry.at <= kForgotten;
  };
  const auto after = entries_.begin() + static_cast<std::ptrdiff_t>(bucket_of(n_rows)) + 1;
  const auto smaller = std::find_if(std::make_reverse_iterator(after), entries_.rend(), is_known);
  if (smaller != entries_.rend()) return smaller->seconds;
  const auto larger = std::find_if(after, entries_.end(), is_known);
  return larger != entries_.end() ? larger->seconds : 0;
}

RequestBatcher::RequestBatcher(const std::vector<bool>& has_experts, int max_rows)
    : n_layers_(has_experts.size()),
      has_one_layer_(std::count(has_experts.begin(), has_experts.end(), true) == 1),
      max_rows_(max_rows) {
  queue_.reserve(kMostPeers);
  choice_.peers.reserve(kMostPeers);
}

void RequestBatcher::joined(int peer) {
  peers_[peer] = {};
  peers_[peer].is_here = true;
  peers_[peer].next_layer.assign(n_layers_, -1);
}

void RequestBatcher::left(int peer) {
  peers_[peer] = {};
  std::erase(queue_, peer);
}

void RequestBatcher::arrived(int peer, int layer, int n_rows, Time now, bool is_exact) {
  Peer& p = peers_[peer];
  p.begins = layer < p.layer || p.layer < 0 || has_one_layer_;
  if (p.layer >= 0) p.next_layer[p.layer] = layer;
  if (p.begins) {
    begin_step(p, now, is_exact);
  } else if (is_exact) {
    measured_gap(p, now);
  }
  p.layer = layer;
  p.n_rows = n_rows;
  p.arrived = now;
  p.is_queued = true;
  ++p.n_requests;
  queue_.push_back(peer);
}

void RequestBatcher::measured_gap(Peer& p, Time now) {
  const double gap = seconds_between(p.answered, now);
  if (now - p.gap_at > kForgotten) p.n_gaps = 0;
  if (p.n_gaps == 0 || (p.n_gaps < kFirstTimes && gap < p.gap)) p.gap = gap;
  if (p.n_gaps == 0) p.gap_deviation = 0;
  approach(p.gap_deviation, std::abs(gap - p.gap), 0.25);
  if (p.n_gaps >= kFirstTimes) approach(p.gap, gap, 0.125);
  ++p.n_gaps;
  p.gap_at = now;
}

// While the worker is busy no gap is measured. One that was disturbed, or that is long ago, must
// not keep backbones apart for ever, so then it is not known, and sharing is tried.
bool RequestBatcher::has_gap(const Peer& p, Time now) {
  return p.n_gaps >= kLeastTimes && now - p.gap_at <= kForgotten;
}

// A pause, such as that of a backbone without sequences, is no step.
void RequestBatcher::begin_step(Peer& p, Time now, bool is_exact) {
  if (p.begun != Time()) {
    const double seconds = seconds_between(p.begun, now);
    if (p.step == 0 || seconds < p.step / kOtherStep) {
      p.step = seconds;
      p.n_steps = 1;
    } else if (seconds > p.step * kOtherStep) {
      p.step = 0;
      p.n_steps = 0;
    } else {
      approach(p.step, seconds, 0.25);
      ++p.n_steps;
      if (is_exact) approach(p.step_gap, seconds_between(p.answered, now), 0.25);
    }
  }
  p.begun = now;
  if (p.n_requests > 0) p.n_requests_of_step = p.n_requests;
  p.n_requests = 0;
}

const RequestBatcher::Choice& RequestBatcher::choose(Time now, bool may_wait) {
  choice_.peers.clear();
  choice_.until = Time::max();
  const auto head = std::find_if(queue_.begin(), queue_.end(), [&](int peer) {
    const Time until = may_wait ? waits_until(peers_[peer], now) : now;
    choice_.until = std::min(choice_.until, until);
    return until <= now;
  });
  if (head == queue_.end()) return choice_;
  const int oldest = *head, layer = peers_[oldest].layer;
  choice_.peers.push_back(oldest);
  n_chosen_rows_ = peers_[oldest].n_rows;
  for (const int peer : queue_) {
    const Peer& p = peers_[peer];
    const int together = n_chosen_rows_ + p.n_rows;
    if (peer == oldest || p.layer != layer || together > max_rows_) continue;
    if (saved(n_chosen_rows_, p.n_rows, now) < kLeastSaving * times_.of(together, now)) continue;
    choice_.peers.push_back(peer);
    n_chosen_rows_ = together;
  }
  for (const int peer : choice_.peers) {
    peers_[peer].is_queued = false;
    std::erase(queue_, peer);
  }
  return choice_;
}

void RequestBatcher::computed(double seconds, Time now) {
  times_.add(n_chosen_rows_, seconds, now);
  for (const int peer : choice_.peers) peers_[peer].answered = now;
}

// Not after `now`: the request does not wait.
Time RequestBatcher::waits_until(const Peer& p, Time now) const {
  Time until = now;
  for (const Peer& q : peers_)
    if (&q != &p && q.is_here) until = std::max(until, awaits_until(p, q, now).value_or(now));
  return until;
}

// Until when the request of p waits for the next one of q; nothing: it does not.
std::optional<Time> RequestBatcher::awaits_until(const Peer& p, const Peer& q, Time now) const {
  if (p.n_rows + q.n_rows > max_rows_) return {};
  if (p.begins) {
    if (q.is_queued && q.begins) return {};
    if (std::min(p.n_steps, q.n_steps) < kLeastSteps ||
        std::max(p.step, q.step) > kMostStepRatio * std::min(p.step, q.step))
      return {};
    const Time limit = p.arrived + duration_of(p.step / 2);
    const Time begin = q.begun + duration_of(q.step);
    if (begin > limit || !pays(p, q, now)) return {};
    return std::min(limit, begin + duration_of(kOverdue * q.step));
  }
  if (q.is_queued || q.layer < 0 || q.next_layer[q.layer] != p.layer) return {};
  const Clock::duration most = duration_of(saved(p.n_rows, q.n_rows, now) / 2);
  const Time limit = p.arrived + most;
  const bool is_known = has_gap(q, now);
  if (q.answered + duration_of(is_known ? q.gap : 0) > limit || !pays(p, q, now)) return {};
  return std::min(limit, q.answered + (is_known ? duration_of(q.gap + 4 * q.gap_deviation) : most));
}

// Whether steps are predicted to be shorter if p and q are at the same layer. A layer then takes
// the gap of the slower one and a batch. Otherwise the worker computes one after another, for all
// active backbones that are not slower.
bool RequestBatcher::pays(const Peer& p, const Peer& q, Time now) const {
  const auto own = [now](const Peer& peer) {  // seconds of a layer in which it has no request here
    return (has_gap(peer, now) ? peer.gap : 0) + peer.step_gap / peer.n_requests_of_step;
  };
  const double slower = std::max(own(p), own(q));
  int n_rows = 0;
  double apart = 0;
  for (const Peer& r : peers_) {
    const bool is_active = r.is_here && r.n_steps >= kLeastSteps &&
                           now - r.begun < duration_of(2 * r.step) && own(r) <= slower;
    if ((&r != &p && &r != &q && !is_active) || n_rows + r.n_rows > max_rows_) continue;
    n_rows += r.n_rows;
    apart += times_.of(r.n_rows, now);
  }
  return slower + times_.of(n_rows, now) < (1 - kLeastGain) * apart;
}

// Seconds that one batch saves.
double RequestBatcher::saved(int n_rows, int n_others, Time now) const {
  return times_.of(n_rows, now) + times_.of(n_others, now) - times_.of(n_rows + n_others, now);
}

}  // namespace tandem
