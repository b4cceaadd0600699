// Launches graphs from a thread of its own. A launch may wait for room in the driver's queue until
// kernels of the same graph have ended, and these may wait for the thread that would launch.
#pragma once
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>

#include "gpu_kernels/runtime.h"

namespace tandem::gpu {

class LaunchThread {
 public:
  // The stream outlives the object.
  explicit LaunchThread(Stream& stream);
  ~LaunchThread();

  // Starts the launch and returns. Until wait() has returned, the graph must live and the stream
  // must not be used, but for throw_if_failed().
  void launch(const Graph& graph);
  // Returns when the graph has been launched. Throws what the launch has thrown.
  void wait();

 private:
  void serve();

  Stream& stream_;
  std::mutex mutex_;
  std::condition_variable changed_;
  const Graph* graph_ = nullptr;  // to be launched; null: none
  std::exception_ptr failure_;
  bool closing_ = false;
  std::thread thread_;
};

}  // namespace tandem::gpu
