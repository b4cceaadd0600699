// The engine's interface to one GPU: memory, ordered work, graphs. Two implementations are selected
// at link time: cuda/runtime.cpp and emulated/runtime.cpp. Kernels are launched with launch() of
// device.h.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "gpu_kernels/launch_shape.h"

namespace tandem::gpu {

struct GpuInfo {
  std::string name;
  std::string id;            // tells it from others, also from those that other processes use
  int major = 0, minor = 0;  // compute capability
  bool fp8_mma = false;      // whether both the tensor cores and the program's kernels support FP8
  int n_multiprocessors = 0;
  double bytes_per_second = 0;               // of its memory, by clock and width; 0: not known
  double datasheet_bf16_ops_per_second = 0;  // dense, with float sums; 0: not known
  int64_t memory_bytes = 0, free_bytes = 0;
  // The GPU has a display, and the driver ends kernels that run for more than some seconds.
  bool ends_long_kernels = false;
  bool emulated = false;
};

// From now on the process can use one GPU only: number `index`, from 0, of those that it could use
// before (CUDA_VISIBLE_DEVICES), or none if they are fewer; the only one of a list of one. Called
// before all other functions.
void choose_gpu(int index);

// Selects the GPU that this process uses from now on. Throws Error if there is none: no driver, a
// driver older than the toolkit, no GPU, or one older than compute capability 8.0.
GpuInfo open_gpu();

// kMapped is pinned host memory that the GPU reads and writes at the same address.
enum class Site : uint8_t { kDevice, kMapped };

// Filled with 0xff (NaN in every float format) so that reads before writes are noticed. Throws
// Error when memory is exhausted.
class Buffer {
 public:
  Buffer() = default;
  Buffer(int64_t bytes, Site site);
  Buffer(Buffer&& other) noexcept { *this = std::move(other); }
  Buffer& operator=(Buffer&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    std::swap(site_, other.site_);
    return *this;
  }
  ~Buffer();

  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }
  int64_t bytes() const { return bytes_; }

 private:
  void* data_ = nullptr;
  int64_t bytes_ = 0;
  Site site_ = Site::kDevice;
};

class Event {
 public:
  Event();
  Event(Event&&) noexcept;
  Event& operator=(Event&&) noexcept;
  ~Event();
  // Waits until the work before the last record() is done; returns at once if there was none.
  void wait() const;
  struct Impl;
  Impl& impl() const { return *impl_; }

 private:
  std::unique_ptr<Impl> impl_;
};

// A recorded sequence of work. Arguments are those of the recording; values that vary between
// replays (lengths, step numbers) are in memory.
class Graph {
 public:
  struct Impl;
  explicit Graph(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}
  int n_nodes() const;  // number of recorded kernels, copies and other operations
  // Recorded kernels that may start before the kernel before them has ended.
  int n_early() const;
  // GPU memory that the recording took, measured when it was made; 0 if others freed as much.
  int64_t bytes() const;
  Impl& impl() const { return *impl_; }

 private:
  std::shared_ptr<Impl> impl_;
};

// All functions except wait() return at once; work on one stream runs in order.
class Stream {
 public:
  Stream();
  ~Stream();

  void copy(const void* from, int64_t bytes, void* to);  // between any two sites
  void run_on_host(std::function<void()> work);
  void record(Event& event);
  void wait_for(
      const Event& event);  // the event's work may be unfinished: the stream waits, not the caller
  void wait();
  // Throws Error if work of this stream has failed, for example because the GPU was lost.
  void throw_if_failed() const;

  // Records what `work` enqueues on this stream and on streams that wait for its events.
  Graph capture(const std::function<void()>& work);
  void replay(const Graph& graph);
  bool is_recording() const;
  // The driver's stream, for libraries that enqueue their own work; null if emulated.
  void* handle() const;

  struct Impl;
  Impl& impl() const { return *impl_; }

 private:
  std::unique_ptr<Impl> impl_;
};

}  // namespace tandem::gpu
