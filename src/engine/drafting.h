// What is drafted: --draft and --draft-tokens.
#pragma once

namespace tandem {

struct Drafting {
  enum class Source { kNone, kMtp, kLookup };
  Source source = Source::kNone;
  int n_tokens = 0;      // at most, of a sequence per step; up to kMaxDraftTokens
  bool decides = false;  // how many pay, by what is measured (DraftPolicy); otherwise all
};

}  // namespace tandem
