#include "scheduling/sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/check.h"
#include "core/split_mix.h"

namespace tandem {
namespace {

uint64_t mix(uint64_t x) { return split_mix(x + kSplitMixStep); }

constexpr float kNever = -std::numeric_limits<float>::infinity();

void require_finite(bool logits_are) {
  require(logits_are,
          "the model's logits are not finite: its weights are damaged or overflow; check the "
          "checkpoint");
}

void require_finite(std::span<const float> logits) {
  require_finite(
      std::all_of(logits.begin(), logits.end(), [](float v) { return std::isfinite(v); }));
}

// Keeps logits finite, so that an extreme penalty makes a token the last choice, not an impossible
// one.
float finite(float logit) {
  constexpr float kMax = std::numeric_limits<float>::max();
  return std::clamp(logit, -kMax, kMax);
}

}  // namespace

std::vector<uint32_t> allowed_bits(const Vocabulary& vocabulary) {
  std::vector<uint32_t> bits((vocabulary.size + 31) / 32, ~0u);
  for (const int32_t hole : vocabulary.holes)
    bits[static_cast<size_t>(hole) / 32] &= ~(1u << hole % 32);
  return bits;
}

void validate(const SamplingParams& p, const Vocabulary& vocabulary) {
  const int vocab = vocabulary.size;
  require(p.temperature >= 0 && std::isfinite(p.temperature),
          "temperature {}: must be 0 (greedy) or more", p.temperature);
  require(p.top_p > 0 && p.top_p <= 1, "top-p {}: must be above 0 and at most 1", p.top_p);
  require(p.top_k >= 0, "top-k {}: must be 0 (off) or more", p.top_k);
  require(p.min_p >= 0 && p.min_p <= 1, "min-p {}: must be between 0 and 1", p.min_p);
  require(p.repetition_penalty > 0 && std::isfinite(p.repetition_penalty),
          "repetition penalty {}: must be above 0", p.repetition_penalty);
  require(std::abs(p.presence_penalty) <= 2 && std::abs(p.frequency_penalty) <= 2,
          "presence penalty {}, frequency penalty {}: must be between -2 and 2", p.presence_penalty,
          p.frequency_penalty);
  require(p.n_top_logprobs >= -1 && p.n_top_logprobs <= vocab,
          "{} log-probabilities requested: the vocabulary has {} tokens", p.n_top_logprobs, vocab);
  for (const auto& [token, bias] : p.logit_bias)
    require(token >= 0 && token < vocab && std::isfinite(bias),
            "logit bias {} of token {}: tokens are 0 to {}", bias, token, vocab - 1);
}

Sampler::Sampler(const SamplingParams& params, const Vocabulary& vocabulary,
                 std::span<const int32_t> prompt)
    : params_(params),
      holes_(vocabulary.holes),
      penalises_(params.repetition_penalty != 1 || params.presence_penalty != 0 ||
                 params.frequency_penalty != 0) {
  const int vocab = vocabulary.size;
  if (params_.n_top_logprobs >= 0) {
    raw_.resize(vocab);
    top_.resize(vocab);
  }
  if (!penalises_) return;
  n_generated_.resize(vocab);
  seen_.resize(vocab);
  for (const int32_t token : prompt)
    if (token < vocab) seen_[token] = 1;
}

double Sampler::uniform(uint64_t seed, int64_t n) {
  return static_cast<double>(mix(mix(seed) + static_cast<uint64_t>(n)) >> 11) * 0x1p-53;
}

std::optional<Draw> Sampler::next_draw(int32_t row, int n_ahead) const {
  const int64_t n = n_drawn_ + n_ahead;
  const bool changes_logits =
      penalises_ || !params_.logit_bias.empty() || n < params_.min_new_tokens;
  if (changes_logits || !allowed_.empty() || params_.n_top_logprobs >= 0) return {};
  Draw draw = draw_of(n);
  draw.row = row;
  return draw;
}

// The n-th draw.
Draw Sampler::draw_of(int64_t n) const {
  return {.row = 0,
          .temperature = params_.temperature,
          .top_p = params_.top_p,
          .min_p = params_.min_p,
          .top_k = params_.top_k,
          .uniform = uniform(params_.seed, n)};
}

Sampled Sampler::drew(int32_t token) {
  require_finite(token >= 0);
  ++n_drawn_;
  return {token, 0, {}};
}

Sampled Sampler::next(std::span<float> logits) {
  require_finite(logits);
  std::copy_n(logits.begin(), raw_.size(), raw_.begin());
  penalise(logits);
  for (const int32_t token : holes_) logits[token] = kNever;
  if (n_drawn_ < params_.min_new_tokens)
    for (const int32_t token : params_.held_back)
      if (token >= 0 && static_cast<size_t>(token) < logits.size()) logits[token] = kNever;
  if (!allowed_.empty()) keep_allowed(logits);
  const int32_t token = draw_(logits, draw_of(n_drawn_));
  ++n_drawn_;
  if (penalises_) {
    seen_[token] = 1;
    ++n_generated_[token];
  }
  if (raw_.empty()) return {token, 0, {}};
  return with_logprobs(raw_, holes_, token, params_.n_top_logprobs, top_);
}

void Sampler::keep_allowed(std::span<float> logits) {
  bool any = false;
  for (size_t t = 0; t < logits.size(); ++t) {
    const bool keep = allowed_[t / 64] >> t % 64 & 1;
    if (!keep) logits[t] = kNever;
    any = any || logits[t] != kNever;
  }
  allowed_ = {};
  require(any, "the constraints of the request allow no token of the vocabulary");
}

void Sampler::penalise(std::span<float> logits) const {
  if (penalises_) {
    for (size_t t = 0; t < logits.size(); ++t) {
      if (!seen_[t]) continue;
      float& logit = logits[t];
      logit = logit > 0 ? logit / params_.repetition_penalty : logit * params_.repetition_penalty;
      if (n_generated_[t] > 0)
        logit -= params_.presence_penalty +
                 params_.frequency_penalty * static_cast<float>(n_generated_[t]);
      logit = finite(logit);
    }
  }
  for (const auto& [token, bias] : params_.logit_bias) logits[token] = finite(logits[token] + bias);
}

Sampled with_logprobs(std::span<float> logits, std::span<const int32_t> holes, int32_t token,
                      int n_top, std::vector<TokenLogprob>& scratch) {
  require_finite(logits);
  for (const int32_t hole : holes) logits[hole] = kNever;
  const float max = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (const float logit : logits) sum += std::exp(double{logit} - max);
  const float log_sum = static_cast<float>(max + std::log(sum));
  scratch.resize(logits.size());
  for (size_t t = 0; t < logits.size(); ++t)
    scratch[t] = {static_cast<int32_t>(t), logits[t] - log_sum};
  const auto n = std::min(static_cast<size_t>(n_top), logits.size() - holes.size());
  std::partial_sort(scratch.begin(), scratch.begin() + static_cast<int64_t>(n), scratch.end(),
                    [](const TokenLogprob& a, const TokenLogprob& b) {
                      return is_more_likely(a.logprob, a.token, b.logprob, b.token);
                    });
  const bool known = static_cast<size_t>(token) < logits.size();
  return {token, known ? logits[token] - log_sum : kNever, std::span(scratch).first(n)};
}

}  // namespace tandem
