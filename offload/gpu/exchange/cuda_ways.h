// Which forms of exchange the GPUs of replicas use, for prompts and for decode steps.
#pragma once
#include <optional>
#include <string>

#include "model/cost.h"
#include "offload/gpu/exchange/cuda_exchange.h"

namespace tandem {

struct CudaWay {
  ExchangeMode mode;
  bool by_hosts = false;  // a row goes once to each host
  bool operator==(const CudaWay&) const = default;
};

struct CudaWays {
  CudaWay of_prompts, of_decode;
  std::unique_ptr<CudaExchange> prompts;
  // For steps of up to kDecodeTokens tokens of a replica, which may be recorded; null: as prompts.
  std::unique_ptr<CudaExchange> decode;
  static constexpr int kDecodeTokens = kMaxRecordedTokens;
  std::string why_not;      // a mode that would have been measured cannot be used
  RowFormats formats = {};  // CudaExchange::Parts::formats
  // "prompts by all-to-all, decode by low-latency", which of them once to each host, and the
  // formats where they are not exact
  std::string said() const;
};

// What decides; the same on all ranks.
struct CudaWaysAsked {
  // For all steps; nothing: what is faster.
  std::optional<ExchangeMode> mode = {};
  // Otherwise all rows go to all ranks: some hand rows down to their CPUs, or experts are sliced
  // among all GPUs.
  bool sends_parcels = true;
  HostLayout hosts = HostLayout::one_host(1);  // of all ranks
  // Whether times decide. Otherwise the bytes that are sent do: those of parcels are always fewer.
  bool measures = true;
  BackboneGrid grid = {};
  int max_tokens = 1, micro_batches = 1;
  ExpertRows rows = ExpertRows::kExact;  // for which memory is counted
};

// All ranks call it, with a group of the same ranks. Throws AgreedError where the mode that is
// asked for needs memory that a GPU does not have, or that the GPUs do not share.
CudaWays choose_cuda_ways(const CudaExchange::Parts& parts, Group& group,
                          const CudaWaysAsked& asked);
// Bytes on the GPU that the ways may take.
int64_t cuda_ways_bytes(const ModelConfig& config, const CudaWaysAsked& asked);

}  // namespace tandem
