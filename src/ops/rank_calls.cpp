#include "ops/rank_calls.h"

#include <cstring>

#include "core/check.h"

namespace tandem {
namespace {

Bytes bytes_of(TensorView x) {
  check(x.stride == x.cols, "rows that travel are dense");
  return {x.row_data(0), static_cast<size_t>(x.rows * x.row_bytes())};
}

}  // namespace

void copy_rows(TensorView from, TensorView to) {
  check(from.dtype == to.dtype, "a copy has the type of its source");
  for (int64_t r = 0; r < from.rows; ++r)
    std::memcpy(to.row_data(r), from.row_data(r), from.cols * size_of(from.dtype));
}

void RankCalls::all_reduce(TensorView x) {
  check(x.stride == x.cols, "the ranks add dense matrices");
  groups_.replica->all_reduce({x.row<float>(0), static_cast<size_t>(x.rows * x.cols)});
}

// The columns of a rank travel as one dense piece.
void RankCalls::all_gather_cols(TensorView x, std::span<const Slice> slices) {
  gathered_.resize(x.rows * x.cols);
  piece_bytes_.clear();
  for (const Slice& s : slices) piece_bytes_.push_back(x.rows * s.n * size_of(DType::kF32));
  const auto piece = [&](const Slice& s) -> TensorView {
    return {gathered_.data() + x.rows * s.first, x.rows, s.n, s.n};
  };
  const Slice mine = slices[groups_.replica->rank()];
  copy_rows(x.cols_from(mine.first, mine.n), piece(mine));
  groups_.replica->all_gather(
      std::as_bytes(std::span(gathered_).subspan(x.rows * mine.first, x.rows * mine.n)),
      {std::as_writable_bytes(std::span(gathered_)), piece_bytes_});
  for (const Slice& s : slices) copy_rows(piece(s), x.cols_from(s.first, s.n));
}

// The rank of the stage before is the first of two.
void RankCalls::send(TensorView x) { groups_.after->broadcast(bytes_of(x), 0); }
void RankCalls::receive(TensorView x) { groups_.before->broadcast(bytes_of(x), 0); }

// Both travel in one call.
void RankCalls::take_routing_of_first(const Routing& routing) {
  const Bytes ids = bytes_of(routing.ids), weights = bytes_of(routing.weights);
  routing_.resize(ids.size() + weights.size());
  std::memcpy(routing_.data(), ids.data(), ids.size());
  std::memcpy(routing_.data() + ids.size(), weights.data(), weights.size());
  groups_.replica->broadcast(routing_, 0);
  std::memcpy(ids.data(), routing_.data(), ids.size());
  std::memcpy(weights.data(), routing_.data() + ids.size(), weights.size());
}

}  // namespace tandem
