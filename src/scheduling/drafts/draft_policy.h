// Decides how many tokens are drafted, from what was measured: the time of steps without and with
// drafts, the time to draft, and how many drafts of each sequence were accepted. Drafts pay where
// the expected tokens per second rise; elsewhere nothing is drafted, and a short probe now and then
// finds out whether that has changed. A function of its inputs alone, without a clock.
#pragma once
#include <array>
#include <span>

#include "model/batch.h"

namespace tandem {

// How often the first draft of a step was accepted, the second after the first, and so on. Old
// drafts count less.
class Acceptance {
 public:
  using Rates = std::array<double, kMaxDraftTokens>;
  // n_accepted drafts equalled the sampled token; if `rejected`, the next one did not.
  void add(int n_accepted, bool rejected);
  // `usual`: of all sequences, assumed for the first drafts.
  double rate(int draft, double usual) const;
  // The same for every draft; a later draft is assumed to be accepted as often as the one before.
  Rates rates(double usual) const;

 private:
  struct Count {
    double tried = 0, accepted = 0;
  };
  std::array<Count, kMaxDraftTokens> of_;
};

class DraftPolicy {
 public:
  explicit DraftPolicy(int most_drafts) : most_(most_drafts) {}

  // A step that computed the next token of n_sequences sequences and n_drafts drafts, at most
  // `longest` of one sequence, and nothing else. draft_seconds: what it took to draft them.
  struct Step {
    int n_sequences, n_drafts, longest;
    double step_seconds, draft_seconds;
  };
  void measured(const Step& step);
  void compared(int n_accepted, bool rejected) { all_.add(n_accepted, rejected); }

  // The most drafts of each sequence in the next step, at most most_drafts.
  void choose(std::span<const Acceptance* const> sequences, std::span<int> n_drafts);
  // Whether the next steps are likely to have drafts, so that their source should prepare them.
  bool follows() const { return follows_; }

 private:
  // A mean in which old values count less.
  class Mean {
   public:
    void add(double value);
    double value() const { return value_; }
    int n() const { return n_; }

   private:
    double value_ = 0;
    int n_ = 0;
  };
  // What is known of steps with about the same number of sequences.
  struct Size {
    Mean plain;      // seconds of a step without drafts, divided by the sequences
    Mean per_draft;  // further seconds for a draft
    std::array<Mean, kMaxDraftTokens + 1> to_draft;  // seconds, by the longest draft
    int n_probed = 0, probe_steps = 0;               // of the probe that runs
    int n_idle = 0, wait = 0;  // steps since the last probe, and until the next
    int n_drafting = 0;
  };
  static constexpr int kSizes = 17;  // by powers of two

  int best(const Size& size, std::span<const Acceptance* const> sequences,
           std::span<int> n_drafts) const;
  double seconds_to_draft(const Size& size, int longest) const;

  const int most_;
  Acceptance all_;
  std::array<Size, kSizes> sizes_;
  bool follows_ = true;
};

}  // namespace tandem
