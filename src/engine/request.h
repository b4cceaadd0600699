// What is asked of the engine, and how it ended.
#pragma once
#include <cstdint>
#include <vector>

#include "engine/sampler.h"

namespace tandem {

// Tokens whose keys are in the cache. A request may start from one, and leaves it with what it
// computed: a conversation then computes only what is new.
struct KvSequence {
  std::vector<int32_t> tokens;
  std::vector<int32_t> pages;
};

struct Request {
  std::vector<int32_t> prompt;
  int max_new_tokens = 0;
  SamplingParams sampling;
  std::vector<int32_t> stop_ids;  // end the answer; they are not part of it
  KvSequence* kv = nullptr;       // reused and kept by the Generator; null: temporary
};

enum class FinishReason { kStop, kLength, kCancelled, kDeadline, kFailed };

// Throws Error for a request that can never run: empty, longer than the context, a token that is
// not among the model's `n_tokens`, parameters out of range.
void require_runnable(const Request& request, int n_tokens, int64_t context,
                      const Vocabulary& vocabulary, int least_new_tokens = 1);

}  // namespace tandem
