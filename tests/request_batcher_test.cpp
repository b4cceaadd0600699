// Backbones that share a worker, on simulated time.
#include "offload/workers/request_batcher.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <random>

namespace tandem {
namespace {

constexpr int kStepLayers = 20;
constexpr double kNever = std::numeric_limits<double>::infinity();

Clock::time_point at(double seconds) {
  return Clock::time_point(
      std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(1000 + seconds)));
}

struct SimulatedBackbone {
  double starts = 0;       // seconds
  double gap = 2e-4;       // from an answer to the request of the next layer
  double step_gap = 1e-3;  // from the last layer's answer to the next step
  double jitter = 0;       // largest relative change of both
  double disturbed = 0;    // if not 0: the first gap of all
  int n_rows = 16;
  double pauses = kNever, resumes = kNever;  // it begins no step in between

  // What the simulation has measured.
  std::vector<double> begins = {};       // of steps, when the request arrives
  std::vector<double> begin_waits = {};  // of their requests, until the computation begins
  std::vector<double> waits = {};        // of the other requests
  int n_together = 0, n_requests = 0;

  double step(size_t first, size_t last) const {  // mean seconds
    return (begins.at(last) - begins.at(first)) / static_cast<double>(last - first);
  }
  double last_step() const { return step(begins.size() - 11, begins.size() - 1); }
};

// A worker and its backbones.
class Simulation {
 public:
  Simulation(std::vector<SimulatedBackbone> all, std::function<double(int)> seconds_of_batch,
             bool may_wait = true)
      : backbones(std::move(all)),
        seconds_of_batch_(std::move(seconds_of_batch)),
        may_wait_(may_wait) {
    for (const SimulatedBackbone& b : backbones) {
      batcher_.joined(static_cast<int>(next_.size()));
      next_.push_back({0, b.starts, 0});
    }
  }

  void run(double until) {
    while (now_ < until) {
      for (size_t b = 0; b < backbones.size(); ++b) arrive(b);
      const RequestBatcher::Choice choice = batcher_.choose(at(now_), may_wait_);
      was_busy_until_ = 0;
      if (choice.peers.empty())
        idle_until(choice.until, until);
      else
        compute(choice.peers);
    }
  }
  // Forgets what was measured about requests, not the steps.
  void forget() {
    for (SimulatedBackbone& b : backbones) b.n_together = b.n_requests = 0;
  }
  void leave(int b) {
    batcher_.left(b);
    next_[b].at = kNever;
  }

  std::vector<SimulatedBackbone> backbones;

 private:
  struct Next {
    int layer;
    double at;  // infinity: the request is at the worker
    double arrived;
  };

  void arrive(size_t b) {
    SimulatedBackbone& backbone = backbones[b];
    Next& next = next_[b];
    if (next.layer == 0 && next.at >= backbone.pauses && next.at < backbone.resumes)
      next.at = backbone.resumes;
    if (next.at > now_) return;
    if (next.layer == 0) backbone.begins.push_back(next.at);
    batcher_.arrived(static_cast<int>(b), next.layer, backbone.n_rows, at(now_),
                     next.at >= was_busy_until_);
    next.arrived = next.at;
    next.at = kNever;
  }

  void idle_until(Clock::time_point asked, double end) {
    double next = end;
    for (const Next& n : next_) next = std::min(next, n.at);
    if (asked != Clock::time_point::max())
      next = std::min(next, seconds_between(at(0), asked) + 1e-9);
    now_ = std::max(next, now_);
  }

  void compute(const std::vector<int>& peers) {
    int n_rows = 0;
    for (const int peer : peers) n_rows += backbones[peer].n_rows;
    const double seconds = seconds_of_batch_(n_rows);
    for (const int peer : peers) {
      SimulatedBackbone& b = backbones[peer];
      (next_[peer].layer == 0 ? b.begin_waits : b.waits).push_back(now_ - next_[peer].arrived);
      ++b.n_requests;
      b.n_together += peers.size() > 1;
    }
    now_ += seconds;
    was_busy_until_ = now_;
    batcher_.computed(seconds, at(now_));
    for (const int peer : peers) {
      Next& next = next_[peer];
      const SimulatedBackbone& b = backbones[peer];
      next.layer = (next.layer + 1) % kStepLayers;
      const bool is_first = b.disturbed > 0 && b.waits.empty() && b.begin_waits.size() == 1;
      const double gap = is_first ? b.disturbed : next.layer == 0 ? b.step_gap : b.gap;
      next.at =
          now_ + gap * (1 + b.jitter * std::uniform_real_distribution<double>(-1, 1)(random_));
    }
  }

