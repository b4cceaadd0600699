// Expert parallelism of ranks with tokens of their own: dispatch() sends the rows of tokens to the
// ranks that have their experts, which compute them as on one machine, and combine() sends the sums
// back. A row may still go several times between two hosts.
#pragma once
#include <memory>
#include <vector>

#include "comm/group.h"
#include "offload/ranks/row_format.h"
#include "ops/expert_pool.h"

namespace tandem {

// Which ranks have each expert of each layer; the same on every rank.
class ExpertOwners {
 public:
  ExpertOwners(int n_layers, int n_experts)
      : n_experts_(n_experts), ranks_(static_cast<size_t>(n_layers) * n_experts) {}
  // `rank` has the expert too. All ranks add replicas in the same order.
  void add(int layer, int expert, int rank) { ranks_[index(layer, expert)].push_back(rank); }
  // Several ranks have replicas. An expert without ranks is left out of all sums.
  const std::vector<int>& ranks(int layer, int expert) const {
    return ranks_[index(layer, expert)];
  }
  // The rank that computes `expert` for a row, -1: none, as for a negative id. Rows use replicas in
  // turn.
  int owner(int layer, int expert, int64_t row) const {
    if (expert < 0) return -1;
    const std::vector<int>& all = ranks(layer, expert);
    return all.empty() ? -1 : all[row % std::ssize(all)];
  }
  // The ids [rows, n_active] of a layer with those that `rank` does not compute as -1, in `out`.
  TensorView ids_of(int rank, int layer, const TensorView& ids, std::vector<int32_t>& out) const {
    out.resize(ids.rows * ids.cols);
    for (int64_t t = 0; t < ids.rows; ++t)
      for (int64_t k = 0; k < ids.cols; ++k) {
        const int32_t id = ids.row<int32_t>(t)[k];
        out[t * ids.cols + k] = owner(layer, id, t) == rank ? id : -1;
      }
    return {out.data(), ids.rows, ids.cols, ids.cols, DType::kI32};
  }

 private:
  size_t index(int layer, int expert) const {
    check(expert >= 0 && expert < n_experts_, "number of an expert");
    return static_cast<size_t>(layer) * n_experts_ + expert;
  }

  int n_experts_;
  std::vector<std::vector<int>> ranks_;  // [layers * n_experts]
};

// How rows travel. In every mode a token's experts are added up in float, in an order that depends
// on the routing alone.
enum class ExchangeMode : uint8_t {
  // All rows go to all ranks, and their sums are reduced.
  kGather,
  // A row goes to each rank that has one of its experts: first the numbers of rows, then the rows.
  kAllToAll,
  // The same through windows: buffers of fixed size in which the number of rows stands before the
  // rows. No rank waits for another one to learn a size.
  kLowLatency,
};

constexpr ExchangeMode kExchangeModes[] = {ExchangeMode::kGather, ExchangeMode::kAllToAll,
                                           ExchangeMode::kLowLatency};
constexpr const char* name_of(ExchangeMode mode) {
  constexpr const char* kNames[] = {"gather", "all-to-all", "low-latency"};
  return kNames[static_cast<int>(mode)];
}

// What is sent back for a token by kAllToAll and kLowLatency; kGather knows only the first.
enum class ReturnedRows : uint8_t {
  kPerRank,  // the sum of each rank's experts, added in ascending order of ranks: the fewest bytes
  // The row of each expert, weighted and added in ascending order of experts: the bits of one rank
  // that has all experts, if its experts are not sliced among NUMA nodes.
  kPerExpert,
};

// The same on all ranks.
struct ExchangeShape {
  int dim, n_active;
  int max_tokens;  // of a rank
  RowFormat there = RowFormat::kF32;
  RowFormat back = RowFormat::kF32;  // only for kAllToAll and kLowLatency; others send floats
  ReturnedRows returned = ReturnedRows::kPerRank;
};

// The exchange of one ticket: two micro-batches in flight need two. All ranks make the same calls
// in the same order, also those without tokens. Calls throw what Group throws, and allocate nothing
// once they were as large as they get.
class ExpertExchange {
 public:
  virtual ~ExpertExchange() = default;
  // The most rows that dispatch() returns.
  virtual int64_t max_rows() const = 0;
  // Called before the layers of a step: what each rank has, [ranks], from 0 to max_tokens.
  virtual void begin(std::span<const int64_t> n_tokens) = 0;
  // Returns what this rank has to compute; experts of other ranks have id -1. x is kF32. Valid
  // until the next dispatch().
  virtual ExpertBatch dispatch(const ExpertBatch& mine) = 0;
  // y += the sums of this rank's tokens, [n_tokens, dim]. sums: kF32 [rows that dispatch()
  // returned, dim], dense, 0 for rows without experts; overwritten.
  virtual void combine(TensorView sums, TensorView y) = 0;
};

// References outlive the object.
std::unique_ptr<ExpertExchange> make_exchange(ExchangeMode mode, Group& group,
                                              const ExpertOwners& owners,
                                              const cpu::KernelTable& kernels,
                                              const ExchangeShape& shape);

}  // namespace tandem
