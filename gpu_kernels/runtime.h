// The engine's view of one GPU: memory, ordered work, graphs. Two implementations, chosen when
// linking: cuda/runtime.cpp and emulated/runtime.cpp. Kernels are launched with launch() of
// device.h.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>

namespace tandem::gpu {

struct Card {
  std::string name;
  int major = 0, minor = 0;  // compute capability
  bool fp8_mma = false;      // its tensor cores take FP8, and so does what the program has for it
  int n_multiprocessors = 0;
  int64_t memory_bytes = 0, free_bytes = 0;
  bool emulated = false;
};

// The card that this process uses from now on. Throws Error when there is none: no driver, one that
// is older than the toolkit, no card, one that is older than compute capability 8.0.
Card open_card();

// kMapped is pinned host memory that the GPU reads and writes at the same address.
enum class Site : uint8_t { kDevice, kMapped };

// Filled with 0xff (NaN in every float format) so that reading before writing shows. Throws Error
// when memory is too little.
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

// Blocks that CUDA allows along y and along z; along x it allows 2^31 - 1.
constexpr int kMaxGridYz = 65535;
struct LaunchShape {
  int grid_x = 1, grid_y = 1, grid_z = 1;
  int threads = 128;         // a block
  int64_t shared_bytes = 0;  // dynamic shared memory of a block
  bool co_resident = false;  // all blocks run at the same time, so they may wait for each other
};

class Event {
 public:
  Event();
  Event(Event&&) noexcept;
  Event& operator=(Event&&) noexcept;
  ~Event();
  // Until the work before the last record() is done; at once if there was none.
  void wait() const;
  struct Impl;
  Impl& impl() const { return *impl_; }

 private:
  std::unique_ptr<Impl> impl_;
};

// A recorded sequence of work. Arguments are those of the recording; what varies between replays
// (lengths, step numbers) lives in memory.
class Graph {
 public:
  struct Impl;
  explicit Graph(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}
  int n_nodes() const;  // kernels, copies and whatever else was recorded
  Impl& impl() const { return *impl_; }

 private:
  std::shared_ptr<Impl> impl_;
};

// Everything but wait() returns at once; work on one stream runs in order.
class Stream {
 public:
  Stream();
  ~Stream();

  void copy(const void* from, int64_t bytes, void* to);  // between any two sites
  void run_on_host(std::function<void()> work);
  void record(Event& event);
  void wait_for(
      const Event& event);  // may precede the event's work: the stream waits, not the caller
  void wait();
  // Throws Error if work of this stream has failed, as on a card that was lost.
  void throw_if_failed() const;

  // Records what `work` enqueues, here and on streams that wait for events of this one.
  Graph capture(const std::function<void()>& work);
  void replay(const Graph& graph);
  bool is_recording() const;
  // The driver's, for a library that enqueues work of its own; null: emulated.
  void* handle() const;

  struct Impl;
  Impl& impl() const { return *impl_; }

 private:
  std::unique_ptr<Impl> impl_;
};

}  // namespace tandem::gpu
