// A GPU, real or emulated, as a Device: all work is enqueued on one stream, and decode steps are
// recorded as graphs.
#pragma once
#include <map>

#include "gpu_kernels/runtime.h"
#include "ops/device.h"

namespace tandem {

class CudaDevice final : public Device {
 public:
  // The stream outlives the object. With `records`, decode steps are recorded as graphs.
  CudaDevice(gpu::Stream& stream, bool records) : stream_(stream), records_(records) {}

  Buffer allocate(int64_t bytes) override;
  Buffer allocate_on_host(int64_t bytes) override;
  void copy(const void* from, int64_t bytes, void* to) override { stream_.copy(from, bytes, to); }
  void to_host(TensorView x, TensorView out) override;
  void wait() override { stream_.wait(); }
  bool run_recorded(const RecordKey& key, const std::function<void()>& enqueue) override;
  std::unique_ptr<DeviceSampler> make_sampler(std::span<const uint32_t> allowed, int n_tokens,
                                              int max_rows) override;

  int n_recorded() const { return static_cast<int>(recorded_.size()); }
  // Nodes of the graph that the last run_recorded() replayed; 0: it replayed none.
  int n_nodes_of_last_step() const { return n_nodes_of_last_step_; }

 private:
  // The kernels of larger steps take longer than their launches, so recording would gain nothing.
  static constexpr int kMaxRecordedTokens = 32;
  static constexpr size_t kMaxRecorded = 256;  // graphs; another one replaces the oldest use
  struct Recorded {
    gpu::Graph graph;
    int64_t last_use;  // in replays
  };

  gpu::Stream& stream_;
  const bool records_;
  std::map<RecordKey, Recorded> recorded_;
  int64_t n_replays_ = 0;
  int n_nodes_of_last_step_ = 0;
};

}  // namespace tandem
