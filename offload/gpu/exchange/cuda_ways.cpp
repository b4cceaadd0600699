#include "offload/gpu/exchange/cuda_ways.h"

#include <fmt/format.h>

#include <algorithm>

#include "comm/agreement.h"
#include "core/clock.h"
#include "model/micro_batches.h"
#include "offload/gpu/exchange/random_rows.h"

namespace tandem {
namespace {

// The most rows of a rank in all micro-batches of a step together. These are of equal size, but
// each may have the rest of a whole sequence more.
int64_t most_rows(BackboneGrid grid, int max_tokens, int micro_batches) {
  const int n = micro_batches == ExpertPool::kMeasured ? kMaxMicroBatches : micro_batches;
  if (n == 1) return grid.most_tokens(max_tokens) / grid.n_ranks();
  return int64_t{n} * grid.most_tokens(most_tokens_of(n - 1, max_tokens)) / grid.n_ranks();
}

int64_t rows_of_prompts(const CudaWaysAsked& a) {
  return most_rows(a.grid, a.max_tokens, a.micro_batches);
}
int64_t rows_of_decode(const CudaWaysAsked& a) {
  return most_rows(a.grid, std::min(a.max_tokens, CudaWays::kDecodeTokens), a.micro_batches);
}

// The time of a layer's exchange, the same number on all ranks.
double seconds_of(CudaExchange& exchange, const CudaExchange::Parts& parts, Group& group,
                  int64_t n_rows) {
  constexpr int kRounds = 5;
  std::optional<CudaRandomRows> rows;
  run_on_all(group, [&] { rows.emplace(parts.config, parts.ranks.rank(), n_rows); });
  double least = 0;
  for (int round = 0; round <= kRounds; ++round) {
    group.barrier();
    const auto start = Clock::now();
    rows->exchange(exchange);
    parts.stream.wait();
    const double seconds = seconds_since(start);
    if (round == 1 || (round > 1 && seconds < least)) least = seconds;  // the first one connects
  }
  std::vector<double> of_ranks(parts.ranks.n_ranks());
  group.all_gather_values(least, std::span(of_ranks));
  return *std::max_element(of_ranks.begin(), of_ranks.end());
}

struct Chosen {
  ExchangeMode mode;
  std::unique_ptr<CudaExchange> exchange;
  std::string why_not;  // another mode cannot be used
};

// The fastest of the modes that the GPUs can use, or the first of these. The memory of what was
// measured before is free again. The last mode is one that all can use.
Chosen choose(const CudaExchange::Parts& parts, Group& group, std::span<const ExchangeMode> modes,
              bool measures, int64_t n_rows) {
  std::optional<ExchangeMode> best;
  double best_seconds = 0;
  std::string why_not;
  for (const ExchangeMode mode : modes) {
    std::unique_ptr<CudaExchange> exchange;
    try {
      exchange = make_cuda_exchange(mode, parts, group, n_rows);
    } catch (const AgreedError& error) {  // a GPU has no memory, or reaches that of none
      if (error.while_running || mode == modes.back()) throw;
      why_not = error.what();
      continue;
    }
    if (!measures) return {mode, std::move(exchange), why_not};
    const double seconds = seconds_of(*exchange, parts, group, n_rows);
    exchange->close();
    group.barrier();
    if (best && seconds >= best_seconds) continue;
    best = mode;
    best_seconds = seconds;
  }
  return {*best, make_cuda_exchange(*best, parts, group, n_rows), why_not};
}

constexpr ExchangeMode kOfPrompts[] = {ExchangeMode::kAllToAll, ExchangeMode::kGather};
constexpr ExchangeMode kOfDecode[] = {ExchangeMode::kLowLatency, ExchangeMode::kGather};
constexpr ExchangeMode kOnlyGather[] = {ExchangeMode::kGather};

}  // namespace

std::string CudaWays::said() const {
  return fmt::format("prompts by {}, decode by {}{}{}{}", name_of(mode_of_prompts),
                     name_of(mode_of_decode), said_of(formats, mode_of_prompts, mode_of_decode),
                     why_not.empty() ? "" : "; not others: ", why_not);
}

CudaWays choose_cuda_ways(const CudaExchange::Parts& parts, Group& group,
                          const CudaWaysAsked& asked) {
  const int64_t n = rows_of_prompts(asked);
  if (asked.mode || !asked.sends_parcels) {
    const ExchangeMode mode = asked.mode.value_or(ExchangeMode::kGather);
    return {mode, mode, make_cuda_exchange(mode, parts, group, n), nullptr, {}, parts.formats};
  }
  Chosen prompts = choose(parts, group, kOfPrompts, asked.measures, n);
  const auto of_decode = asked.on_one_host ? std::span<const ExchangeMode>(kOfDecode)
                                           : std::span<const ExchangeMode>(kOnlyGather);
  Chosen decode = choose(parts, group, of_decode, asked.measures, rows_of_decode(asked));
  if (decode.mode == prompts.mode) decode.exchange.reset();
  return {prompts.mode,
          decode.mode,
          std::move(prompts.exchange),
          std::move(decode.exchange),
          decode.why_not.empty() ? prompts.why_not : decode.why_not,
          parts.formats};
}

int64_t cuda_ways_bytes(const ModelConfig& config, const CudaWaysAsked& asked) {
  const auto most_of = [&](std::span<const ExchangeMode> modes, int64_t n_rows) {
    int64_t most = 0;
    for (const ExchangeMode mode : modes)
      most = std::max(most,
                      cuda_exchange_bytes(mode, config, asked.grid.n_ranks(), n_rows, asked.rows));
    return most;
  };
  const int64_t n = rows_of_prompts(asked);
  if (asked.mode) return most_of(std::span(&*asked.mode, 1), n);
  if (!asked.sends_parcels) return most_of(kOnlyGather, n);
  return most_of(kOfPrompts, n) + most_of(kOfDecode, rows_of_decode(asked));
}

}  // namespace tandem
