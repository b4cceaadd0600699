#include "scheduling/token_constraint.h"

#include <algorithm>

#include "core/invariant.h"

namespace tandem {
namespace {

constexpr std::string_view kEndOfThinking = "</think>";

void set(std::span<uint64_t> mask, int32_t token, bool value) {
  if (token < 0 || static_cast<size_t>(token) / 64 >= mask.size()) return;
  const uint64_t bit = uint64_t{1} << token % 64;
  if (value) {
    mask[token / 64] |= bit;
  } else {
    mask[token / 64] &= ~bit;
  }
}

}  // namespace

TokenConstraint::TokenConstraint(std::shared_ptr<const GrammarTokens> tokens,
                                 const Tokenizer& tokenizer, Options options)
    : tokens_(std::move(tokens)),
      tokenizer_(tokenizer),
      options_(std::move(options)),
      states_(tokens_->grammar()),
      state_(states_.begin()),
      thinking_(options_.after_thinking),
      mask_(mask_words(std::max(options_.vocabulary, tokens_->vocab_size()))) {
  if (!thinking_) return;
  std::fill(mask_.begin(), mask_.end(), ~uint64_t{0});
  for (const int32_t token : options_.end_tokens) set(mask_, token, false);
}

std::span<const uint64_t> TokenConstraint::allowed() {
  if (!thinking_ && masked_ != state_) find_allowed();
  return mask_;
}

void TokenConstraint::find_allowed() {
  std::fill(mask_.begin(), mask_.end(), 0);
  tokens_->add_allowed(states_, state_, mask_);
  for (const int32_t token : options_.end_tokens) set(mask_, token, states_.may_end(state_));
  masked_ = state_;
}

void TokenConstraint::take(int32_t token) {
  if (thinking_) return take_thought(token);
  if (tokenizer_.is_added(token)) {
    state_ = states_.after_token(state_, token);
  } else {
    for (const char c : tokenizer_.bytes_of(token)) {
      if (state_ == TextStates::kDead) break;
      state_ = states_.after(state_, static_cast<uint8_t>(c));
    }
  }
  check(state_ != TextStates::kDead, "a token that the mask lets through is in the grammar");
}

// The mark "</think>" may be one token or several.
void TokenConstraint::take_thought(int32_t token) {
  thought_ += tokenizer_.bytes_of(token);
  thinking_ = thought_.find(kEndOfThinking) == std::string::npos;
  const size_t n_kept = std::min(thought_.size(), kEndOfThinking.size() - 1);
  thought_.erase(0, thought_.size() - n_kept);
}

bool TokenConstraint::complete() const {
  return !thinking_ && states_.may_end(state_) && states_.frames(state_).empty();
}

}  // namespace tandem
