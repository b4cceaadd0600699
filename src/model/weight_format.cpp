#include "model/weight_format.h"

namespace tandem {
namespace {

struct Named {
  const char* name;
  WeightFormat format;
};
constexpr Named kFormats[] = {{"fp8", {DType::kF8E4M3}},
                              {"bf16", {DType::kBF16}},
                              {"fp16", {DType::kF16}},
                              {"fp32", {DType::kF32}},
                              {"int8", {DType::kI8}},
                              {"int4", {DType::kI4TwoLevel, 64}},
                              {"int4-32", {DType::kI4TwoLevel, 32}},
                              {"int4-128", {DType::kI4TwoLevel, 128}},
                              {"int4-32-bf16", {DType::kI4, 32}},
                              {"int4-64-bf16", {DType::kI4, 64}},
                              {"int4-128-bf16", {DType::kI4, 128}}};

}  // namespace

std::optional<WeightFormat> find_weight_format(const std::string& name) {
  for (const Named& named : kFormats)
    if (name == named.name) return named.format;
  return {};
}

WeightFormat weight_format(const std::string& name) {
  const auto found = find_weight_format(name);
  require(found.has_value(), "unknown format {}: choose one of {}", name, weight_format_names());
  return *found;
}

std::string weight_format_names() {
  std::string names;
  for (const Named& named : kFormats)
    names += (names.empty() ? "" : ", ") + std::string(named.name);
  return names;
}

std::string format_name(WeightFormat format) {
  for (const Named& named : kFormats)
    if (named.format.dtype == format.dtype && named.format.group == format.group) return named.name;
  check(false, "a format of weights");
  return {};
}

}  // namespace tandem
