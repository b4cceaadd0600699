// Expert parallelism of ranks with tokens of their own: dispatch() sends the rows of tokens to the
// ranks that have their experts, which compute them as on one machine, and combine() sends the sums
// back.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "comm/host_groups.h"
#include "offload/ranks/expert_owners.h"
#include "offload/ranks/row_format.h"
#include "ops/expert_pool.h"

namespace tandem {

// How rows travel. A token's experts are added up in float, in an order that depends on the routing
// alone: the same in every mode, but where rows cross once to each host.
enum class ExchangeMode : uint8_t {
  // All rows go to all ranks, and their sums are reduced.
  kGather,
  // A row goes once to each rank that has one of its experts: first the numbers of rows, then the
  // rows. To hosts of several ranks it crosses once, unless the shape says otherwise, and is sent
  // on there (host_exchange.cpp).
  kAllToAll,
  // A row goes to each of those ranks through windows: buffers of fixed size in which the number of
  // rows stands before the rows. No rank waits for another one to learn a size.
  kLowLatency,
};

constexpr ExchangeMode kExchangeModes[] = {ExchangeMode::kGather, ExchangeMode::kAllToAll,
                                           ExchangeMode::kLowLatency};
constexpr const char* name_of(ExchangeMode mode) {
  constexpr const char* kNames[] = {"gather", "all-to-all", "low-latency"};
  return kNames[static_cast<int>(mode)];
}

// The formats in which rows and sums travel between CPUs where `formats` are asked for: gather
// reduces sums, as floats.
constexpr RowFormats formats_by(ExchangeMode mode, RowFormats formats) {
  if (mode == ExchangeMode::kGather) formats.back = RowFormat::kF32;
  return formats;
}

// What is said of the formats of prompts and decode behind the names of the modes: ", rows in FP8,
// sums in BF16"; empty where rows and sums travel exactly.
std::string said_of(RowFormats prompts, RowFormats decode);

// What is sent back for a token by kAllToAll and kLowLatency; kGather knows only the first.
enum class ReturnedRows : uint8_t {
  // The sum of each rank's experts, added in ascending order of ranks: the fewest bytes. Where rows
  // cross once to each host, the sums of a host's ranks are added there in that order, as floats,
  // rounded once, and those of the hosts in ascending order of hosts.
  kPerRank,
  // The row of each expert, weighted and added in ascending order of experts: the bits of one rank
  // that has all experts, if its experts are not sliced among NUMA nodes.
  kPerExpert,
};

// The same on all ranks.
struct ExchangeShape {
  int dim, n_active;
  int max_tokens;  // of a rank
  RowFormat there = RowFormat::kF32;
  RowFormat back = RowFormat::kF32;  // kF32, or kBf16 for kAllToAll and kLowLatency
  ReturnedRows returned = ReturnedRows::kPerRank;
  bool once_to_each_host = true;  // kAllToAll between hosts of several ranks; else to each rank
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
  // returned, dim], dense, 0 for rows without experts. May be overwritten.
  virtual void combine(TensorView sums, TensorView y) = 0;
};

// Bytes of the large buffers that make_exchange() allocates at most on a rank, or its group does
// for sums.
int64_t exchange_bytes(ExchangeMode mode, const HostLayout& layout, const ExchangeShape& shape);

// References outlive the object. All ranks call it.
std::unique_ptr<ExpertExchange> make_exchange(ExchangeMode mode, const HostGroups& groups,
                                              const ExpertOwners& owners,
                                              const cpu::KernelTable& kernels,
                                              const ExchangeShape& shape);

}  // namespace tandem
