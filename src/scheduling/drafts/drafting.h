// What is drafted: --draft and --draft-tokens.
#pragma once

namespace tandem {

class DraftSource;

struct Drafting {
  enum class Source { kNone, kMtp, kLookup };
  Source source = Source::kNone;
  int n_tokens = 0;              // at most, of a sequence per step; up to kMaxDraftTokens
  DraftSource* given = nullptr;  // another source, which outlives the engine; null: none
  bool decides = false;          // how many pay, by what is measured (DraftPolicy); otherwise all
};

}  // namespace tandem
