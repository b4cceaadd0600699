// Decides which requests of an expert worker's backbones are computed together, and which of them
// wait for others. Pure: the time is passed in. One backbone alone never waits.
#pragma once
#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "core/clock.h"

namespace tandem {

// Measured seconds of a layer's batch, by its number of rows.
class BatchTimes {
 public:
  void add(int n_rows, double seconds, Clock::time_point now);
  // The time of such a batch if some were measured, the last one within 10 s. Otherwise that of the
  // next smaller one, or of the next larger one: a size that was not tried appears to cost nothing
  // more, so it is tried. 0: nothing is known.
  double of(int n_rows, Clock::time_point now) const;

 private:
  struct Entry {
    int64_t n = 0;  // measurements
    double seconds = 0;
    Clock::time_point at{};
  };
  std::array<Entry, 64> entries_{};  // four for each power of two
};

// Backbones have requests for one layer after another; a step is a pass from the first layer to the
// last one. Requests of the same layer are one batch where this saves time by the measured
// BatchTimes. Two backbones that decode steadily are at different layers and would never meet, so
// * the request that begins a step waits until another backbone begins its next step, if that is
//   predicted within half a step. In later steps both begin at almost the same time.
// * a request of a later layer waits for a backbone whose next request is for the same layer, for
//   at most half of the time that one batch saves.
// Neither wait is made unless a step is then predicted to be shorter. A wait ends at a time that is
// predicted from the last step of the other backbone, so one that is idle, slow or gone delays the
// others once, and is not awaited before it has begun another step.
class RequestBatcher {
 public:
  using Time = Clock::time_point;
  static constexpr int kMostPeers = 64;

  // has_experts: [layers]; a batch has at most max_rows rows.
  RequestBatcher(const std::vector<bool>& has_experts, int max_rows);

  // Backbones are numbers below kMostPeers; each has one request at a time.
  void joined(int peer);
  void left(int peer);
  // `is_exact`: the request has come just now, not at an unknown time of the batch before.
  void arrived(int peer, int layer, int n_rows, Time now, bool is_exact);

  struct Choice {
    std::vector<int> peers;  // whose requests are the next batch; empty: none is to be computed now
    Time until;  // where peers is empty: when to ask again, unless a request arrives earlier
  };
  // Takes the requests of the next batch from the queue: the oldest one that does not wait, and
  // those of its layer that save time with it. Without `may_wait` none waits.
  const Choice& choose(Time now, bool may_wait);
  // The requests of the last choice were computed in this time, and are answered now.
  void computed(double seconds, Time now);

  bool has_requests() const { return !queue_.empty(); }

 private:
  struct Peer {
    bool is_here = false, is_queued = false;
    int layer = -1, n_rows = 0;  // of the last request
    bool begins = false;         // whether it begins a step
    Time arrived{}, answered{};

    Time begun{};                       // the last step
    double step = 0;                    // seconds from one beginning to the next; 0: not known
    int n_steps = 0;                    // that `step` was measured over
    double gap = 0, gap_deviation = 0;  // seconds from an answer to the next layer
    int n_gaps = 0;                     // that were measured
    Time gap_at{};                      // the last one
    double step_gap = 0;                // seconds from a step's last answer to the next step
    int n_requests = 0, n_requests_of_step = 1;  // of this step, and of the last one
    std::vector<int> next_layer;  // [layers] that was requested after it; -1: not known
  };

  static void measured_gap(Peer& peer, Time now);
  static bool has_gap(const Peer& peer, Time now);
  static void begin_step(Peer& peer, Time now, bool is_exact);
  Time waits_until(const Peer& peer, Time now) const;
  std::optional<Time> awaits_until(const Peer& peer, const Peer& other, Time now) const;
  bool pays(const Peer& peer, const Peer& other, Time now) const;
  double saved(int n_rows, int n_others, Time now) const;

  const size_t n_layers_;
  const bool has_one_layer_;
  const int max_rows_;
  std::array<Peer, kMostPeers> peers_;
  std::vector<int> queue_;  // with a request, the oldest first
  BatchTimes times_;
  int n_chosen_rows_ = 0;
  Choice choice_;
};

}  // namespace tandem
