// The exchanges in which a row goes to the ranks that have its experts. Which row goes where, and
// in which order what comes back is added, is the same in both; how items travel is a Courier's.
#include <algorithm>
#include <cstring>

#include "core/memory.h"
#include "core/rounding.h"
#include "offload/ranks/courier.h"
#include "offload/ranks/exchanges.h"

namespace tandem {
namespace {

constexpr int64_t kLine = 64;  // parcels begin at lines of the cache

bool per_expert(const ExchangeShape& shape) { return shape.returned == ReturnedRows::kPerExpert; }

// A parcel is a row, the ids of those of its experts that the rank has, and their weights.
int64_t parcel_bytes(const ExchangeShape& shape) {
  return round_up(encoded_bytes(shape.there, shape.dim) + 8 * shape.n_active, kLine);
}

int64_t most_rows(int n_ranks, const ExchangeShape& shape) {
  return int64_t{n_ranks} * shape.max_tokens * (per_expert(shape) ? shape.n_active : 1);
}

ItemSizes item_sizes(int n_ranks, const ExchangeShape& shape, int64_t bytes, int64_t per_token) {
  const int64_t of_rank = shape.max_tokens * per_token;
  return {
      .bytes = bytes, .max = of_rank, .max_out = of_rank * n_ranks, .max_in = of_rank * n_ranks};
}
ItemSizes sizes_of_parcels(int n_ranks, const ExchangeShape& shape) {
  return item_sizes(n_ranks, shape, parcel_bytes(shape), 1);
}
ItemSizes sizes_of_answers(int n_ranks, const ExchangeShape& shape) {
  return item_sizes(n_ranks, shape, encoded_bytes(shape.back, shape.dim),
                    per_expert(shape) ? shape.n_active : 1);
}

class RowExchange final : public ExpertExchange {
 public:
  RowExchange(ExchangeMode mode, const ExchangeParts& parts);
  int64_t max_rows() const override { return most_rows(p_.group.size(), p_.shape); }
  void begin(std::span<const int64_t>) override {}
  ExpertBatch dispatch(const ExpertBatch& mine) override;
  void combine(TensorView sums, TensorView y) override;

 private:
  // An expert of a token, and the row of answers that holds it: the answer-th of those from `rank`.
  struct Choice {
    int rank;
    int32_t id;
    float weight;
    int64_t answer;
  };
  bool per_expert() const { return tandem::per_expert(p_.shape); }
  int64_t parcel_bytes() const { return tandem::parcel_bytes(p_.shape); }
  std::span<Choice> choices_of(int64_t token) {
    return std::span(choices_).subspan(token * p_.shape.n_active, n_choices_[token]);
  }
  using Choices = std::span<const Choice>;
  // The first of a token's choices, up to those of another rank.
  static Choices of_first_rank(Choices choices);
  void choose(const ExpertBatch& mine);
  void send_rows(const ExpertBatch& mine);
  ExpertBatch receive_rows(const ExpertBatch& mine);
  ExpertBatch arrived_rows(const ExpertBatch& mine, const Courier::Arrived& arrived);
  void write_lists(Choices choices, std::byte* lists) const;
  void compute_here(const std::byte* encoded, const std::byte* lists);
  float* x_row(int64_t i) const { return reinterpret_cast<float*>(x_.data()) + i * p_.shape.dim; }
  const Courier::Arrived& send_answers(const TensorView& sums);
  const void* answer_of(const Courier::Arrived& arrived, const TensorView& sums,
                        const Choice& choice, int64_t index);

  const ExchangeParts p_;
  ReplicaChooser chooser_;
  const RowCodec there_, back_;
  const bool in_parcels_;  // rows are computed where they arrive: as floats, one after another
  std::unique_ptr<Courier> parcels_, answers_;

  // The tokens of this rank.
  std::vector<Choice> choices_;                 // [max_tokens, n_active]
  std::vector<int64_t> n_choices_;              // [max_tokens]
  std::vector<int64_t> n_parcels_, n_answers_;  // [ranks] that are sent there, that come back
  std::vector<int64_t> n_sent_;                 // [ranks] parcels so far
  std::vector<int32_t> ranks_;                  // [n_active] of a token
  std::vector<std::byte> own_parcel_;           // of a token, before the row is decoded
  std::vector<cpu::WeightedRow> terms_;         // answers of one token
  std::vector<cpu::bf16> own_answers_;          // [n_active, dim] of one token, if they are BF16

