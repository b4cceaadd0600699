#include "bench/measured_curves.h"

#include <algorithm>
#include <map>

#include "core/check.h"
#include "io/json.h"

namespace tandem {
namespace {

constexpr int kChunk = 512;  // tokens of a prompt per step, as in the engine

// Samples of a curve.
struct Samples {
  std::string model;                         // whose shapes were measured
  std::map<double, std::vector<double>> at;  // x, ratios
};
using Kind = std::pair<std::string, std::string>;  // work, format

std::vector<nlohmann::json> rows_of(std::string_view text, const std::string& source);
void add_row(const nlohmann::json& row, std::map<Kind, Samples>& samples);

}  // namespace

std::vector<EfficiencyCurve> measured_curves(std::string_view text, const std::string& source,
                                             const std::string& isa) {
  std::map<Kind, Samples> samples;
  try {
    for (const nlohmann::json& row : rows_of(text, source))
      if (row.is_object() && row.value("isa", "") == isa) add_row(row, samples);
  } catch (const nlohmann::json::exception& error) {
    fail("{}: no row of `tandem bench`: {}", source, json_message(error));
  }
  require(!samples.empty(),
          "{}: no row of `tandem bench experts`, `mlp` or `attention` with --json and {}: measure "
          "with it",
          source, isa);
  std::vector<EfficiencyCurve> curves;
  for (const auto& [kind, s] : samples) {
    curves.push_back({kind.first, kind.second, {}});
    for (const auto& [x, ratios] : s.at) {
      double sum = 0;
      for (const double ratio : ratios) sum += ratio;
      curves.back().points.emplace_back(
          x, std::clamp(sum / static_cast<double>(ratios.size()), 1e-3, kMaxEfficiency));
    }
  }
  return curves;
}

namespace {

std::vector<nlohmann::json> rows_of(std::string_view text, const std::string& source) {
  const size_t begin = text.find_first_not_of(" \t\r\n");
  if (begin != std::string_view::npos && text[begin] == '[') return parse_json(text, source);
  std::vector<nlohmann::json> rows;
  while (!text.empty()) {
    const std::string_view line = text.substr(0, text.find('\n'));
    if (line.find_first_not_of(" \t\r") != std::string_view::npos)
      rows.push_back(parse_json(line, source));
    text.remove_prefix(std::min(line.size() + 1, text.size()));
  }
  return rows;
}

// The planner's curves do not distinguish group sizes.
std::string format_of_curve(const std::string& format) {
  if (!format.starts_with("int4")) return format;
  return format.ends_with("-bf16") ? "int4-bf16" : "int4";
}

void add_row(const nlohmann::json& row, std::map<Kind, Samples>& samples) {
  const std::string bench = row.value("bench", ""), what = row.value("what", "");
  const auto add = [&](const std::string& work, const std::string& format, const char* x) {
    const std::string model =
        row.at("config").get<std::string>() + " " + row.at("format").get<std::string>();
    const double at = row.at(x).get<double>(), ratio = row.at("unhidden_ratio").get<double>();
    if (at <= 0) return;
    Samples& s = samples.try_emplace({work, format}, Samples{model, {}}).first->second;
    if (s.model == model) s.at[at].push_back(ratio);
  };
  if (bench == "experts" && row.value("routing", "") == "uniform")
    add("experts", format_of_curve(row.at("format")), "rows_per_expert");
  if (bench == "mlp") add("dense", row.at("format"), "tokens");
  if (bench == "attention" && what == "decode, absorbed" && row.value("tokens", 1) == 1)
    add("absorbed", "", "context");
  if (bench == "attention" && what == "prefill, restored" && row.value("tokens", 0) == kChunk)
    add("restored", "", "context");
}

}  // namespace
}  // namespace tandem
