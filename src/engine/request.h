// What is asked of the engine, and what it answers: tokens. Text is made of them elsewhere
// (answer_stream.h).
#pragma once
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "engine/sampler.h"

namespace tandem {

class TokenConstraint;
using Clock = std::chrono::steady_clock;

struct Request {
  std::vector<int32_t> prompt;
  int max_new_tokens = 0;
  SamplingParams sampling;
  std::vector<int32_t> stop_ids;  // end the answer; they are not part of it
};

enum class FinishReason { kStop, kLength, kCancelled, kDeadline, kFailed };

// A token of a prompt, as the tokens before it foretold it.
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
  std::vector<ScoredToken> prompt;  // with the first: the prompt's but its first, if asked for
  std::optional<FinishReason> finish;
  std::string error;          // with FinishReason::kFailed
  int cached_tokens = 0;      // of the prompt, from the prefix cache
  Clock::time_point started;  // when the first of the prompt was computed
};

struct EngineRequest {
  Request request;
  // The prompt's tokens from this one on are scored too: with on_logits it gets their logits,
  // without it the first event tells their log-probabilities. Such a request may ask for no new
  // token, with on_logits it must.
  std::optional<int> first_scored = {};
  std::shared_ptr<TokenConstraint> constraint = {};  // of the answer; null: none
  std::optional<Clock::time_point> deadline = {};
  // Called for each token and for the end, on the output thread where there is one, else between
  // steps. False: nothing more is wanted. Later events may still come then.
  std::function<bool(const TokenEvent&)> on_event = {};
  // Called within the step: the logits [model's vocabulary] after token `position` of the prompt.
  std::function<void(int position, std::span<const float> logits)> on_logits = {};
};

// Throws Error for a request that can never run: empty, longer than the context, a token that is
// not among the model's `n_tokens`, parameters out of range.
void require_runnable(const EngineRequest& request, int n_tokens, int64_t context,
                      const Vocabulary& vocabulary);

}  // namespace tandem
