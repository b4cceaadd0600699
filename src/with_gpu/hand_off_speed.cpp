#include <immintrin.h>

#include <algorithm>
#include <atomic>
#include <thread>

#include "bench/gpu/gpu_benches.h"
#include "bench/machine/machine_speed.h"
#include "core/run_error.h"
#include "gpu_kernels/exchange/signals.h"
#include "gpu_kernels/kernels.h"
#include "gpu_kernels/stream_flags.h"

namespace tandem {
namespace {

constexpr int kRounds = 32;                  // hand-offs per step
constexpr int kPollsBetweenLooks = 1 << 12;  // between checks for GPU failure, about 100 us
constexpr int kMinSteps = 5;

// Both sides of a hand-off. A step has kRounds of them, in order.
class HandOff {
 public:
  virtual ~HandOff() = default;
  virtual void enqueue(gpu::Stream& stream, int round) = 0;  // hand-off to the host and back
  virtual bool take(int round) = 0;                          // host: true once it has arrived
  virtual void give_back(int round) = 0;                     // called by the host
};

class BySignals final : public HandOff {
 public:
  void enqueue(gpu::Stream& stream, int) override {
    down_.raise(stream);
    up_.await(stream);
  }
  bool take(int) override { return down_.take(); }
  void give_back(int) override { up_.raise(); }

 private:
  gpu::SignalToHost down_;
  gpu::SignalToStream up_;
};

class ByFlags final : public HandOff {
 public:
  ByFlags() { std::fill_n(words_.as<uint32_t>(), 2 * kRounds * kApart, 0u); }
  void enqueue(gpu::Stream& stream, int round) override {
    gpu::raise_flag(stream, down(round));
    gpu::take_flag(stream, up(round));
  }
  bool take(int round) override {
    const std::atomic_ref flag(*down(round));
    if (flag.load(std::memory_order_acquire) == 0) return false;
    flag.store(0, std::memory_order_relaxed);
    return true;
  }
  void give_back(int round) override {
    std::atomic_ref(*up(round)).store(1, std::memory_order_release);
  }

 private:
  static constexpr int kApart = 16;  // distance in words: one cache line
  uint32_t* down(int round) const { return words_.as<uint32_t>() + 2 * round * kApart; }
  uint32_t* up(int round) const { return down(round) + kApart; }

  const gpu::Buffer words_{2 * kRounds * kApart * 4, gpu::Site::kMapped};
};

class HandOffClock {
 public:
  explicit HandOffClock(double seconds) : seconds_(seconds) { gpu::open_gpu(); }

  std::string why_no_hand_off() { return gpu::why_no_hand_off(stream_); }

  HandOffs::Way way(HandOff& by, const std::string& why_not) {
    HandOffs::Way way = {{}, {}, why_not};
    if (!why_not.empty()) return way;
    const auto of_round = [&](const auto& seconds_of_step) -> std::optional<double> {
      try {
        return (seconds_of_step(&by) - seconds_of_step(nullptr)) / kRounds;
      } catch (const RunError& e) {
        stream_.throw_if_failed();
        if (way.why_not.empty()) way.why_not = e.what();
        return {};
      }
    };
    way.recorded = of_round([&](HandOff* hand_off) {
      const gpu::Graph graph = stream_.capture([&] { enqueue(hand_off); });
      return median_seconds_of_step([&] { stream_.replay(graph); }, hand_off);
    });
    way.enqueued = of_round([&](HandOff* hand_off) {
      return median_seconds_of_step([&] { enqueue(hand_off); }, hand_off);
    });
    return way;
  }

 private:
  void enqueue(HandOff* hand_off) {
    constexpr int kNumbers = 32;
    for (int round = 0; round < kRounds; ++round) {
      gpu::clear(stream_, {{work_.as<float>(), kNumbers}, {}, 1, kNumbers});
      if (hand_off) hand_off->enqueue(stream_, round);
    }
  }

  double median_seconds_of_step(const auto& start, HandOff* hand_off) {
    std::vector<double> times;
    double spent = 0;
    for (int step = -1; step < kMinSteps || spent < seconds_; ++step) {
      const double time = seconds_of([&] {
        start();
        for (int round = 0; hand_off && round < kRounds; ++round) {
          for (int64_t polls = 1; !hand_off->take(round); ++polls) {
            _mm_pause();
            if (polls % kPollsBetweenLooks != 0) continue;
            std::this_thread::yield();
            stream_.throw_if_failed();
          }
          hand_off->give_back(round);
        }
        stream_.wait();
      });
      if (step < 0) continue;  // the first step loads kernels
      times.push_back(time);
      spent += time;
    }
    return median(times);
  }

  const double seconds_;
  gpu::Stream stream_;
  const gpu::Buffer work_{128, gpu::Site::kDevice};
};

}  // namespace

HandOffs measured_hand_offs(double seconds) {
  HandOffClock clock(seconds);
  BySignals signals;
  ByFlags flags;
  const std::string why_not = clock.why_no_hand_off();
  return {.kernels = clock.way(signals, why_not),
          .memory_operations =
              clock.way(flags, why_not.empty() ? gpu::why_no_stream_flags() : why_not)};
}

}  // namespace tandem
