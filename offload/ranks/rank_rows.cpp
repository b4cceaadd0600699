#include "offload/ranks/rank_rows.h"

#include <algorithm>
#include <cstring>

#include "core/rounding.h"

namespace tandem {
namespace {

constexpr int64_t kLine = 64;  // parcels begin at lines of the cache

bool is_per_expert(const ExchangeShape& shape) {
  return shape.returned == ReturnedRows::kPerExpert;
}

// A parcel is a row, the ids of those of its experts that the rank has, and their weights.
int64_t parcel_size(const ExchangeShape& shape) {
  return round_up(encoded_bytes(shape.there, shape.dim) + 8 * shape.n_active, kLine);
}

int64_t most_rows(const ExchangeShape& shape, const RankRows::Limits& limits) {
  return limits.max_rows * (is_per_expert(shape) ? shape.n_active : 1);
}

ItemSizes sizes_of_parcels(int n_ranks, const ExchangeShape& shape,
                           const RankRows::Limits& limits) {
  return {.bytes = parcel_size(shape),
          .max = limits.max_sent,
          .max_out = limits.max_sent * n_ranks,
          .max_in = limits.max_rows};
}
ItemSizes sizes_of_answers(int n_ranks, const ExchangeShape& shape,
                           const RankRows::Limits& limits) {
  const int64_t of_row = is_per_expert(shape) ? shape.n_active : 1;
  return {.bytes = encoded_bytes(shape.back, shape.dim),
          .max = limits.max_sent * of_row,
          .max_out = limits.max_rows * of_row,
          .max_in = limits.max_sent * of_row * n_ranks};
}

}  // namespace

RankRows::RankRows(ExchangeMode mode, Group& group, const cpu::KernelTable& kernels,
                   const ExchangeShape& shape, const Limits& limits)
    : rank_(group.rank()),
      kernels_(kernels),
      shape_(shape),
      max_rows_(most_rows(shape, limits)),
      parcel_bytes_(parcel_size(shape)),
      there_(kernels, shape.there, shape.dim),
      back_(kernels, shape.back, shape.dim),
      in_parcels_(mode == ExchangeMode::kAllToAll && shape.there == RowFormat::kF32 &&
                  !per_expert()),
      sources_(limits.max_sent),
      choices_(limits.max_sent * shape.n_active),
      n_choices_(limits.max_sent),
      n_parcels_(group.size()),
      n_answers_(group.size()),
      n_sent_(group.size()),
      own_parcel_(parcel_bytes_),
      own_answers_(shape.back == RowFormat::kF32 ? 0 : int64_t{shape.n_active} * shape.dim),
      x_(max_rows_ * shape.dim * 4),
      ids_(max_rows_ * shape.n_active * 4),
      weights_(max_rows_ * shape.n_active * 4),
      n_rows_of_(group.size()) {
  check(shape.back != RowFormat::kFp8, "sums come back as BF16 or float");
  const auto make = mode == ExchangeMode::kLowLatency ? make_window_courier : make_counting_courier;
  parcels_ = make(group, sizes_of_parcels(group.size(), shape, limits));
  terms_.reserve(shape.n_active);
  answers_ = make(group, sizes_of_answers(group.size(), shape, limits));
}

int64_t RankRows::bytes_for(ExchangeMode mode, int n_ranks, const ExchangeShape& shape,
                            const Limits& limits) {
  const auto courier_bytes = [&](const ItemSizes& sizes) {
    return mode == ExchangeMode::kLowLatency ? window_courier_bytes(sizes, n_ranks)
                                             : counting_courier_bytes(sizes);
  };
  const int64_t of_row = 4 * int64_t{shape.dim} + 8 * shape.n_active;
  return most_rows(shape, limits) * of_row +
         courier_bytes(sizes_of_parcels(n_ranks, shape, limits)) +
         courier_bytes(sizes_of_answers(n_ranks, shape, limits));
}

void RankRows::begin() {
  n_added_ = 0;
  std::fill(n_parcels_.begin(), n_parcels_.end(), 0);
  std::fill(n_answers_.begin(), n_answers_.end(), 0);
}

// A row's choices are in ascending order of ranks, and of experts within a rank.
void RankRows::add(const Row& row) {
  check(n_added_ < std::ssize(sources_), "rows that a rank sends");
  Choice* const first = &choices_[n_added_ * shape_.n_active];
  Choice* end = first;
  for (int k = 0; k < shape_.n_active; ++k)
    if (row.ranks[k] >= 0) *end++ = {row.ranks[k], row.ids[k], row.weights[k], 0};
  std::sort(first, end, [](const Choice& a, const Choice& b) {
    return a.rank != b.rank ? a.rank < b.rank : a.id < b.id;
  });
  for (Choice* c = first; c != end; ++c) {
    const bool first_of_rank = c == first || c->rank != c[-1].rank;
    n_parcels_[c->rank] += first_of_rank;
    c->answer = per_expert() || first_of_rank ? n_answers_[c->rank]++ : c[-1].answer;
  }
  sources_[n_added_] = {row.x, row.encoded};
  n_choices_[n_added_++] = end - first;
}

ExpertBatch RankRows::dispatch(const ExpertBatch& like) {
  send_rows();
  return receive_rows(like);
}

RankRows::Choices RankRows::of_first_rank(Choices choices) {
  size_t n = 1;
  while (n < choices.size() && choices[n].rank == choices[0].rank) ++n;
  return choices.first(n);
}

// A row is encoded once. This rank's own rows need no parcel: they are decoded at once, while they
// are in the cache.
void RankRows::send_rows() {
  n_rows_ = 0;
  std::fill(n_sent_.begin(), n_sent_.end(), 0);
  parcels_->begin(n_parcels_);
  for (int64_t i = 0; i < n_added_; ++i) {
    const Source& source = sources_[i];
    const std::byte* encoded = source.encoded;
    Choices own;
    for (Choices left = choices_of(i), chosen; !left.empty(); left = left.subspan(chosen.size())) {
      chosen = of_first_rank(left);
      const int rank = chosen[0].rank;
      if (rank == rank_ && !in_parcels_) {
        own = chosen;
        continue;
      }
      std::byte* const parcel = parcels_->place(rank, n_sent_[rank]++);
      if (encoded)
        std::memcpy(parcel, encoded, there_.bytes());
      else
        there_.encode(source.x, parcel);
      encoded = parcel;
      write_lists(chosen, parcel + there_.bytes());
    }
    if (own.empty()) continue;
    if (shape_.there == RowFormat::kF32 && !source.encoded)
      encoded = reinterpret_cast<const std::byte*>(source.x);
    if (!encoded) {
      there_.encode(source.x, own_parcel_.data());
      encoded = own_parcel_.data();
    }
    std::byte* const lists = own_parcel_.data() + there_.bytes();
    write_lists(own, lists);
    compute_here(encoded, lists);
  }
}

// The end of a parcel: ids and weights, [n_active] each.
void RankRows::write_lists(Choices choices, std::byte* lists) const {
  auto* const ids = reinterpret_cast<int32_t*>(lists);
  auto* const weights = reinterpret_cast<float*>(ids + shape_.n_active);
  std::fill_n(ids, shape_.n_active, -1);
  std::fill_n(weights, shape_.n_active, 0.f);
  for (size_t k = 0; k < choices.size(); ++k) {
    ids[k] = choices[k].id;
    weights[k] = choices[k].weight;
  }
}

ExpertBatch RankRows::receive_rows(const ExpertBatch& like) {
  const Courier::Arrived& arrived = parcels_->end({});
  n_rows_of_ = arrived.n;
  if (in_parcels_) return arrived_rows(like, arrived);
  const int n_active = shape_.n_active;
  n_rows_of_[rank_] = n_rows_;
  for (const int r : parcels_->ranks_in_order()) {
    if (r == rank_) continue;
    const int64_t before = n_rows_;
    for (int64_t i = 0; i < arrived.n[r]; ++i) {
      const std::byte* const parcel = arrived.items[r] + i * parcel_bytes_;
      compute_here(parcel, parcel + there_.bytes());
    }
    n_rows_of_[r] = n_rows_ - before;
  }
  ExpertBatch batch = like;
  batch.x = {x_.data(), n_rows_, shape_.dim, shape_.dim};
  batch.routing.ids = {ids_.data(), n_rows_, n_active, n_active, DType::kI32};
  batch.routing.weights = {weights_.data(), n_rows_, n_active, n_active};
  return batch;
}

// A row for all of a parcel's experts, or for each of them with weight 1.
void RankRows::compute_here(const std::byte* encoded, const std::byte* lists) {
  const int n_active = shape_.n_active;
  const auto* const ids = reinterpret_cast<const int32_t*>(lists);
  const auto* const weights = reinterpret_cast<const float*>(ids + n_active);
  float* const x = x_row(n_rows_);
  there_.decode(encoded, x);
  const auto add_row = [&](std::span<const int32_t> ids_of_row,
                           std::span<const float> weights_of_row) {
    auto* const ids_out = reinterpret_cast<int32_t*>(ids_.data()) + n_rows_ * n_active;
    auto* const weights_out = reinterpret_cast<float*>(weights_.data()) + n_rows_ * n_active;
    std::fill(std::copy(ids_of_row.begin(), ids_of_row.end(), ids_out), ids_out + n_active, -1);
    std::fill(std::copy(weights_of_row.begin(), weights_of_row.end(), weights_out),
              weights_out + n_active, 0.f);
    ++n_rows_;
  };
  if (!per_expert()) return add_row({ids, size_t(n_active)}, {weights, size_t(n_active)});
  constexpr float kOne = 1;
  for (int k = 0; k < n_active && ids[k] >= 0; ++k) {
    if (k > 0) std::copy_n(x, shape_.dim, x_row(n_rows_));
    add_row({ids + k, 1}, {&kOne, 1});
  }
}

// The rows in their parcels.
ExpertBatch RankRows::arrived_rows(const ExpertBatch& like, const Courier::Arrived& arrived) {
  n_rows_ = arrived.total();
  auto* const first = const_cast<std::byte*>(arrived.items[rank_]);
  const int64_t stride = parcel_bytes_ / 4;
  std::byte* const ids = first + there_.bytes();
  const int n_active = shape_.n_active;
  ExpertBatch batch = like;
  batch.x = {first, n_rows_, shape_.dim, stride};
  batch.routing.ids = {ids, n_rows_, n_active, stride, DType::kI32};
  batch.routing.weights = {ids + 4 * n_active, n_rows_, n_active, stride};
  return batch;
}

void RankRows::send_back(const TensorView& sums) {
  check(sums.rows == n_rows_ && sums.stride == sums.cols,
        "sums of the rows that dispatch() returned, dense");
  sums_ = sums;
  returned_ = &send_answers(sums);
}

std::span<const cpu::WeightedRow> RankRows::terms_of(int64_t row) {
  const std::span<Choice> choices = choices_of(row);
  if (per_expert())
    std::sort(choices.begin(), choices.end(),
              [](const Choice& a, const Choice& b) { return a.id < b.id; });
  terms_.clear();
  for (auto c = choices.begin(); c != choices.end(); ++c)
    if (per_expert() || c == choices.begin() || c->rank != c[-1].rank)
      terms_.push_back({answer_of(*c, std::ssize(terms_)), per_expert() ? c->weight : 1});
  return terms_;
}

// In the order in which the rows came. Floats are sent from where they are.
const Courier::Arrived& RankRows::send_answers(const TensorView& sums) {
  if (shape_.back == RowFormat::kF32)
    return answers_->exchange(static_cast<const std::byte*>(sums.data), n_rows_of_, n_answers_);
  answers_->begin(n_rows_of_);
  int64_t row = n_rows_of_[rank_];
  for (const int r : answers_->ranks_in_order()) {
    if (r == rank_) continue;
    for (int64_t i = 0; i < n_rows_of_[r]; ++i)
      back_.encode(sums.row<float>(row++), answers_->place(r, i));
  }
  return answers_->end(n_answers_);
}

// Own answers are the first of the sums, rounded as those that travel. index: among a row's.
const void* RankRows::answer_of(const Choice& choice, int64_t index) {
  if (choice.rank != rank_ || shape_.back == RowFormat::kF32)
    return returned_->items[choice.rank] + choice.answer * back_.bytes();
  cpu::bf16* const rounded = own_answers_.data() + index * shape_.dim;
  kernels_.encode_bf16({sums_.row<float>(choice.answer), rounded, shape_.dim});
  return rounded;
}

}  // namespace tandem
