// The drafts of an engine: from which source, how many for each sequence, and what became of them.
#pragma once
#include <map>
#include <memory>

#include "engine/step_runner.h"
#include "scheduling/drafts/draft_policy.h"
#include "scheduling/drafts/draft_source.h"

namespace tandem {

class Drafter {
 public:
  // References outlive the object.
  Drafter(StepRunner& model, KvCache& cache, Drafting drafting, int n_host_pages);
  bool is_on() const { return source_ != nullptr; }

  // Before a step: the tokens that follow a sequence's next token.
  std::vector<int32_t> draft(SequenceId id, std::span<const int32_t> tokens);
  // The pages of a replica that are copied before the step, in order, and the tokens [first, first
  // + n) of a sequence that it computes in these pages.
  void copied(int replica, const PageCopy& copy);
  void will_compute(int replica, std::span<const int32_t> pages, int first, int n);

  // A sequence of a step that has run, and whose tokens are sampled.
  struct Result {
    Advance advance;                   // n_drafts: as many as its answer has room for
    int n_drafts = 0, n_accepted = 0;  // in the step
  };
  // `decodes`: the step computed the next token of n_sequences and their drafts, nothing else. Some
  // may have ended, and are no results.
  struct Step {
    std::span<Result> results;
    int n_sequences = 0, n_drafts = 0, longest = 0;
    bool decodes = false;
    double seconds = 0;
  };
  // After a step: prepares the drafts of the next one.
  void step_done(const Step& step);
  void ended(SequenceId id);

 private:
  struct Sequence {
    Acceptance acceptance;
    int n_drafts = 0;  // in the next step
  };
  void choose(std::span<Result> results);

  const Drafting drafting_;
  const std::unique_ptr<DraftSource> own_;
  DraftSource* const source_;  // null: nothing is drafted
  DraftPolicy policy_;
  std::map<SequenceId, Sequence> sequences_;
  double seconds_ = 0;  // to prepare the drafts of the current step
};

}  // namespace tandem
