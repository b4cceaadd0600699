// How steps pass through the stages of a pipeline, so that all stages compute at the same time.
//
// The prompts of a step are divided into pieces that pass one after another: a stage computes a
// piece while the next stage computes the one before. Decode steps stay whole, because a stage
// reads the same weights for a piece as for the whole: several of them are in flight, each with a
// share of the sequences. A step is announced to all stages at once, and stage s computes it s
// steps later.
#pragma once
#include <span>
#include <vector>

#include "engine/step_arrays.h"
#include "model/backbone_share.h"
#include "model/batch.h"

namespace tandem {

// A step of its own, whose tokens begin at 0.
struct PipelinePiece {
  std::span<const Batch> batches;         // [replicas]; some may be empty
  std::span<const int64_t> first_logits;  // [replicas] row of the step's logits where its own begin
};

class Pipeline {
 public:
  // For steps of up to max_tokens tokens.
  Pipeline(BackboneGrid grid, int max_tokens);
  // Whether a step of all replicas is computed in pieces.
  bool divides(std::span<const Batch> replicas) const;
  // Pieces of equal numbers of tokens of each replica, at most kMostPieces a stage; valid until the
  // next call, as long as the batches are. All replicas have as many, because they exchange rows.
  std::span<const PipelinePiece> pieces_of(std::span<const Batch> replicas);

 private:
  // With k pieces of equal length on n stages a step takes (k + n - 1) / (k n) of the time of one
  // stage after the other: 0.75 for 2 and 2, 0.63 for 4 and 2. Experts are read once for each
  // piece.
  static constexpr int kLeastTokens = 64;  // of a piece
  static constexpr int kMostPieces = 2;    // for each stage
  int n_pieces(int n_tokens) const;
  int n_pieces(std::span<const Batch> replicas) const;
  Batch piece_of(const Batch& step, int i, int n);

  const BackboneGrid grid_;
  std::vector<PipelinePiece> pieces_;
  std::vector<Batch> batches_;         // [pieces][replicas]
  std::vector<int64_t> first_logits_;  // [pieces][replicas]
  std::vector<Sequence> sequences_;
  std::vector<int32_t> logit_rows_;
};

// The steps in flight that a stage has still to compute.
class StageQueue {
 public:
  struct Step {
    std::span<const Batch> replicas;  // may all be empty
    int n_micro_batches;
  };
  StageQueue(BackboneGrid grid, int stage);
  // Takes a step that is announced, of which all arrays are copied.
  void push(const Step& step);
  // The step that this stage computes now, and the one that it computes after the next push();
  // valid until then. The first ones are empty.
  Step now() const { return step_of(oldest_); }
  Step next() const { return step_of((oldest_ + 1) % std::size(steps_)); }
  // Forgets all steps.
  void clear();

 private:
  struct Copy {
    std::vector<StepArrays> arrays;  // [replicas]
    std::vector<Batch> replicas;     // which refer to the arrays
    int n_micro_batches = 1;
  };
  Step step_of(size_t i) const { return {steps_[i].replicas, steps_[i].n_micro_batches}; }

  std::vector<Copy> steps_;  // [stage + 1], of which each push() replaces the oldest
  size_t oldest_ = 0;
};

}  // namespace tandem