  // The rows that this rank computes.
  Buffer x_;              // [max_rows(), dim]
  Buffer ids_, weights_;  // [max_rows(), n_active]
  int64_t n_rows_ = 0;
  std::vector<int64_t> n_rows_of_;  // [ranks]
};

RowExchange::RowExchange(ExchangeMode mode, const ExchangeParts& parts)
    : p_(parts),
      chooser_(parts.owners),
      there_(parts.kernels, parts.shape.there, parts.shape.dim),
      back_(parts.kernels, parts.shape.back, parts.shape.dim),
      in_parcels_(mode == ExchangeMode::kAllToAll && parts.shape.there == RowFormat::kF32 &&
                  !per_expert()),
      choices_(int64_t{parts.shape.max_tokens} * parts.shape.n_active),
      n_choices_(parts.shape.max_tokens),
      n_parcels_(parts.group.size()),
      n_answers_(parts.group.size()),
      n_sent_(parts.group.size()),
      ranks_(parts.shape.n_active),
      own_parcel_(parcel_bytes()),
      own_answers_(parts.shape.back == RowFormat::kF32
                       ? 0
                       : int64_t{parts.shape.n_active} * parts.shape.dim),
      x_(max_rows() * parts.shape.dim * 4),
      ids_(max_rows() * parts.shape.n_active * 4),
      weights_(max_rows() * parts.shape.n_active * 4),
      n_rows_of_(parts.group.size()) {
  check(parts.shape.back != RowFormat::kFp8, "sums come back as BF16 or float");
  const auto make = mode == ExchangeMode::kLowLatency ? make_window_courier : make_counting_courier;
  parcels_ = make(p_.group, sizes_of_parcels(p_.group.size(), p_.shape));
  terms_.reserve(parts.shape.n_active);
  answers_ = make(p_.group, sizes_of_answers(p_.group.size(), p_.shape));
}

ExpertBatch RowExchange::dispatch(const ExpertBatch& mine) {
  choose(mine);
  send_rows(mine);
  return receive_rows(mine);
}

// A token's choices are in ascending order of ranks, and of experts within a rank.
void RowExchange::choose(const ExpertBatch& mine) {
  check(mine.x.rows <= p_.shape.max_tokens, "tokens of a rank");
  std::fill(n_parcels_.begin(), n_parcels_.end(), 0);
  std::fill(n_answers_.begin(), n_answers_.end(), 0);
  chooser_.begin(mine.layer, mine.routing.ids);
  for (int64_t t = 0; t < mine.x.rows; ++t) {
    Choice* const first = &choices_[t * p_.shape.n_active];
    Choice* end = first;
    const int32_t* const ids = mine.routing.ids.row<int32_t>(t);
    chooser_.choose(ids, p_.shape.n_active, p_.group.rank(), ranks_.data());
    for (int k = 0; k < p_.shape.n_active; ++k)
      if (ranks_[k] >= 0) *end++ = {ranks_[k], ids[k], mine.routing.weights.row<float>(t)[k], 0};
    std::sort(first, end, [](const Choice& a, const Choice& b) {
      return a.rank != b.rank ? a.rank < b.rank : a.id < b.id;
    });
    n_choices_[t] = end - first;
    for (Choice* c = first; c != end; ++c) {
      const bool first_of_rank = c == first || c->rank != c[-1].rank;
      n_parcels_[c->rank] += first_of_rank;
      c->answer = per_expert() || first_of_rank ? n_answers_[c->rank]++ : c[-1].answer;
    }
  }
}

RowExchange::Choices RowExchange::of_first_rank(Choices choices) {
  size_t n = 1;
  while (n < choices.size() && choices[n].rank == choices[0].rank) ++n;
  return choices.first(n);
}

// A row is encoded once. This rank's own rows need no parcel: they are decoded at once, while they
// are in the cache.
void RowExchange::send_rows(const ExpertBatch& mine) {
  n_rows_ = 0;
  std::fill(n_sent_.begin(), n_sent_.end(), 0);
  parcels_->begin(n_parcels_);
  for (int64_t t = 0; t < mine.x.rows; ++t) {
    const float* const x = mine.x.row<float>(t);
    const std::byte* encoded = nullptr;
    Choices own;
    for (Choices left = choices_of(t), chosen; !left.empty(); left = left.subspan(chosen.size())) {
      chosen = of_first_rank(left);
      const int rank = chosen[0].rank;
      if (rank == p_.group.rank() && !in_parcels_) {
        own = chosen;
        continue;
      }
      std::byte* const parcel = parcels_->place(rank, n_sent_[rank]++);
      if (encoded)
        std::memcpy(parcel, encoded, there_.bytes());
      else
        there_.encode(x, parcel);
      encoded = parcel;
      write_lists(chosen, parcel + there_.bytes());
    }
    if (own.empty()) continue;
    if (p_.shape.there == RowFormat::kF32) encoded = reinterpret_cast<const std::byte*>(x);
    if (!encoded) {
      there_.encode(x, own_parcel_.data());
      encoded = own_parcel_.data();
    }
    std::byte* const lists = own_parcel_.data() + there_.bytes();
    write_lists(own, lists);
    compute_here(encoded, lists);
  }
}

// The end of a parcel: ids and weights, [n_active] each.
void RowExchange::write_lists(Choices choices, std::byte* lists) const {
  auto* const ids = reinterpret_cast<int32_t*>(lists);
  auto* const weights = reinterpret_cast<float*>(ids + p_.shape.n_active);
  std::fill_n(ids, p_.shape.n_active, -1);
  std::fill_n(weights, p_.shape.n_active, 0.f);
  for (size_t k = 0; k < choices.size(); ++k) {
    ids[k] = choices[k].id;
    weights[k] = choices[k].weight;
  }
}

ExpertBatch RowExchange::receive_rows(const ExpertBatch& mine) {
  const Courier::Arrived& arrived = parcels_->end({});
  n_rows_of_ = arrived.n;
  if (in_parcels_) return arrived_rows(mine, arrived);
  const int n_active = p_.shape.n_active;
  n_rows_of_[p_.group.rank()] = n_rows_;
  for (const int r : parcels_->ranks_in_order()) {
    if (r == p_.group.rank()) continue;
    const int64_t before = n_rows_;
    for (int64_t i = 0; i < arrived.n[r]; ++i) {
      const std::byte* const parcel = arrived.items[r] + i * parcel_bytes();
      compute_here(parcel, parcel + there_.bytes());
    }
    n_rows_of_[r] = n_rows_ - before;
  }
  ExpertBatch batch = mine;
  batch.x = {x_.data(), n_rows_, p_.shape.dim, p_.shape.dim};
  batch.routing.ids = {ids_.data(), n_rows_, n_active, n_active, DType::kI32};
  batch.routing.weights = {weights_.data(), n_rows_, n_active, n_active};
  return batch;
}

// A row for all of a parcel's experts, or for each of them with weight 1.
void RowExchange::compute_here(const std::byte* encoded, const std::byte* lists) {
  const int n_active = p_.shape.n_active;
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
    if (k > 0) std::copy_n(x, p_.shape.dim, x_row(n_rows_));
    add_row({ids + k, 1}, {&kOne, 1});
  }
}

// The rows in their parcels.
ExpertBatch RowExchange::arrived_rows(const ExpertBatch& mine, const Courier::Arrived& arrived) {
  n_rows_ = arrived.total();
  auto* const first = const_cast<std::byte*>(arrived.items[p_.group.rank()]);
  const int64_t stride = parcel_bytes() / 4;
  std::byte* const ids = first + there_.bytes();
  const int n_active = p_.shape.n_active;
  ExpertBatch batch = mine;
  batch.x = {first, n_rows_, p_.shape.dim, stride};
  batch.routing.ids = {ids, n_rows_, n_active, stride, DType::kI32};
  batch.routing.weights = {ids + 4 * n_active, n_rows_, n_active, stride};
  return batch;
}

void RowExchange::combine(TensorView sums, TensorView y) {
  check(sums.rows == n_rows_ && sums.stride == sums.cols,
        "sums of the rows that dispatch() returned, dense");
  const Courier::Arrived& arrived = send_answers(sums);
  const bool floats = p_.shape.back == RowFormat::kF32;
  for (int64_t t = 0; t < y.rows; ++t) {
    const std::span<Choice> choices = choices_of(t);
    if (per_expert())
      std::sort(choices.begin(), choices.end(),
                [](const Choice& a, const Choice& b) { return a.id < b.id; });
    terms_.clear();
    for (auto c = choices.begin(); c != choices.end(); ++c)
      if (per_expert() || c == choices.begin() || c->rank != c[-1].rank)
        terms_.push_back(
            {answer_of(arrived, sums, *c, std::ssize(terms_)), per_expert() ? c->weight : 1});
    p_.kernels.add_rows({terms_.data(), static_cast<int>(terms_.size()),
                         floats ? cpu::ActivationType::kF32 : cpu::ActivationType::kBF16,
                         y.row<float>(t), p_.shape.dim});
  }
}

// In the order in which the rows came. Floats are sent from where they are.
const Courier::Arrived& RowExchange::send_answers(const TensorView& sums) {
  if (p_.shape.back == RowFormat::kF32)
    return answers_->exchange(static_cast<const std::byte*>(sums.data), n_rows_of_, n_answers_);
  answers_->begin(n_rows_of_);
  int64_t row = n_rows_of_[p_.group.rank()];
  for (const int r : answers_->ranks_in_order()) {
    if (r == p_.group.rank()) continue;
    for (int64_t i = 0; i < n_rows_of_[r]; ++i)
      back_.encode(sums.row<float>(row++), answers_->place(r, i));
  }
  return answers_->end(n_answers_);
}

// Own answers are the first of the sums, rounded as those that travel. index: among a token's.
const void* RowExchange::answer_of(const Courier::Arrived& arrived, const TensorView& sums,
                                   const Choice& choice, int64_t index) {
  if (choice.rank != p_.group.rank() || p_.shape.back == RowFormat::kF32)
    return arrived.items[choice.rank] + choice.answer * back_.bytes();
  cpu::bf16* const rounded = own_answers_.data() + index * p_.shape.dim;
  p_.kernels.encode_bf16({sums.row<float>(choice.answer), rounded, p_.shape.dim});
  return rounded;
}

}  // namespace

