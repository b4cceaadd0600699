// Implements runtime.h without a GPU. A stream is a CPU thread with a queue, so a missing wait is a
// real race. Device memory is accessible only while a stream works, so a missing copy is a fault.
#include "gpu_kernels/runtime.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "core/check.h"
#include "gpu_kernels/emulated/device.h"
#include "gpu_kernels/emulated/device_memory.h"
#include "gpu_kernels/emulated/loss.h"
#include "gpu_kernels/gpu_facts.h"

namespace tandem::gpu {
namespace {

// Set while this thread records: CUDA then refuses to allocate or to wait for the GPU.
thread_local bool recording = false;

void refuse_in_recordings(const char* what) { check(!recording, what); }

using Work = std::function<void()>;

// Signals once; a stream may wait for it before it is signalled.
struct Flag {
  std::mutex mutex;
  std::condition_variable changed;
  bool set = false;

  void raise() {
    const std::lock_guard lock(mutex);
    set = true;
    changed.notify_all();
  }
  bool is_set() {
    const std::lock_guard lock(mutex);
    return set;
  }
  void wait() {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return set; });
  }
};

}  // namespace

// The number of recorded work items per stream that precede a point.
using Seen = std::map<const Stream::Impl*, size_t>;

struct Graph::Impl {
  std::vector<Work> work;              // in the order of recording, which respects all events
  std::vector<Stream::Impl*> streams;  // streams recording into it, the starting one first
  int n_early = 0;
  bool complete = false;
};

struct Event::Impl {
  std::shared_ptr<Flag> flag;            // set by the last record()
  std::shared_ptr<Graph::Impl> capture;  // set if the last record() was captured
  Seen seen;                             // if captured: work that precedes the event
};

// Delay of copies on a new stream, for tests: work that fails to wait for a copy then runs before
// it.
std::chrono::microseconds copy_delay() {
  const char* microseconds = std::getenv("TANDEM_GPU_COPY_DELAY");
  return std::chrono::microseconds(microseconds ? std::atoll(microseconds) : 0);
}

// CUDA's setting: launches, also of graphs, return after their kernels have ended.
bool blocking_option() {
  const char* set = std::getenv("CUDA_LAUNCH_BLOCKING");
  return set && std::strcmp(set, "0") != 0;
}

// Work items that a new stream's queue holds, for tests: as a driver may, the host then waits until
// the GPU has begun enough of them.
size_t queue_option() {
  const char* items = std::getenv("TANDEM_GPU_QUEUE");
  return items ? static_cast<size_t>(std::atoll(items)) : SIZE_MAX;
}

struct Stream::Impl {
  const size_t queue_size = queue_option();
  const std::chrono::microseconds late_by = copy_delay();
  std::mutex mutex;
  std::condition_variable changed;
  struct Item {
    Work run;
    bool is_flag;  // also runs on a lost GPU, so that waiters continue and find the error
  };
  std::deque<Item> queue;
  bool busy = false, closing = false;
  std::shared_ptr<Graph::Impl> capture;
  Seen seen;                  // while capturing: work that precedes the next item
  bool after_kernel = false;  // the last item is a kernel, and nothing else precedes the next one
  std::thread worker{[this] { serve(); }};

  void enqueue(Work work) {
    emulated::throw_if_lost();
    after_kernel = false;
    if (capture) {
      ++seen[this];
      return capture->work.push_back(std::move(work));
    }
    push({std::move(work), false});
  }
  void enqueue_flag(Work work) {
    emulated::throw_if_lost();
    push({std::move(work), true});
  }
  void push(Item item) {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return queue.size() < queue_size; });
    queue.push_back(std::move(item));
    changed.notify_all();
  }

  void join(std::shared_ptr<Graph::Impl> graph) {
    if (capture == graph) return;
    check(!capture && !graph->complete, "a stream records into one graph at a time");
    graph->streams.push_back(this);
    capture = std::move(graph);
    seen = {{this, 0}};
    after_kernel = false;
  }

  // Checks CUDA's condition for ending a recording: all work of every stream precedes the end.
  void leave(const Seen& before_end) {
    const auto at = before_end.find(this);
    check(at != before_end.end() && at->second == seen[this],
          "a stream that joined a recording has work that the recording does not wait for");
    capture = nullptr;
  }

  void wait() {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return queue.empty() && !busy; });
  }
  void wait_if_blocking() {
    if (!capture && blocking_option()) wait();
  }

  void serve() {
    const emulated::InDriver driver;
    std::unique_lock lock(mutex);
    for (;;) {
      changed.wait(lock, [&] { return closing || !queue.empty(); });
      if (queue.empty()) return;
      busy = true;
      emulated::open_device_memory();
      while (!queue.empty()) {
        const Item item = std::move(queue.front());
        queue.pop_front();
        changed.notify_all();
        lock.unlock();
        if (item.is_flag || !emulated::loss_strikes()) item.run();
        lock.lock();
      }
      emulated::close_device_memory();
      busy = false;
      changed.notify_all();
    }
  }
};

