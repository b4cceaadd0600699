// Turns a row of logits into a token. There is one sampler per sequence; its draws depend on the
// seed, the position and the logits, never on other sequences.
#pragma once
#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "ops/cpu_sampler.h"

namespace tandem {

struct SamplingParams {
  float temperature = 0.6f;  // 0 = greedy
  float top_p = 0.95f;       // keep the most likely tokens up to this probability; 1 = all
  int top_k = 0;             // keep this many; 0 = all
  float min_p = 0;           // keep tokens at least this likely relative to the most likely
  float repetition_penalty =
      1;  // divides positive, multiplies negative logits of tokens seen (CTRL, Keskar 2019)
  float presence_penalty = 0;   // subtracted from the logits of generated tokens
  float frequency_penalty = 0;  // subtracted for each time a token was generated
  std::vector<std::pair<int32_t, float>> logit_bias;  // token, added to its logit
  int min_new_tokens = 0;                             // until this many tokens are drawn,
  std::vector<int32_t> held_back;                     // these tokens are excluded
  uint64_t seed = 0;
  int n_top_logprobs =
      -1;  // -1: no log-probabilities; else those of the chosen and of this many likeliest tokens
};

// The tokens that may be sampled: ids 0 to size - 1 without the holes.
struct Vocabulary {
  int size = 0;
  std::vector<int32_t> holes = {};  // rows of the embedding without a token in the tokenizer
};
// A bit for each token that may be generated, as DeviceSampler takes them.
std::vector<uint32_t> allowed_bits(const Vocabulary& vocabulary);

// Throws Error naming the parameter and its range.
void validate(const SamplingParams& params, const Vocabulary& vocabulary);

struct TokenLogprob {
  int32_t token;
  float logprob;  // in the model's own distribution, before penalties and temperature
};

struct Sampled {
  int32_t token;
  float logprob;                      // 0 unless requested
  std::span<const TokenLogprob> top;  // most likely first; valid until the next draw
};

// The log-probabilities of `token` and of the n_top most likely, which are stored in `scratch`.
// Overwrites `logits` [vocabulary.size]; a token beyond them has -infinity. Throws Error if the
// logits are not finite.
Sampled with_logprobs(std::span<float> logits, std::span<const int32_t> holes, int32_t token,
                      int n_top, std::vector<TokenLogprob>& scratch);

class Sampler {
 public:
  // The prompt's tokens count for the repetition penalty. The vocabulary
  // outlives the sampler.
  Sampler(const SamplingParams& params, const Vocabulary& vocabulary,
          std::span<const int32_t> prompt);

  // Restricts the next draw to tokens with a set bit in `allowed`, which must live until then.
  void allow(std::span<const uint64_t> allowed) { allowed_ = allowed; }
  // Overwrites `logits` [vocabulary.size]. Throws Error if they are not finite or no token is left.
  Sampled next(std::span<float> logits);

  // The parameters of a draw from row `row` of the device's logits, after `n_ahead` other draws, if
  // a device can do it with the logits alone. drew() takes the token of the next draw; together
  // they do what next() does.
  std::optional<Draw> next_draw(int32_t row, int n_ahead = 0) const;
  Sampled drew(int32_t token);

  // The uniform number of the n-th draw with a seed, in [0, 1).
  static double uniform(uint64_t seed, int64_t n);

 private:
  void penalise(std::span<float> logits) const;
  void keep_allowed(std::span<float> logits);
  Draw draw_of(int64_t n) const;

  SamplingParams params_;
  std::span<const int32_t> holes_;
  std::span<const uint64_t> allowed_;  // empty: all tokens
  bool penalises_;
  int64_t n_drawn_ = 0;
  std::vector<int32_t> n_generated_;  // [vocab], only with penalties
  std::vector<uint8_t> seen_;         // [vocab], in prompt or output
  TokenDraw draw_;
  std::vector<float> raw_;         // [vocab], logits before penalties, only with log-probabilities
  std::vector<TokenLogprob> top_;  // [vocab]
};

}  // namespace tandem