  const std::function<double(int)> seconds_of_batch_;
  const bool may_wait_;
  RequestBatcher batcher_{std::vector<bool>(kStepLayers, true), 512};
  std::vector<Next> next_;
  std::mt19937 random_{1};
  double now_ = 0, was_busy_until_ = 0;
};

// Weights dominate: 1 ms, and 10 us a row.
double of_weights(int n_rows) { return 1e-3 + 1e-5 * n_rows; }
// Rows use experts of their own.
double of_rows(int n_rows) { return 1e-4 * n_rows; }

double share_together(const SimulatedBackbone& b) {
  return static_cast<double>(b.n_together) / b.n_requests;
}

TEST(RequestBatcher, LetsOneBackboneNeverWait) {
  Simulation alone({{}}, of_weights);
  alone.run(5);
  const SimulatedBackbone& b = alone.backbones[0];
  EXPECT_GT(b.begins.size(), 100);
  EXPECT_EQ(*std::max_element(b.begin_waits.begin(), b.begin_waits.end()), 0);
  EXPECT_EQ(*std::max_element(b.waits.begin(), b.waits.end()), 0);
}

// Whatever the time between their first steps.
TEST(RequestBatcher, AlignsBackbonesWithinAFewSteps) {
  for (const int n : {2, 3, 4})
    for (int phase = 0; phase < 20; ++phase) {
      SCOPED_TRACE(testing::Message() << n << " backbones, phase " << phase);
      std::vector<SimulatedBackbone> all(n);
      for (int b = 0; b < n; ++b) all[b].starts = b * phase * 3e-3;
      Simulation apart(all, of_weights, false), aligned(all, of_weights);
      apart.run(3);
      aligned.run(1.0);
      aligned.forget();
      aligned.run(3);
      for (int b = 0; b < n; ++b) {
        EXPECT_GT(share_together(aligned.backbones[b]), 0.98);
        EXPECT_NEAR(aligned.backbones[b].last_step(),
                    kStepLayers * (of_weights(16 * n) + 2e-4) + 1e-3 - 2e-4, 5e-4);
      }
      if (phase != 7) continue;
      EXPECT_GT(apart.backbones[0].last_step(), 1.4 * aligned.backbones[0].last_step());
    }
}

TEST(RequestBatcher, KeepsBackbonesTogetherWhoseTimesVary) {
  for (const double jitter : {0.1, 0.3, 0.5}) {
    std::vector<SimulatedBackbone> all = {{.jitter = jitter}, {.starts = 0.01, .jitter = jitter}};
    Simulation s(all, of_weights);
    s.run(2);
    s.forget();
    s.run(10);
    for (const SimulatedBackbone& b : s.backbones) EXPECT_GT(share_together(b), 0.9) << jitter;
  }
}

// While others compute, the worker is busy and cannot measure the gaps again.
TEST(RequestBatcher, ForgetsAGapThatWasDisturbed) {
  Simulation s({{.disturbed = 0.03}, {.starts = 0.032}}, of_weights);
  s.run(1);
  s.forget();
  s.run(3);
  for (const SimulatedBackbone& b : s.backbones) EXPECT_GT(share_together(b), 0.98);
}

// Where a batch takes as long as its requests alone, or the worker is idle for most of the time,
// no request waits.
TEST(RequestBatcher, DoesNotWaitWhereThatDoesNotPay) {
  const auto expect_no_waits = [](std::vector<SimulatedBackbone> all, double (*seconds)(int)) {
    all[1].starts = 0.012;
    Simulation apart(all, seconds, false), s(all, seconds);
    apart.run(20);
    s.run(20);
    for (size_t b = 0; b < all.size(); ++b) {
      const SimulatedBackbone &got = s.backbones[b], &want = apart.backbones[b];
      EXPECT_GT(got.begins.size(), 0.97 * want.begins.size());
    }
  };
  expect_no_waits({{}, {}}, of_rows);
  expect_no_waits({{.gap = 4e-3}, {.gap = 4e-3}}, of_weights);
}

// One that ends costs the others at most half a step, once.
TEST(RequestBatcher, WaitsOnceForABackboneThatHasGone) {
  for (const bool is_noticed : {false, true}) {
    Simulation s({{}, {.starts = 0.013}}, of_weights);
    s.run(1);
    if (is_noticed)
      s.leave(1);
    else
      s.backbones[1].pauses = 1;
    const SimulatedBackbone& b = s.backbones[0];
    const auto last = static_cast<std::ptrdiff_t>(b.begin_waits.size());
    s.run(1.1);
    const auto first = static_cast<std::ptrdiff_t>(b.begin_waits.size());
    s.run(5);
    ASSERT_GT(std::ssize(b.begin_waits), first + 100);
    const auto longest = [&](std::ptrdiff_t from, std::ptrdiff_t to) {
      return *std::max_element(b.begin_waits.begin() + from, b.begin_waits.begin() + to);
    };
    EXPECT_LT(longest(last, first), b.last_step() / 2);
    EXPECT_EQ(longest(first - 1, std::ssize(b.begin_waits)), 0);
    EXPECT_NEAR(b.last_step(), kStepLayers * (of_weights(16) + 2e-4) + 8e-4, 1e-4);
  }
}

// A backbone that begins and pauses as it likes, and a slow one, change the steps of the others by
// a few percent.
TEST(RequestBatcher, IsNotHeldUpByIrregularBackbones) {
  std::vector<SimulatedBackbone> all = {{.jitter = 0.1},
                                        {.starts = 0.01, .gap = 8e-3, .step_gap = 0.1}};
  Simulation apart(all, of_weights, false), s(all, of_weights);
  apart.run(20);
  s.run(20);
  EXPECT_GT(s.backbones[0].begins.size(), 0.98 * apart.backbones[0].begins.size());
  EXPECT_GT(s.backbones[1].begins.size(), 0.98 * apart.backbones[1].begins.size());

  Simulation pausing({{.jitter = 0.1}, {.starts = 0.01}}, of_weights);
  Simulation pausing_apart(pausing.backbones, of_weights, false);
  std::mt19937 random(3);
  double t = 0;
  while (t < 20) {
    const double pause = t + 0.1 + 0.001 * (random() % 300),
                 resume = pause + 0.001 * (random() % 200);
    for (Simulation* const one : {&pausing, &pausing_apart}) {
      one->backbones[1].pauses = pause;
      one->backbones[1].resumes = resume;
      one->run(resume);
    }
    t = resume;
  }
  EXPECT_GT(pausing.backbones[0].begins.size(), pausing_apart.backbones[0].begins.size());
}

// Backbones of all kinds. How long a request waits is bounded. All together compute as many tokens
// as without waiting, but for a few percent, and no backbone much fewer.
TEST(RequestBatcher, BoundsEveryWait) {
  std::mt19937 random(7);
  const auto uniform = [&](double low, double high) {
    return std::uniform_real_distribution<double>(low, high)(random);
  };
  for (int round = 0; round < 300; ++round) {
    const int n = 2 + static_cast<int>(random() % 4);
    const double weights = uniform(0, 2e-3), row = uniform(1e-6, 1e-4);
    const auto seconds = [&](int n_rows) { return weights + row * n_rows; };
    const bool are_alike = random() % 2 == 0;
    std::vector<SimulatedBackbone> all;
    for (int b = 0; b < n; ++b) {
      SimulatedBackbone one = {.starts = uniform(0, 0.1),
                               .gap = uniform(1e-4, 3e-3),
                               .step_gap = uniform(1e-4, 2e-2),
                               .jitter = uniform(0, 0.5),
                               .n_rows = 1 + static_cast<int>(random() % 40)};
      if (random() % 4 == 0) {
        one.pauses = uniform(1, 8);
        one.resumes = one.pauses + uniform(0, 5);
      }
      if (b > 0 && are_alike) {
        one.gap = all[0].gap;
        one.step_gap = all[0].step_gap;
        one.n_rows = all[0].n_rows;
      }
      all.push_back(one);
    }
    Simulation apart(all, seconds, false), s(all, seconds);
    apart.run(10);
    s.run(10);
    double sum = 0, sum_apart = 0;
    for (int b = 0; b < n; ++b) {
      const SimulatedBackbone &got = s.backbones[b], &want = apart.backbones[b];
      sum += static_cast<double>(got.begins.size()) * got.n_rows;
      sum_apart += static_cast<double>(want.begins.size()) * want.n_rows;
      EXPECT_GT(got.begins.size(), 0.85 * want.begins.size()) << "round " << round << " " << b;
      double longest_step = 0;
      for (size_t i = 1; i < got.begins.size(); ++i)
        longest_step = std::max(longest_step, got.begins[i] - got.begins[i - 1]);
      // Half a step, or half of what is saved; then every other backbone once, and a batch that was
      // being computed.
      const double queue = (n + 1) * seconds(40 * n);
      EXPECT_LE(*std::max_element(got.begin_waits.begin(), got.begin_waits.end()),
                longest_step / 2 + queue);
      EXPECT_LE(*std::max_element(got.waits.begin(), got.waits.end()), seconds(40) / 2 + queue);
    }
    EXPECT_GT(sum, 0.93 * sum_apart) << "round " << round;
  }
}

}  // namespace
}  // namespace tandem