namespace {

// All existing streams.
struct Streams {
  std::mutex mutex;
  std::set<Stream::Impl*> all;
};
Streams& streams() {
  static Streams streams;
  return streams;
}

}  // namespace

namespace {

// Ranks of tests are threads. -1: none.
thread_local int chosen_gpu = 0;

// Emulated GPUs of this machine, for tests.
int n_gpus_option() {
  constexpr int kUsual = 16;
  const char* const n = std::getenv("TANDEM_GPU_COUNT");
  return n ? std::atoi(n) : kUsual;
}

}  // namespace

void choose_gpu(int index) {
  const char* const visible = std::getenv("CUDA_VISIBLE_DEVICES");
  const auto given = visible ? std::optional<std::string>(visible) : std::nullopt;
  const std::string number = only_gpu(given, index);
  chosen_gpu = number.empty() ? -1 : std::atoi(number.c_str());
}

GpuInfo open_gpu() {
  const int64_t memory = memory_option().value_or(int64_t{1} << 30);
  const GpuFacts facts = {
      .driver = 12040,
      .toolkit = 12040,
      .count_error = "",
      .n_gpus = memory > 0 && chosen_gpu >= 0 && chosen_gpu < n_gpus_option() ? 1 : 0,
      .name = "emulated GPU",
      .id = std::to_string(chosen_gpu),
      .major = capability_option() / 10,
      .minor = capability_option() % 10,
      .compiled_for = capability_option()};
  const std::string problem = why_not(facts);
  require(problem.empty(), "{}", problem);
  emulated::plan_loss();
  constexpr int kMultiprocessors = 4, kKilohertz = 1'000'000;
  return {.name = facts.name,
          .id = facts.id,
          .major = facts.major,
          .minor = facts.minor,
          .fp8_mma = has_fp8_mma(facts),
          .n_multiprocessors = kMultiprocessors,
          .datasheet_bf16_ops_per_second =
              datasheet_bf16_ops_per_second(facts, kMultiprocessors, kKilohertz),
          .memory_bytes = memory,
          .free_bytes = memory,
          .ends_long_kernels = watchdog_option(),
          .emulated = true};
}

CudaVersions cuda_versions() { return {}; }

Buffer::Buffer(int64_t bytes, Site site) : bytes_(bytes), site_(site) {
  refuse_in_recordings("memory is allocated in a recording");
  emulated::throw_if_lost();
  if (bytes <= 0) return;
  ++emulated::counts().buffers;
  data_ = emulated::allocate(bytes, site);
}

// Waits for all streams, like cudaFree(): work still queued after an error may use the memory.
Buffer::~Buffer() {
  refuse_in_recordings("memory is freed in a recording");
  if (!data_) return;
  ++emulated::counts().waits;
  {
    const std::lock_guard lock(streams().mutex);
    for (Stream::Impl* stream : streams().all) stream->wait();
  }
  emulated::release(data_, bytes_);
}

Event::Event() : impl_(new Impl) {}
Event::Event(Event&&) noexcept = default;
Event& Event::operator=(Event&&) noexcept = default;
Event::~Event() = default;
void Event::wait() const {
  refuse_in_recordings("an event is waited for in a recording");
  if (impl_->flag && !impl_->flag->is_set()) {
    ++emulated::counts().waits;
    impl_->flag->wait();
  }
  emulated::throw_if_lost();
}

