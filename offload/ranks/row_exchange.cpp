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
  // Rows that arrive as floats one after another are computed where they are.
  bool stays(const Courier::Arrived& arrived) const {
    return arrived.contiguous && p_.shape.there == RowFormat::kF32 && !per_expert();
  }
  std::span<Choice> choices_of(int64_t token) {
    return std::span(choices_).subspan(token * p_.shape.n_active, n_choices_[token]);
  }
  void choose(const ExpertBatch& mine);
  void send_rows(const ExpertBatch& mine);
  ExpertBatch receive_rows(const ExpertBatch& mine);
  ExpertBatch arrived_rows(const ExpertBatch& mine, const Courier::Arrived& arrived);
  void add_row(const float* x, std::span<const int32_t> ids, std::span<const float> weights);
  const Courier::Arrived& send_answers(const TensorView& sums);
  const float* answer_of(const Courier::Arrived& arrived, const Choice& choice, int64_t index);
  void add_terms(float* y) const;

  const ExchangeParts p_;
  ReplicaChooser chooser_;
  const RowCodec there_, back_;
  std::unique_ptr<Courier> parcels_, answers_;

  // The tokens of this rank.
  std::vector<Choice> choices_;                 // [max_tokens, n_active]
  std::vector<int64_t> n_choices_;              // [max_tokens]
  std::vector<int64_t> n_parcels_, n_answers_;  // [ranks] that are sent there, that come back
  std::vector<int64_t> n_sent_;                 // [ranks] parcels so far
  std::vector<int32_t> ranks_;                  // [n_active] of a token
  struct Term {
    const float* answer;
    float weight;
  };
  std::vector<Term> terms_;              // of one token
  std::vector<float> answers_of_token_;  // [n_active, dim], decoded

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
      choices_(int64_t{parts.shape.max_tokens} * parts.shape.n_active),
      n_choices_(parts.shape.max_tokens),
      n_parcels_(parts.group.size()),
      n_answers_(parts.group.size()),
      n_sent_(parts.group.size()),
      ranks_(parts.shape.n_active),
      answers_of_token_(parts.shape.back == RowFormat::kF32
                            ? 0
                            : int64_t{parts.shape.n_active} * parts.shape.dim),
      x_(max_rows() * parts.shape.dim * 4),
      ids_(max_rows() * parts.shape.n_active * 4),
      weights_(max_rows() * parts.shape.n_active * 4),
      n_rows_of_(parts.group.size()) {
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

void RowExchange::send_rows(const ExpertBatch& mine) {
  std::fill(n_sent_.begin(), n_sent_.end(), 0);
  parcels_->begin(n_parcels_);
  for (int64_t t = 0; t < mine.x.rows; ++t) {
    const std::span<const Choice> choices = choices_of(t);
    const std::byte* encoded = nullptr;
    for (auto c = choices.begin(); c != choices.end();) {
      const int rank = c->rank;
      std::byte* const parcel = parcels_->place(rank, n_sent_[rank]++);
      if (encoded)
        std::memcpy(parcel, encoded, there_.bytes());
      else
        there_.encode(mine.x.row<float>(t), parcel);
      encoded = parcel;
      auto* const ids = reinterpret_cast<int32_t*>(parcel + there_.bytes());
      auto* const weights = reinterpret_cast<float*>(ids + p_.shape.n_active);
      std::fill_n(ids, p_.shape.n_active, -1);
      std::fill_n(weights, p_.shape.n_active, 0.f);
      for (int k = 0; c != choices.end() && c->rank == rank; ++k, ++c) {
        ids[k] = c->id;
        weights[k] = c->weight;
      }
    }
  }
}

// A row for each parcel, or for each of its experts with weight 1.
ExpertBatch RowExchange::receive_rows(const ExpertBatch& mine) {
  const Courier::Arrived& arrived = parcels_->end({});
  n_rows_of_ = arrived.n;
  if (stays(arrived)) return arrived_rows(mine, arrived);
  const int n_active = p_.shape.n_active;
  n_rows_ = 0;
  for (const int r : parcels_->ranks_in_order()) {
    const int64_t before = n_rows_;
    for (int64_t i = 0; i < arrived.n[r]; ++i) {
      const std::byte* const parcel = arrived.items[r] + i * parcel_bytes();
      const auto* const ids = reinterpret_cast<const int32_t*>(parcel + there_.bytes());
      const auto* const weights = reinterpret_cast<const float*>(ids + n_active);
      float* const x = reinterpret_cast<float*>(x_.data()) + n_rows_ * p_.shape.dim;
      there_.decode(parcel, x);
      if (!per_expert()) {
        add_row(x, {ids, size_t(n_active)}, {weights, size_t(n_active)});
        continue;
      }
      constexpr float kOne = 1;
      for (int k = 0; k < n_active && ids[k] >= 0; ++k) add_row(x, {ids + k, 1}, {&kOne, 1});
    }
    n_rows_of_[r] = n_rows_ - before;
  }
  ExpertBatch batch = mine;
  batch.x = {x_.data(), n_rows_, p_.shape.dim, p_.shape.dim};
  batch.routing.ids = {ids_.data(), n_rows_, n_active, n_active, DType::kI32};
  batch.routing.weights = {weights_.data(), n_rows_, n_active, n_active};
  return batch;
}

// The same in the parcels themselves.
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

void RowExchange::add_row(const float* x, std::span<const int32_t> ids,
                          std::span<const float> weights) {
  const int dim = p_.shape.dim, n_active = p_.shape.n_active;
  float* const x_out = reinterpret_cast<float*>(x_.data()) + n_rows_ * dim;
  if (x != x_out) std::copy_n(x, dim, x_out);
  int32_t* const ids_out = reinterpret_cast<int32_t*>(ids_.data()) + n_rows_ * n_active;
  float* const weights_out = reinterpret_cast<float*>(weights_.data()) + n_rows_ * n_active;
  std::fill_n(ids_out, n_active, -1);
  std::copy(ids.begin(), ids.end(), ids_out);
  std::fill_n(weights_out, n_active, 0.f);
  std::copy(weights.begin(), weights.end(), weights_out);
  ++n_rows_;
}

void RowExchange::combine(TensorView sums, TensorView y) {
  check(sums.rows == n_rows_, "sums of the rows that dispatch() returned");
  const Courier::Arrived& arrived = send_answers(sums);
  for (int64_t t = 0; t < y.rows; ++t) {
    const std::span<Choice> choices = choices_of(t);
    if (per_expert())
      std::sort(choices.begin(), choices.end(),
                [](const Choice& a, const Choice& b) { return a.id < b.id; });
    terms_.clear();
    for (auto c = choices.begin(); c != choices.end(); ++c)
      if (per_expert() || c == choices.begin() || c->rank != c[-1].rank)
        terms_.push_back(
            {answer_of(arrived, *c, std::ssize(terms_)), per_expert() ? c->weight : 1});
    add_terms(y.row<float>(t));
  }
}

// y += sum of weight * answer, a piece of the row after the other, so that sums stay in registers
// and level 1.
void RowExchange::add_terms(float* y) const {
  constexpr int64_t kPiece = 256;
  float sum[kPiece];
  for (int64_t first = 0; first < p_.shape.dim; first += kPiece) {
    const int64_t n = std::min<int64_t>(kPiece, p_.shape.dim - first);
    std::fill_n(sum, n, 0.f);
    for (const Term& term : terms_)
      for (int64_t i = 0; i < n; ++i) sum[i] += term.weight * term.answer[first + i];
    for (int64_t i = 0; i < n; ++i) y[first + i] += sum[i];
  }
}

// In the order in which the rows came. Floats are sent from where they are.
const Courier::Arrived& RowExchange::send_answers(const TensorView& sums) {
  if (p_.shape.back == RowFormat::kF32 && sums.stride == sums.cols)
    return answers_->exchange(static_cast<const std::byte*>(sums.data), n_rows_of_, n_answers_);
  answers_->begin(n_rows_of_);
  int64_t row = 0;
  for (const int r : answers_->ranks_in_order())
    for (int64_t i = 0; i < n_rows_of_[r]; ++i)
      back_.encode(sums.row<float>(row++), answers_->place(r, i));
  return answers_->end(n_answers_);
}

// index: of a token's answers, which are decoded side by side.
const float* RowExchange::answer_of(const Courier::Arrived& arrived, const Choice& choice,
                                    int64_t index) {
  const std::byte* const encoded = arrived.items[choice.rank] + choice.answer * back_.bytes();
  if (p_.shape.back == RowFormat::kF32) return reinterpret_cast<const float*>(encoded);
  float* const decoded = answers_of_token_.data() + index * p_.shape.dim;
  back_.decode(encoded, decoded);
  return decoded;
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
