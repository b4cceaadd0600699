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

}  // namespace tandem