Stream::Stream() : impl_(new Impl) {
  const std::lock_guard lock(streams().mutex);
  streams().all.insert(impl_.get());
}
Stream::~Stream() {
  {
    const std::lock_guard lock(impl_->mutex);
    impl_->closing = true;
    impl_->changed.notify_all();
  }
  impl_->worker.join();
  const std::lock_guard lock(streams().mutex);
  streams().all.erase(impl_.get());
}

// A recorded copy runs at every replay, when ordinary host memory may have changed or been freed.
void Stream::copy(const void* from, int64_t bytes, void* to) {
  const emulated::InDriver driver;
  check(
      !impl_->capture || (emulated::is_allocated(from, bytes) && emulated::is_allocated(to, bytes)),
      "a recorded copy is between device and mapped memory");
  impl_->enqueue([=, late_by = impl_->late_by] {
    if (late_by.count() > 0) std::this_thread::sleep_for(late_by);
    std::memcpy(to, from, static_cast<size_t>(bytes));
  });
}

void Stream::run_on_host(std::function<void()> work) {
  const emulated::InDriver driver;
  impl_->enqueue(std::move(work));
}

void Stream::record(Event& event) {
  const emulated::InDriver driver;
  event.impl().capture = impl_->capture;
  event.impl().seen = impl_->seen;
  if (impl_->capture) return;
  auto flag = event.impl().flag = std::make_shared<Flag>();
  impl_->enqueue_flag([flag] { flag->raise(); });
}

void Stream::wait_for(const Event& event) {
  const emulated::InDriver driver;
  if (event.impl().capture) {
    impl_->join(event.impl().capture);
    for (const auto& [stream, n] : event.impl().seen)
      impl_->seen[stream] = std::max(impl_->seen[stream], n);
    impl_->after_kernel = false;
    return;
  }
  if (!event.impl().flag) return;
  check(!impl_->capture, "a recording waits for an event from outside of it");
  impl_->enqueue_flag([flag = event.impl().flag] { flag->wait(); });
}

void Stream::wait() {
  refuse_in_recordings("a stream is waited for in a recording");
  ++emulated::counts().waits;
  impl_->wait();
  emulated::throw_if_lost();
}

void Stream::throw_if_failed() const {  // other failures abort
  refuse_in_recordings("a stream is asked in a recording");
  emulated::throw_if_lost();
}

Graph Stream::capture(const std::function<void()>& work) {
  auto graph = std::make_shared<Graph::Impl>();
  impl_->join(graph);
  recording = true;
  try {
    work();
  } catch (...) {
    recording = false;
    for (Impl* stream : graph->streams) stream->capture = nullptr;
    throw;
  }
  recording = false;
  graph->complete = true;
  const Seen before_end = impl_->seen;
  for (Impl* stream : graph->streams) stream->leave(before_end);
  return Graph(std::move(graph));
}

int Graph::n_nodes() const { return static_cast<int>(impl_->work.size()); }

int Graph::n_early() const { return impl_->n_early; }

int64_t Graph::bytes() const { return emulated::kGraphNodeBytes * n_nodes(); }

bool Stream::is_recording() const { return impl_->capture != nullptr; }

void* Stream::handle() const { return nullptr; }

void Stream::replay(const Graph& graph) {
  const emulated::InDriver driver;
  refuse_in_recordings("a graph is replayed in a recording");
  for (const Work& work : graph.impl().work) impl_->enqueue(work);
  impl_->wait_if_blocking();
}

namespace emulated {
void enqueue(const Stream& stream, Work work) { stream.impl().enqueue(std::move(work)); }
void enqueue_kernel(const Stream& stream, const LaunchShape& shape, Work work) {
  Stream::Impl& impl = stream.impl();
  const bool early = shape.early && impl.after_kernel && early_launches(capability_option() / 10);
  impl.enqueue(std::move(work));
  if (impl.capture && early) ++impl.capture->n_early;
  impl.after_kernel = true;
  impl.wait_if_blocking();
}
}  // namespace emulated

}  // namespace tandem::gpu
