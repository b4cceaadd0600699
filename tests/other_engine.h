// A prefill server without connections: another engine of this process computes keys of prompts.
#pragma once
#include <atomic>
#include <mutex>
#include <vector>

#include "engine/engine.h"

namespace tandem::test {

// Fetches pages from an engine of this process, which outlives the calls of receivers.
class OtherEngine : public PrefixSource {
 public:
  explicit OtherEngine(Engine& engine) : engine_(engine) {}

  bool pays(int64_t n_tokens) const override { return n_tokens >= least; }
  void fetch(uint64_t id, std::vector<int32_t> tokens, int first_page, Receiver receiver) override {
    ++n_fetches;
    ids.push_back(id);
    n_wanted += static_cast<int>(tokens.size()) - 1 - first_page * kPageSize;
    if (silent) {
      receivers.push_back(std::move(receiver));
      return;
    }
    EngineRequest request;
    request.request.prompt = std::move(tokens);
    request.request.max_new_tokens = 1;
    request.first_page = first_page;
    request.on_page = [this, receiver](int index, BlockPool::Block keys) {
      if (n_pages++ >= most_pages) return;
      if (cuts_pages) keys = BlockPool(keys.span().size() - 1, 0).take();
      const std::lock_guard lock(calling_);
      if (!stopped_) receiver.page(index, std::move(keys));
    };
    request.on_event = [this, receiver](const TokenEvent& event) {
      const std::lock_guard lock(calling_);
      if (event.finish && !stopped_) receiver.ended();
      return true;
    };
    engine_.submit(std::move(request));
  }
  void cancel(uint64_t) override { ++n_cancelled; }
  void stop() override {
    const std::lock_guard lock(calling_);
    stopped_ = true;
  }

  int64_t least = kPageSize;
  int most_pages = 1 << 30;
  bool cuts_pages = false, silent = false;
  std::atomic<int> n_fetches = 0, n_pages = 0, n_wanted = 0, n_cancelled = 0;
  std::vector<uint64_t> ids;
  std::vector<Receiver> receivers;  // of fetches that do not begin

 private:
  Engine& engine_;
  std::mutex calling_;  // a receiver
  bool stopped_ = false;
};

}  // namespace tandem::test
