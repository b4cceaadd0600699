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

void RankCalls::gather_replicas(TensorView mine, std::span<const int64_t> n_rows, TensorView all) {
  piece_bytes_.clear();
  for (const int64_t n : n_rows) piece_bytes_.push_back(n * all.row_bytes());
  groups_.like_ranks->all_gather(bytes_of(mine), {bytes_of(all), piece_bytes_});
}

void RankCalls::scatter_replicas(TensorView all, std::span<const int64_t> n_rows, TensorView mine) {
  piece_bytes_.clear();
  for (const int64_t n : n_rows) piece_bytes_.push_back(n * all.cols);
  check(all.stride == all.cols && mine.stride == mine.cols, "rows that travel are dense");
  const auto numbers = [](TensorView x) {
    return std::span(static_cast<float*>(x.data), static_cast<size_t>(x.rows * x.cols));
  };
  groups_.like_ranks->reduce_scatter({numbers(all), piece_bytes_}, numbers(mine));
}

void RankCalls::exchange_replicas(TensorView all, std::span<const int64_t> n_rows, TensorView mine,
                                  std::span<const Slice> slices, TensorView scratch) {
  piece_bytes_.clear();
  received_bytes_.clear();
  for (const int64_t n : n_rows) piece_bytes_.push_back(n * all.row_bytes());
  int64_t n_received = 0;  // numbers
  for (const Slice& s : slices) {
    n_received += mine.rows * s.n;
    received_bytes_.push_back(mine.rows * s.n * size_of(DType::kF32));
  }
  check(n_received <= scratch.rows * scratch.cols, "what is received fits its place");
  const TensorView received = {scratch.data, 1, n_received, n_received};
  groups_.like_ranks->all_to_all({bytes_of(all), piece_bytes_},
                                 {bytes_of(received), received_bytes_});
  int64_t first = 0;
  for (const Slice& s : slices) {
    copy_rows({received.row<float>(0) + first, mine.rows, s.n, s.n}, mine.cols_from(s.first, s.n));
    first += mine.rows * s.n;
  }
}

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
