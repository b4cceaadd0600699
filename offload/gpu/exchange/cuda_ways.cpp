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

std::unique_ptr<CudaExchange> make(CudaWay way, CudaExchange::Parts parts, Group& group,
                                   int64_t n_rows) {
  if (!way.by_hosts) parts.hosts = nullptr;
  return make_cuda_exchange(way.mode, parts, group, n_rows);
}

struct Chosen {
  CudaWay way;
  std::unique_ptr<CudaExchange> exchange;
  std::string why_not;  // another way cannot be used
};

// The fastest of the ways that the GPUs can use, or the first of these. The memory of what was
// measured before is free again. The last way is one that all can use.
Chosen choose(const CudaExchange::Parts& parts, Group& group, std::span<const CudaWay> ways,
              bool measures, int64_t n_rows) {
  std::optional<CudaWay> best;
  double best_seconds = 0;
  std::string why_not;
  for (const CudaWay& way : ways) {
    std::unique_ptr<CudaExchange> exchange;
    try {
      exchange = make(way, parts, group, n_rows);
    } catch (const AgreedError& error) {  // a GPU has no memory, or reaches that of none
      if (error.while_running || &way == &ways.back()) throw;
      why_not = error.what();
      continue;
    }
    if (!measures) return {way, std::move(exchange), why_not};
    const double seconds = seconds_of(*exchange, parts, group, n_rows);
    exchange->close();
    group.barrier();
    if (best && seconds >= best_seconds) continue;
    best = way;
    best_seconds = seconds;
  }
  return {*best, make(*best, parts, group, n_rows), why_not};
}

// What is measured, that with the fewest bytes first.
std::vector<CudaWay> ways_of_prompts(const HostLayout& hosts) {
  std::vector<CudaWay> ways = {{ExchangeMode::kAllToAll}, {ExchangeMode::kGather}};
  if (hosts.has_equal_hosts()) ways.insert(ways.begin(), {ExchangeMode::kAllToAll, true});
  return ways;
}
std::vector<CudaWay> ways_of_decode(const HostLayout& hosts) {
  if (hosts.n_hosts() > 1 && !hosts.has_equal_hosts()) return {{ExchangeMode::kGather}};
  return {{ExchangeMode::kLowLatency, hosts.n_hosts() > 1}, {ExchangeMode::kGather}};
}

std::string said_of_way(CudaWay way) {
  return fmt::format("{}{}", name_of(way.mode), way.by_hosts ? " once to each host" : "");
}

}  // namespace

std::string CudaWays::said() const {
  return fmt::format("prompts by {}, decode by {}{}{}{}", said_of_way(of_prompts),
                     said_of_way(of_decode),
                     said_of(formats_by(of_prompts.mode, of_prompts.by_hosts, formats),
                             formats_by(of_decode.mode, of_decode.by_hosts, formats)),
                     why_not.empty() ? "" : "; not others: ", why_not);
}

CudaWays choose_cuda_ways(const CudaExchange::Parts& parts, Group& group,
                          const CudaWaysAsked& asked) {
  const int64_t n = rows_of_prompts(asked);
  if (asked.mode || !asked.sends_parcels) {
    const ExchangeMode mode = asked.mode.value_or(ExchangeMode::kGather);
    const CudaWay way = {mode, parts.hosts && mode != ExchangeMode::kGather};
    return {.of_prompts = way,
            .of_decode = way,
            .prompts = make_cuda_exchange(mode, parts, group, n),
            .decode = nullptr,
            .why_not = {},
            .formats = parts.formats};
  }
  Chosen prompts = choose(parts, group, ways_of_prompts(asked.hosts), asked.measures, n);
  Chosen decode =
      choose(parts, group, ways_of_decode(asked.hosts), asked.measures, rows_of_decode(asked));
  if (decode.way == prompts.way) decode.exchange.reset();
  return {prompts.way,
          decode.way,
          std::move(prompts.exchange),
          std::move(decode.exchange),
          decode.why_not.empty() ? prompts.why_not : decode.why_not,
          parts.formats};
}

int64_t cuda_ways_bytes(const ModelConfig& config, const CudaWaysAsked& asked) {
  const auto most_of = [&](const std::vector<CudaWay>& ways, int64_t n_rows) {
    int64_t most = 0;
    for (const CudaWay& way : ways)
      most = std::max(most, cuda_exchange_bytes(way.mode, config, asked.hosts, n_rows, asked.rows));
    return most;
  };
  const int64_t n = rows_of_prompts(asked);
  if (asked.mode || !asked.sends_parcels)
    return most_of({{asked.mode.value_or(ExchangeMode::kGather)}}, n);
  return most_of(ways_of_prompts(asked.hosts), n) +
         most_of(ways_of_decode(asked.hosts), rows_of_decode(asked));
}

}  // namespace tandem
