#include "offload/gpu/exchange/cuda_exchange.h"

#include <algorithm>

#include "comm/agreement.h"

namespace tandem {

std::unique_ptr<CudaExchange> make_cuda_exchange(ExchangeMode mode,
                                                 const CudaExchange::Parts& parts, Group& group,
                                                 int64_t max_rows) {
  std::unique_ptr<CudaExchange> made;
  run_on_all(group, [&] {
    made = mode == ExchangeMode::kGather     ? make_cuda_gather(parts, max_rows)
           : mode != ExchangeMode::kAllToAll ? make_cuda_low_latency(parts, max_rows)
           : parts.hosts                     ? make_cuda_host_all_to_all(parts, max_rows)
                                             : make_cuda_all_to_all(parts, max_rows);
  });
  made->open(group);
  return made;
}

int64_t cuda_exchange_bytes(ExchangeMode mode, const ModelConfig& config, const HostLayout& layout,
                            int64_t max_rows, ExpertRows rows) {
  const int n_ranks = layout.n_ranks();
  const RowFormats formats = row_formats(rows, false);  // the larger ones
  if (mode == ExchangeMode::kGather) return cuda_gather_bytes(config, n_ranks, max_rows, formats);
  if (mode == ExchangeMode::kAllToAll) {
    const int64_t to_each = cuda_all_to_all_bytes(config, n_ranks, max_rows, formats);
    if (!CudaHosts::fit(layout)) return to_each;
    return CudaHosts::bytes_for(config.n_all_layers(), config.router.n_experts, layout) +
           std::max(to_each, cuda_host_all_to_all_bytes(config, layout, max_rows, formats));
  }
  return cuda_low_latency_bytes(config, n_ranks, max_rows, formats);
}

}  // namespace tandem
