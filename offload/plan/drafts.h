// What speculative decoding brings: predicted steps of the next token and k drafts of every
// sequence, and the k with which most tokens are decoded a second (docs/speculation.md).
#pragma once
#include <string>
#include <vector>

#include "offload/plan/predict.h"

namespace tandem {

// Tokens that a sequence is expected to get from a step with n drafts, each of which is accepted
// with this probability if all before it are: 1 + a + a^2 + .. + a^n.
double expected_tokens(int n_drafts, double acceptance);

struct DraftedStep {
  int n_drafts = 0;
  double tokens = 1;             // expected per sequence
  double experts = 0;            // different ones in a MoE layer, expected; 0 without MoE layers
  double draft_seconds = 0;      // of drafting
  double step_seconds = 0;       // with drafting
  double tokens_per_second = 0;  // of all sequences
};

struct DraftPlan {
  double acceptance = 0;
  // The MTP layer drafts. Otherwise prompt lookup does, which takes no time.
  bool with_mtp = false;
  int64_t mtp_bytes = 0;           // of the MTP layer; 0: the model has none
  std::vector<DraftedStep> steps;  // without drafts, then with the numbers of drafts considered
  int n_best = 0;                  // drafts of the step with the most tokens a second

  const DraftedStep& best() const;
  // Tokens a second relative to no drafts.
  double times(const DraftedStep& step) const {
    return step.tokens_per_second / steps[0].tokens_per_second;
  }
};

// Considers the workload's number of drafts, or 0 to 4 where it has none. The MTP layer is used if
// it fits in the memory that `memory` leaves. It is placed and formatted like the last layer.
DraftPlan plan_drafts(const PlanInput& input, const Placement& placement,
                      const std::vector<DeviceMemory>& memory);

// "k = 1 at acceptance 0.85: 1.31 times the tokens/s", or that drafts cost time and are off.
std::string drafts_in_words(const DraftPlan& drafts);
// What the words follow from.
std::string why_in_words(const PlanInput& input, const Placement& placement,
                         const DraftPlan& drafts);

}  // namespace tandem
