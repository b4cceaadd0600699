// Drafts by the model's layers for multi-token prediction (DeepSeek-V3 report, section 2.2).
//
// Row p of such a layer's cache follows from the hidden state at position p and the token at p + 1,
// so it is computed when that token is known: after the step that computed p. Layer m (0, 1, ..)
// takes the token at p + 1 + m and drafts the one at p + 2 + m; the last layer is then applied to
// its own drafts. Rows that a draft fills are overwritten once the token is known.
//
// The rows of a page are filled from its first row on, or not at all: a sequence whose pages are
// not filled (they were computed while nothing was drafted) attends to those that are. The last row
// of a page that the prefix cache shares was computed with the token that followed then. Both
// change how many drafts are accepted, and no answer.
#pragma once
#include <map>
#include <memory>
#include <optional>

#include "engine/step_arrays.h"
#include "engine/step_runner.h"
#include "scheduling/drafts/draft_source.h"

namespace tandem {

class MtpDrafts final : public DraftSource {
 public:
  // Drafts are tokens of the model's vocabulary (StepRunner::set_vocabulary). References outlive
  // the object.
  MtpDrafts(StepRunner& model, KvCache& cache, int n_host_pages);

  std::vector<int32_t> draft(SequenceId id, std::span<const int32_t> tokens, int n) override;
  void will_compute(int replica, std::span<const int32_t> pages, int first, int n) override;
  void copied(int replica, const PageCopy& copy) override;
  void step_done(std::span<const Advance> sequences, bool follows) override;
  void ended(SequenceId id) override { drafts_.erase(id); }

 private:
  // A sequence of the step: positions [first, end) whose rows are filled, and the first page that
  // is attended to.
  struct Part {
    const Advance* of;
    int first, end, first_page;
  };
  struct Drafts {
    int position = 0;  // of the first draft
    std::vector<int32_t> tokens;
  };

  std::optional<Part> fill(const Advance& sequence);
  int first_page_of(const Advance& sequence, int page) const;
  void clear_steps();
  void run_layer(int module);
  void apply_again();
  void compute(int module, HiddenStates states);
  void take_drafts();

  StepRunner& model_;
  KvCache& cache_;
  const int n_modules_;
  std::vector<std::vector<uint8_t>> n_filled_;          // [replicas][pages] rows
  std::vector<std::vector<uint8_t>> n_filled_on_host_;  // [replicas][host pages] rows
  std::vector<Part> parts_;                             // in order of replicas
  std::vector<const Part*> drafted_;                    // the parts of the last rows of logits
  std::map<SequenceId, Drafts> drafts_;
  std::vector<StepArrays> steps_;  // [replicas]
};

}  // namespace tandem
