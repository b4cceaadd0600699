#include "engine/pipeline.h"

#include <algorithm>

#include "core/check.h"

namespace tandem {

Pipeline::Pipeline(BackboneGrid grid, int max_tokens) : grid_(grid) {
  if (grid.n_stages == 1) return;
  const int most = n_pieces(max_tokens);
  pieces_.reserve(most);
  sequences_.reserve(max_tokens + most);  // a piece may begin within a sequence
  logit_rows_.reserve(max_tokens);
}

int Pipeline::n_pieces(int n_tokens) const {
  return std::clamp(n_tokens / kLeastTokens, 1, kMostPieces * grid_.n_stages);
}

bool Pipeline::divides(std::span<const Batch> replicas) const {
  return grid_.n_stages > 1 && replicas.size() == 1 && n_pieces(replicas[0].n()) > 1;
}

std::span<const PipelinePiece> Pipeline::pieces_of(const Batch& step) {
  pieces_.clear();
  sequences_.clear();
  logit_rows_.clear();
  const int n = n_pieces(step.n());
  for (int i = 0; i < n; ++i) {
    const int first = step.n() * i / n, end = step.n() * (i + 1) / n;
    const size_t first_sequence = sequences_.size(), first_logits = logit_rows_.size();
    for (const Sequence& s : step.sequences) {
      const int begin = std::max(first, s.first_token);
      const int stop = std::min(end, s.first_token + s.n_tokens);
      if (begin >= stop) continue;
      const int n_later = s.first_token + s.n_tokens - stop;
      sequences_.push_back({begin - first, stop - begin, s.kv_length - n_later, s.kv_pages});
    }
    for (const int32_t row : step.logit_rows)
      if (row >= first && row < end) logit_rows_.push_back(row - first);
    const auto n_tokens = static_cast<size_t>(end - first);
    pieces_.push_back({{.tokens = step.tokens.subspan(first, n_tokens),
                        .positions = step.positions.subspan(first, n_tokens),
                        .sequences = std::span(sequences_).subspan(first_sequence),
                        .logit_rows = std::span(logit_rows_).subspan(first_logits)},
                       static_cast<int64_t>(first_logits)});
  }
  return pieces_;
}

}  // namespace tandem
