// Rows that go to the ranks of a group that compute them, and the sums that come back. Which rank
// computes which expert of a row is known before (row_exchange.cpp, host_exchange.cpp).
#pragma once
#include <memory>
#include <vector>

#include "core/memory.h"
#include "offload/ranks/courier.h"
#include "offload/ranks/expert_exchange.h"

namespace tandem {

class RankRows {
 public:
  struct Limits {
    int64_t max_sent;  // rows that a rank sends, the same on all ranks of the group
    int64_t max_rows;  // that a rank gets, each from one rank
  };
  // max_tokens of the shape is not read. kAllToAll or kLowLatency. All ranks of the group call it,
  // and throw Error together where kLowLatency needs memory that they do not share.
  RankRows(ExchangeMode mode, Group& group, const cpu::KernelTable& kernels,
           const ExchangeShape& shape, const Limits& limits);
  // Bytes of a rank of n_ranks.
  static int64_t bytes_for(ExchangeMode mode, int n_ranks, const ExchangeShape& shape,
                           const Limits& limits);
  int64_t max_rows() const { return max_rows_; }

  // Between begin() and dispatch() this rank adds its rows.
  void begin();
  struct Row {
    const float* x;            // [dim]; not read where it is encoded
    const std::byte* encoded;  // as RowCodec does; null: it is not yet
    const int32_t* ids;        // [n_active]
    const float* weights;      // [n_active]
    const int32_t* ranks;      // [n_active] that compute these experts; -1: none does
  };
  // The row stays where it is until dispatch() returns.
  void add(const Row& row);
  // All ranks call it. `like`: layer and micro-batch. What it returns is valid until the next
  // begin().
  ExpertBatch dispatch(const ExpertBatch& like);

  // Sums of the rows that dispatch() returned, as ExpertExchange::combine() takes them, come back.
  // All ranks call it.
  void send_back(const TensorView& sums);
  // What belongs to the row that was added as number `row`, in the order in which it is to be
  // added, as floats or BF16 (`back` of the shape). Valid until the next call.
  std::span<const cpu::WeightedRow> terms_of(int64_t row);

 private:
  // An expert of a row, and the answer that holds it: the answer-th of those from `rank`.
  struct Choice {
    int rank;
    int32_t id;
    float weight;
    int64_t answer;
  };
  using Choices = std::span<const Choice>;
  bool per_expert() const { return shape_.returned == ReturnedRows::kPerExpert; }
  std::span<Choice> choices_of(int64_t row) {
    return std::span(choices_).subspan(row * shape_.n_active, n_choices_[row]);
  }
  // The first of a row's choices, up to those of another rank.
  static Choices of_first_rank(Choices choices);
  void send_rows();
  ExpertBatch receive_rows(const ExpertBatch& like);
  ExpertBatch arrived_rows(const ExpertBatch& like, const Courier::Arrived& arrived);
  void write_lists(Choices choices, std::byte* lists) const;
  void compute_here(const std::byte* encoded, const std::byte* lists);
  float* x_row(int64_t i) const { return reinterpret_cast<float*>(x_.data()) + i * shape_.dim; }
  const Courier::Arrived& send_answers(const TensorView& sums);
  const void* answer_of(const Choice& choice, int64_t index);

  const int rank_;
  const cpu::KernelTable& kernels_;
  const ExchangeShape shape_;
  const int64_t max_rows_, parcel_bytes_;
  const RowCodec there_, back_;
  const bool in_parcels_;  // rows are computed where they arrive: as floats, one after another
  std::unique_ptr<Courier> parcels_, answers_;

  // The rows of this rank.
  int64_t n_added_ = 0;
  struct Source {
    const float* x;
    const std::byte* encoded;
  };
  std::vector<Source> sources_;                 // [max_sent]
  std::vector<Choice> choices_;                 // [max_sent, n_active]
  std::vector<int64_t> n_choices_;              // [max_sent]
  std::vector<int64_t> n_parcels_, n_answers_;  // [ranks] that are sent there, that come back
  std::vector<int64_t> n_sent_;                 // [ranks] parcels so far
  std::vector<std::byte> own_parcel_;           // of a row, before it is decoded
  std::vector<cpu::WeightedRow> terms_;         // answers of one row
  std::vector<cpu::bf16> own_answers_;          // [n_active, dim] of one row, if they are BF16

  // The rows that this rank computes, and what has come back.
  Buffer x_;              // [max_rows, dim]
  Buffer ids_, weights_;  // [max_rows, n_active]
  int64_t n_rows_ = 0;
  std::vector<int64_t> n_rows_of_;  // [ranks]
  TensorView sums_ = {};
  const Courier::Arrived* returned_ = nullptr;
};

}  // namespace tandem
