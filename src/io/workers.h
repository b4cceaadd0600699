// Runs items on threads that live for one call, with progress reports and a stop on the first
// exception. Used to load and to write a model's files.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>

namespace tandem {

class Workers {
 public:
  // Called on the thread of run(), about ten times a second and once at the end.
  using Report = std::function<void(double seconds)>;

  // Calls work(item, worker) once for every item in [0, n_items), worker in [0, n_workers), items
  // in ascending order, and returns when all are done. The first exception of `work` or `report`
  // stops the rest and is rethrown. May be called once per object.
  void run(int n_workers, int64_t n_items, const std::function<void(int64_t, int)>& work,
           const Report& report);

  // Whether run() is stopping after an exception; long work should check it and return early.
  bool stopped() const { return stopped_; }

 private:
  void serve(int worker, int64_t n_items, const std::function<void(int64_t, int)>& work);
  void stop(std::exception_ptr error);

  std::atomic<int64_t> next_ = 0;
  std::atomic<bool> stopped_ = false;
  std::mutex mutex_;
  std::condition_variable idle_;
  int n_running_ = 0;
  std::exception_ptr error_;
};

}  // namespace tandem
