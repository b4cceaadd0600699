// Divides the prompts of a step into pieces that pass through the stages of a pipeline one after
// another: a stage computes a piece while the next stage computes the one before. Decode steps stay
// whole, because a stage reads the same weights for a piece as for the whole.
#pragma once
#include <span>
#include <vector>

#include "model/backbone_share.h"
#include "model/batch.h"

namespace tandem {

// A step of its own, whose tokens begin at 0.
struct PipelinePiece {
  Batch batch;
  int64_t first_logits;  // the row of the step's logits where its own begin
};

class Pipeline {
 public:
  // For steps of up to max_tokens tokens.
  Pipeline(BackboneGrid grid, int max_tokens);
  // Whether a step is computed in pieces. With several replicas it is not, because they would have
  // to exchange rows piece by piece.
  bool divides(std::span<const Batch> replicas) const;
  // Pieces of equal numbers of tokens, at most kMostPieces a stage; valid until the next call, as
  // long as `step` is.
  std::span<const PipelinePiece> pieces_of(const Batch& step);

 private:
  // With k pieces of equal length on n stages a step takes (k + n - 1) / (k n) of the time of one
  // stage after the other: 0.75 for 2 and 2, 0.63 for 4 and 2. Experts are read once for each
  // piece.
  static constexpr int kLeastTokens = 64;  // of a piece
  static constexpr int kMostPieces = 2;    // for each stage
  int n_pieces(int n_tokens) const;

  const BackboneGrid grid_;
  std::vector<PipelinePiece> pieces_;
  std::vector<Sequence> sequences_;
  std::vector<int32_t> logit_rows_;
};

}  // namespace tandem