int64_t row_exchange_bytes(ExchangeMode mode, int n_ranks, const ExchangeShape& shape) {
  const auto courier_bytes = [&](const ItemSizes& sizes) {
    return mode == ExchangeMode::kLowLatency ? window_courier_bytes(sizes, n_ranks)
                                             : counting_courier_bytes(sizes);
  };
  const int64_t of_row = 4 * int64_t{shape.dim} + 8 * shape.n_active;
  return most_rows(n_ranks, shape) * of_row + courier_bytes(sizes_of_parcels(n_ranks, shape)) +
         courier_bytes(sizes_of_answers(n_ranks, shape));
}

int64_t exchange_bytes(ExchangeMode mode, int n_ranks, const ExchangeShape& shape) {
  return mode == ExchangeMode::kGather ? gather_exchange_bytes(n_ranks, shape)
                                       : row_exchange_bytes(mode, n_ranks, shape);
}

std::unique_ptr<ExpertExchange> make_row_exchange(ExchangeMode mode, const ExchangeParts& parts) {
  return std::make_unique<RowExchange>(mode, parts);
}

std::unique_ptr<ExpertExchange> make_exchange(ExchangeMode mode, Group& group,
                                              const ExpertOwners& owners,
                                              const cpu::KernelTable& kernels,
                                              const ExchangeShape& shape) {
  const ExchangeParts parts{group, owners, kernels, shape};
  if (mode == ExchangeMode::kGather) return make_gather_exchange(parts);
  return make_row_exchange(mode, parts);
}

}  // namespace tandem
