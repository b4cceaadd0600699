// A load of experts on a thread of its own, beside steps that use the model.
#pragma once
#include <atomic>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

#include "io/load_jobs.h"
#include "offload/workers/expert_loader.h"

namespace tandem {

// Make it the last member: the load uses the others.
class BackgroundLoad {
 public:
  ~BackgroundLoad();  // gives up a load under way

  // Runs `load`, which passes on the progress that it is given. Only when idle.
  void begin(std::function<void(const LoadProgress&)> load);
  ExpertLoader::Progress progress() const;  // thread-safe
  // The load has ended, and none is under way from now on. Returns what it threw; empty: nothing.
  std::string end();

 private:
  std::string failure_;  // of the thread, until the state is kEnded
  std::atomic<bool> gives_up_{false};
  mutable std::mutex mutex_;  // guards the progress
  ExpertLoader::Progress progress_;
  std::thread thread_;
};

}  // namespace tandem
