// Another server computes the keys of prompts: pages of the KV cache that arrive while this engine
// computes the steps of other requests. Arrived pages are pages of the prefix cache, so whatever is
// missing is computed here, and no answer depends on it.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "core/block_pool.h"

namespace tandem {

// A server that keys come from.
struct PrefixServerStatus {
  std::string address;
  bool is_up;
  int64_t n_fetches;         // prompts that it was asked for
  int64_t n_failures;        // how often it was lost without having said goodbye
  int64_t n_pages;           // that came
  int64_t n_pending_tokens;  // of prompts whose keys have not come yet
};

class PrefixSource {
 public:
  // Both may be called from any thread.
  struct Receiver {
    // The keys of page `index` of the prompt, as StepRunner::read_page() gives them. Pages come
    // in ascending order. Waits while too many pages have not been taken over; returns false if no
    // more are needed.
    std::function<bool(int index, BlockPool::Block keys)> page;
    // Called once, after the last page: nothing more comes.
    std::function<void()> ended;
  };

  virtual ~PrefixSource() = default;
  // Whether fetching the keys of n tokens is worth a request.
  virtual bool pays(int64_t n_tokens) const = 0;
  // Begins to fetch the keys of all `tokens` but the last, from page first_page on, and returns.
  // The last page may be partly filled. Whatever goes wrong ends the fetch early.
  virtual void fetch(uint64_t id, std::vector<int32_t> tokens, int first_page,
                     Receiver receiver) = 0;
  // The pages of this fetch are no longer needed. Its receiver may still be called.
  virtual void cancel(uint64_t id) = 0;
  // Ends all fetches, and returns when no receiver is called any more.
  virtual void stop() = 0;
  virtual std::vector<PrefixServerStatus> servers() const { return {}; }  // thread-safe
};

}  // namespace tandem
