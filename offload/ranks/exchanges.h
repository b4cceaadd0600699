// The kinds of exchanges, for make_exchange().
#pragma once
#include "offload/ranks/expert_exchange.h"

namespace tandem {

struct ExchangeParts {
  Group& group;
  const ExpertOwners& owners;
  const cpu::KernelTable& kernels;
  const ExchangeShape shape;
};

std::unique_ptr<ExpertExchange> make_gather_exchange(const ExchangeParts& parts);
int64_t gather_exchange_bytes(int n_ranks, const ExchangeShape& shape);
// kAllToAll or kLowLatency
std::unique_ptr<ExpertExchange> make_row_exchange(ExchangeMode mode, const ExchangeParts& parts);
int64_t row_exchange_bytes(ExchangeMode mode, int n_ranks, const ExchangeShape& shape);
// kAllToAll through two levels; the group of `parts` is groups.all().
std::unique_ptr<ExpertExchange> make_host_exchange(const HostGroups& groups,
                                                   const ExchangeParts& parts);
int64_t host_exchange_bytes(const HostLayout& layout, const ExchangeShape& shape);

}  // namespace tandem
