// Where drafts come from: tokens that may follow a sequence's text. They are computed in one step
// with the next token and accepted where they equal what is sampled (docs/speculation.md), so a
// source may propose anything.
#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "scheduling/drafts/drafting.h"
#include "scheduling/scheduler.h"

namespace tandem {

// What a step has added to a sequence that goes on.
struct Advance {
  SequenceId id;
  int replica;                      // that computes it
  std::span<const int32_t> tokens;  // all known tokens, also the one that is computed next
  std::span<const int32_t> pages;   // of the KV cache
  int first, n;                     // positions whose keys the step has added
  int row;                          // row of position `first` in the step
  int n_drafts;                     // wanted after the last token; 0 while the prompt is computed
};

class DraftSource {
 public:
  virtual ~DraftSource() = default;
  // At most n tokens that may follow `tokens`.
  virtual std::vector<int32_t> draft(SequenceId id, std::span<const int32_t> tokens, int n) = 0;

  // The next step computes tokens [first, first + n) of a sequence in these pages of a replica.
  virtual void will_compute(int /*replica*/, std::span<const int32_t> /*pages*/, int /*first*/,
                            int /*n*/) {}
  // A page of a replica's cache was copied.
  virtual void copied(int /*replica*/, const PageCopy&) {}
  // A step has run and its tokens are sampled. `follows`: the source computes what it needs to
  // draft these sequences now or later.
  virtual void step_done(std::span<const Advance>, bool /*follows*/) {}
  virtual void ended(SequenceId) {}
};

}  // namespace tandem
