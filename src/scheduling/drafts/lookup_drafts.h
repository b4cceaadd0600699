// Drafts by prompt lookup, for models without layers for multi-token prediction.
#pragma once
#include <map>

#include "scheduling/drafts/draft_source.h"
#include "scheduling/drafts/prompt_lookup.h"

namespace tandem {

class LookupDrafts final : public DraftSource {
 public:
  std::vector<int32_t> draft(SequenceId id, std::span<const int32_t> tokens, int n) override {
    return lookups_[id].draft(tokens, n);
  }
  void ended(SequenceId id) override { lookups_.erase(id); }

 private:
  std::map<SequenceId, PromptLookup> lookups_;
};

}  // namespace tandem
