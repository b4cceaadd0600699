#include "offload/workers/shards.h"

#include <algorithm>
#include <charconv>
#include <functional>
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

// What the text of layers that are not all the same adds to their experts.
template <class Layer>
std::string said_of_layers(const std::vector<Layer>& layers) {
  const bool same =
      std::adjacent_find(layers.begin(), layers.end(), std::not_equal_to<>()) == layers.end();
  return same ? "" : ", not all in every layer";
}

}  // namespace

std::vector<Shard> shards_of(const std::vector<ExpertsOfLayers>& owned, int n_layers,
                             int n_experts) {
  std::vector<Shard> shards;
  for (int layer = 0; layer < n_layers; ++layer)
    for (int expert = 0; expert < n_experts; ++expert) {
      std::vector<int> owners;
      for (size_t worker = 0; worker < owned.size(); ++worker)
        if (owned[worker][layer][expert]) owners.push_back(static_cast<int>(worker));
      auto same = std::find_if(shards.begin(), shards.end(),
                               [&](const Shard& shard) { return shard.owners == owners; });
      if (same == shards.end()) {
        shards.push_back({std::vector<std::vector<int>>(n_layers), std::move(owners)});
        same = std::prev(shards.end());
      }
      same->experts[layer].push_back(expert);
    }
  return shards;
}

std::vector<int> in_any_layer(const ExpertsOfLayers& experts) {
  std::vector<bool> any;
  for (const std::vector<bool>& of_layer : experts) {
    any.resize(std::max(any.size(), of_layer.size()));
    for (size_t e = 0; e < of_layer.size(); ++e) any[e] = any[e] || of_layer[e];
  }
  return listed(any);
}

std::vector<int> in_any_layer(const Shard& shard) {
  std::vector<int> any;
  for (const std::vector<int>& of_layer : shard.experts)
    any.insert(any.end(), of_layer.begin(), of_layer.end());
  std::sort(any.begin(), any.end());
  any.erase(std::unique(any.begin(), any.end()), any.end());
  return any;
}

std::string text_of_layers(const ExpertsOfLayers& experts) {
  return text_of_experts(in_any_layer(experts)) + said_of_layers(experts);
}

std::string text_of_shard(const Shard& shard) {
  return text_of_experts(in_any_layer(shard)) + said_of_layers(shard.experts);
}

bool has_any(const ExpertsOfLayers& experts) { return n_of_all_layers(experts) > 0; }

int64_t n_of_all_layers(const ExpertsOfLayers& experts) {
  int64_t n = 0;
  for (const std::vector<bool>& of_layer : experts)
    n += std::count(of_layer.begin(), of_layer.end(), true);
  return n;
}

void add_layers(const ExpertsOfLayers& experts, ExpertsOfLayers& to) {
  to.resize(std::max(to.size(), experts.size()));
  for (size_t l = 0; l < experts.size(); ++l) {
    to[l].resize(std::max(to[l].size(), experts[l].size()));
    for (size_t e = 0; e < experts[l].size(); ++e)
      if (experts[l][e]) to[l][e] = true;
  }
}

ExpertsOfLayers layers_without(ExpertsOfLayers experts, const ExpertsOfLayers& others) {
  for (size_t l = 0; l < std::min(experts.size(), others.size()); ++l)
    for (size_t e = 0; e < std::min(experts[l].size(), others[l].size()); ++e)
      if (others[l][e]) experts[l][e] = false;
  return experts;
}

ExpertsOfLayers common_layers(const ExpertsOfLayers& a, const ExpertsOfLayers& b) {
  return layers_without(a, layers_without(a, b));
}

ExpertsOfLayers experts_of_shard(const Shard& shard, int n_layers, int n_experts) {
  ExpertsOfLayers experts(n_layers, std::vector<bool>(n_experts));
  for (size_t layer = 0; layer < shard.experts.size(); ++layer)
    for (const int expert : shard.experts[layer]) experts.at(layer).at(expert) = true;
  return experts;
}

bool has_one_of(const ExpertsOfLayers& experts, const Shard& shard) {
  for (size_t layer = 0; layer < std::min(experts.size(), shard.experts.size()); ++layer)
    for (const int expert : shard.experts[layer])
      if (experts[layer][expert]) return true;
  return false;
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
