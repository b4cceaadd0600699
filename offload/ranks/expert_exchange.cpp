#include "offload/ranks/expert_exchange.h"

#include <fmt/format.h>

#include "offload/ranks/exchanges.h"

namespace tandem {
namespace {

// Rows of single experts are not added up on their way, so hosts have no sums of them.
bool crosses_once(ExchangeMode mode, const HostLayout& layout, const ExchangeShape& shape) {
  return mode == ExchangeMode::kAllToAll && layout.has_two_levels() && shape.once_to_each_host &&
         shape.returned == ReturnedRows::kPerRank;
}

}  // namespace

std::string said_of(RowFormats prompts, RowFormats decode) {
  if (prompts.there != RowFormat::kFp8) return "";
  const auto sums = [](RowFormats of) {
    return of.back == RowFormat::kF32 ? "as floats" : "in BF16";
  };
  std::string said = fmt::format(", rows in FP8, sums {}", sums(prompts));
  if (decode.back != prompts.back) said += fmt::format(", those of decode {}", sums(decode));
  return said;
}

int64_t exchange_bytes(ExchangeMode mode, const HostLayout& layout, const ExchangeShape& shape) {
  if (mode == ExchangeMode::kGather) return gather_exchange_bytes(layout.n_ranks(), shape);
  if (crosses_once(mode, layout, shape)) return host_exchange_bytes(layout, shape);
  return row_exchange_bytes(mode, layout.n_ranks(), shape);
}

std::unique_ptr<ExpertExchange> make_exchange(ExchangeMode mode, const HostGroups& groups,
                                              const ExpertOwners& owners,
                                              const cpu::KernelTable& kernels,
                                              const ExchangeShape& shape) {
  const ExchangeParts parts{groups.all(), owners, kernels, shape};
  if (mode == ExchangeMode::kGather) return make_gather_exchange(parts);
  if (crosses_once(mode, groups.layout(), shape)) return make_host_exchange(groups, parts);
  return make_row_exchange(mode, parts);
}

}  // namespace tandem
