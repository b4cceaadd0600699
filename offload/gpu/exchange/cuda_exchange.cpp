#include "offload/gpu/exchange/cuda_exchange.h"

#include <algorithm>

#include "comm/agreement.h"

namespace tandem {
namespace {

std::unique_ptr<CudaExchange> made(ExchangeMode mode, CudaExchange::Parts parts, int64_t max_rows) {
  parts.formats = formats_by(mode, parts.hosts, parts.formats);
  if (mode == ExchangeMode::kGather) return make_cuda_gather(parts, max_rows);
  if (parts.hosts) return make_cuda_host_exchange(mode, parts, max_rows);
  if (mode == ExchangeMode::kAllToAll) return make_cuda_all_to_all(parts, max_rows);
  return make_cuda_low_latency(parts, max_rows);
}

}  // namespace

std::unique_ptr<CudaExchange> make_cuda_exchange(ExchangeMode mode,
                                                 const CudaExchange::Parts& parts, Group& group,
                                                 int64_t max_rows) {
  std::unique_ptr<CudaExchange> exchange;
  run_on_all(group, [&] { exchange = made(mode, parts, max_rows); });
  try {
    exchange->open(group);
  } catch (const AgreedError&) {  // some ranks have opened the windows of others
    exchange->close();
    group.barrier();
    throw;
  }
  return exchange;
}

int64_t cuda_exchange_bytes(ExchangeMode mode, const ModelConfig& config, const HostLayout& layout,
                            int64_t max_rows, ExpertRows rows) {
  const int n_ranks = layout.n_ranks();
  const auto formats = [&](bool by_hosts) {
    return formats_by(mode, by_hosts, row_formats(rows, false));  // the larger ones
  };
  int64_t to_each = 0;
  if (mode == ExchangeMode::kGather)
    return cuda_gather_bytes(config, n_ranks, max_rows, formats(false));
  if (mode == ExchangeMode::kAllToAll)
    to_each = cuda_all_to_all_bytes(config, n_ranks, max_rows, formats(false));
  else if (layout.n_hosts() == 1)  // GPUs of several hosts have no windows in each other's memory
    to_each = cuda_low_latency_bytes(config, n_ranks, max_rows, formats(false));
  if (!layout.has_equal_hosts()) return to_each;
  return CudaHosts::bytes_for(config.n_all_layers(), config.router.n_experts, layout) +
         std::max(to_each, cuda_host_exchange_bytes(mode, config, layout, max_rows, formats(true)));
}

}  // namespace tandem
