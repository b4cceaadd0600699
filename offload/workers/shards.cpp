#include "offload/workers/shards.h"

#include <algorithm>
#include <charconv>
#include <optional>
#include <string_view>

#include "core/check.h"

namespace tandem {
namespace {

// The number that `text` is; nothing if it is none.
std::optional<int> number_of(std::string_view text) {
  int number = 0;
  const char* const end = text.data() + text.size();
  const auto [at, error] = std::from_chars(text.data(), end, number);
  if (error != std::errc() || at != end || text.empty() || number < 0) return {};
  return number;
}

}  // namespace

std::vector<Shard> shards_of(const std::vector<std::vector<bool>>& owned, int n_experts) {
  std::vector<Shard> shards;
  for (int expert = 0; expert < n_experts; ++expert) {
    std::vector<int> owners;
    for (size_t worker = 0; worker < owned.size(); ++worker)
      if (owned[worker][expert]) owners.push_back(static_cast<int>(worker));
    const auto same = std::find_if(shards.begin(), shards.end(),
                                   [&](const Shard& shard) { return shard.owners == owners; });
    if (same == shards.end())
      shards.push_back({{expert}, std::move(owners)});
    else
      same->experts.push_back(expert);
  }
  return shards;
}

std::vector<int> listed(const std::vector<bool>& experts) {
  std::vector<int> numbers;
  for (size_t e = 0; e < experts.size(); ++e)
    if (experts[e]) numbers.push_back(static_cast<int>(e));
  return numbers;
}

std::string text_of_experts(const std::vector<int>& experts) {
  std::string text;
  for (size_t i = 0; i < experts.size();) {
    size_t end = i + 1;
    while (end < experts.size() && experts[end] == experts[end - 1] + 1) ++end;
    text += fmt::format("{}{}", text.empty() ? "" : ",", experts[i]);
    if (end - i > 1) text += fmt::format("-{}", experts[end - 1]);
    i = end;
  }
  return text;
}

std::vector<bool> experts_from_text(const std::string& text, int n_experts,
                                    const std::string& option) {
  if (text == "auto") return std::vector<bool>(n_experts, true);
  std::vector<bool> experts(n_experts);
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    const std::string part = text.substr(begin, end - begin);
    const size_t dash = part.find('-');
    const auto first = number_of(part.substr(0, dash));
    const auto last = dash == std::string::npos ? first : number_of(part.substr(dash + 1));
    require(first && last && *first <= *last,
            "{} {}: name experts such as 0-127 or 0-3,8-11, or auto for all", option, text);
    require(*last < n_experts, "{} {}: the model has experts 0 to {}", option, text, n_experts - 1);
    std::fill(experts.begin() + *first, experts.begin() + *last + 1, true);
    begin = end + 1;
  }
  return experts;
}

}  // namespace tandem
