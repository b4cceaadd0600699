// Requests to the engine and its answers, both in tokens. answer_stream.h turns tokens into text.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/block_pool.h"
#include "core/clock.h"
#include "scheduling/sampler.h"

namespace tandem {

class TokenConstraint;

struct Request {
  std::vector<int32_t> prompt;
  int max_new_tokens = 0;
  SamplingParams sampling;
  std::vector<int32_t> stop_ids;  // end the answer, without being part of it
};

enum class FinishReason { kStop, kLength, kCancelled, kDeadline, kFailed };

// A token of a prompt with its probability after the tokens before it.
struct ScoredToken {
  int32_t token;
  float logprob;
  std::vector<TokenLogprob> top;
};

// A token of an answer, or its end.
struct TokenEvent {
  std::optional<int32_t> token;
  float logprob = 0;
  std::vector<TokenLogprob> top;
  std::vector<ScoredToken> prompt;  // in the first event, if requested: the prompt without token 0
  std::optional<FinishReason> finish;
  std::string error;         // with FinishReason::kFailed
  int cached_tokens = 0;     // prompt tokens found in the prefix cache
  bool was_drafted = false;  // the token, or the one that ends the answer, was drafted and computed
                             // before it was chosen
  int n_rejected = 0;        // drafts that were computed and that this event makes useless
  Clock::time_point started;  // start of the request's first step
};

struct EngineRequest {
  Request request;
  // The prompt's tokens from this index on are scored too: their logits go to on_logits if it is
  // set, otherwise their log-probabilities come with the first event. max_new_tokens may then be 0,
  // and must be 0 with on_logits.
  std::optional<int> first_scored = {};
  std::shared_ptr<TokenConstraint> constraint = {};  // constrains the answer; null: none
  std::optional<Clock::time_point> deadline = {};
  // Called for each token and for the end, on the output thread if there is one, else between
  // steps. Returning false ends the request; events that are under way may still follow.
  std::function<bool(const TokenEvent&)> on_event = {};
  // Called within the step for each page of the prompt without its last token, from first_page on,
  // in order, once its keys are in the cache, as StepRunner::read_page() gives them. The last page
  // may be partly filled.
  std::function<void(int index, BlockPool::Block keys)> on_page = {};
  int first_page = 0;
  // Called within the step with the logits [vocab of the model] after prompt token `position`.
  std::function<void(int position, std::span<const float> logits)> on_logits = {};
};

// Throws Error for a request that can never run: an empty prompt, one longer than the context, a
// token that is not below `n_tokens`, parameters out of range.
void require_runnable(const EngineRequest& request, int n_tokens, int64_t context,
                      const Vocabulary& vocabulary);

}  // namespace tandem
