// A GPU, real or emulated, as a Device: all work is enqueued on one stream, and decode steps are
// recorded as graphs.
#pragma once
#include <limits>
#include <map>

#include "core/background_thread.h"
#include "gpu_kernels/exchange/collectives.h"
#include "ops/device.h"

namespace tandem {

class CudaDevice final : public Device {
 public:
  // Device memory that CUDA itself and the program's kernels take, and that recordings may take;
  // gpu_model.cpp reserves it.
  static constexpr int64_t kContextBytes = 100 << 20;
  static constexpr int64_t kRecordedBytes = 200 << 20;
  // For ranks, which must forget the same recordings: only their number is limited.
  static constexpr int64_t kAnyBytes = std::numeric_limits<int64_t>::max();

  // The stream outlives the object. With `records`, decode steps are recorded as graphs, of which
  // those used last are kept.
  CudaDevice(gpu::Stream& stream, bool records, int64_t recorded_bytes = kRecordedBytes)
      : stream_(stream), records_(records), max_recorded_bytes_(recorded_bytes) {}

  // For steps in which the GPU waits for the CPU: recordings are launched beside the CPU's part, by
  // a thread of their own. A launch may wait for room in the driver's queue until kernels of the
  // same graph have ended, and these may wait for the thread that would launch.
  void launch_beside_follow() { launcher_ = std::make_unique<BackgroundThread>(); }
  // Every step is launched kernel by kernel: for GPUs that must not wait for the CPU, and for steps
  // of which the host learns the sizes.
  void record_nothing() { records_ = false; }

  // The GPUs of these ranks compute together. The object must outlive this one.
  void use(gpu::Collectives& ranks) { ranks_ = &ranks; }

  Buffer allocate(int64_t bytes) override;
  Buffer allocate_on_host(int64_t bytes) override;
  void copy(const void* from, int64_t bytes, void* to) override { stream_.copy(from, bytes, to); }
  void to_host(TensorView x, TensorView out) override;
  void wait() override;
  bool run_recorded(const RecordKey& key, const std::function<void()>& enqueue,
                    const std::function<void()>& follow) override;
  std::unique_ptr<DeviceSampler> make_sampler(std::span<const uint32_t> allowed, int n_tokens,
                                              int max_rows) override;

  int n_recorded() const { return static_cast<int>(recorded_.size()); }
  // Nodes of the graph that the last run_recorded() replayed, and those that may start before the
  // one before has ended (gpu::Graph); 0: it replayed none.
  int n_nodes_of_last_step() const { return n_nodes_of_last_step_; }
  int n_early_of_last_step() const { return n_early_of_last_step_; }

 private:
  static constexpr size_t kMaxRecorded = 256;
  struct Recorded {
    gpu::Graph graph;
    int64_t last_use;  // in replays
  };

  void drop_oldest();

  gpu::Stream& stream_;
  bool records_;
  const int64_t max_recorded_bytes_;
  std::map<RecordKey, Recorded> recorded_;
  int64_t recorded_bytes_ = 0;
  std::unique_ptr<BackgroundThread> launcher_;  // null: this thread launches
  gpu::Collectives* ranks_ = nullptr;           // null: no other ranks
  int64_t n_replays_ = 0;
  int n_nodes_of_last_step_ = 0, n_early_of_last_step_ = 0;
};

}  // namespace tandem
