#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <nlohmann/json.hpp>

#include "cli/inspect.h"

namespace tandem {
namespace {

using Json = nlohmann::ordered_json;

// Formats 1234567 as "1,234,567".
std::string grouped(int64_t n) {
  std::string text = std::to_string(n);
  for (int64_t i = static_cast<int64_t>(text.size()) - 3; i > 0; i -= 3) text.insert(i, ",");
  return text;
}

// Three or four significant digits with a fitting unit: "688.6 GB", "36.63 B".
std::string scaled(int64_t n, bool bytes) {
  constexpr const char* kUnits[2][5] = {{"", " k", " M", " B", " T"},
                                        {" bytes", " kB", " MB", " GB", " TB"}};
  double value = static_cast<double>(n);
  int unit = 0;
  for (; value >= 999.95 && unit < 4; ++unit) value /= 1000;
  const int digits = unit == 0 ? 0 : value < 99.995 ? 2 : 1;
  return fmt::format("{:.{}f}{}", value, digits, kUnits[bytes][unit]);
}

std::string plural(int64_t n, const char* what) {
  return fmt::format("{} {}{}", grouped(n), what, n == 1 ? "" : "s");
}

// A table of named shares of `total`, largest first, without empty ones.
std::string share_table(const Json& parts, int64_t total, bool bytes) {
  constexpr int kBarWidth = 18;
  std::vector<std::pair<std::string, int64_t>> rows;
  for (const auto& [name, n] : parts.items())
    if (n.get<int64_t>() > 0) rows.emplace_back(name, n.get<int64_t>());
  std::stable_sort(rows.begin(), rows.end(),
                   [](const auto& a, const auto& b) { return a.second > b.second; });
  std::string text;
  for (auto& [name, n] : rows) {
    if (std::islower(static_cast<unsigned char>(name[0])))  // a class, not a dtype
      std::replace(name.begin(), name.end(), '_', ' ');
    const double share = static_cast<double>(n) / static_cast<double>(total);
    std::string bar;
    for (int i = 0; i < std::lround(share * kBarWidth); ++i) bar += "█";
    text += fmt::format("  {:<16}{:>21}{:>11}{:>7.2f} %{}{}\n", name, grouped(n), scaled(n, bytes),
                        share * 100, bar.empty() ? "" : "  ", bar);
  }
  return text;
}

std::string shape_line(const Json& c, int64_t layers) {
  const auto n = [&](const char* key) { return grouped(c.at(key).get<int64_t>()); };
  const int64_t experts = c.at("routed_experts"), dense = c.at("dense_layers");
  const Json& dims = c.at("head_dims");
  std::string text =
      fmt::format("  width {}, vocabulary {}, {}\n", n("hidden_size"), n("vocab_size"),
                  c.at("tied_head").get<bool>() ? "head tied to the embedding" : "head of its own");
  text += experts == 0
              ? fmt::format("  layers: {}, all dense of width {}\n", layers, n("dense_width"))
              : fmt::format("  layers: {} dense of width {}, {} with experts\n", dense,
                            n("dense_width"), layers - dense);
  if (experts > 0) {
    text += fmt::format("  experts: {} of {} a token, width {}, {} shared", n("experts_per_token"),
                        experts, n("expert_width"), n("shared_experts"));
    if (c.at("expert_groups").get<int>() > 1)
      text += fmt::format(", from {} of {} groups", n("groups_per_token"), n("expert_groups"));
    text += '\n';
  }
  text +=
      fmt::format("  attention: {} heads of {} + {} (keys) and {} (values)\n", n("attention_heads"),
                  dims.at("nope").get<int>(), dims.at("rope").get<int>(), dims.at("v").get<int>());
  text += fmt::format("  latents: {} (keys and values), ", n("kv_lora_rank"));
  text += c.at("q_lora_rank") > 0 ? n("q_lora_rank") + " (queries)\n" : "none for queries\n";
  text += fmt::format("  context: {} tokens, RoPE base {}", n("max_context"),
                      c.at("rope_theta").get<double>());
  if (!c.at("yarn_factor").is_null())
    text += fmt::format(", YaRN factor {}", c.at("yarn_factor").get<double>());
  text += '\n';
  if (!c.at("fp8_block").is_null())
    text += fmt::format("  FP8 with a scale for each {0} x {0} block\n", n("fp8_block"));
  if (!c.at("expert_int4_group").is_null())
    text += fmt::format("  routed experts in INT4 with a scale for each {} columns of a row\n",
                        n("expert_int4_group"));
  return text;
}

// The cache beside what other attention with the same heads would store.
std::string kv_table(const Json& kv, int64_t context) {
  const int64_t latent = kv.at("latent");
  std::string text = fmt::format("\nKV cache in BF16{:>19}{:>16}{:>18}\n", "bytes a token",
                                 grouped(context) + " tokens", "to the latents");
  const auto row = [&](const std::string& name, const char* key) {
    const int64_t bytes = kv.at(key);
    text += fmt::format("  {:<20}{:>13}{:>16}{:>17.2f}x\n", name, grouped(bytes),
                        scaled(bytes * context, true),
                        static_cast<double>(bytes) / static_cast<double>(latent));
  };
  row("latents (stored)", "latent");
  row("restored K and V", "restored");
  row("multi-head", "multi_head");
  row(fmt::format("grouped-query, {}", kv.at("groups").get<int>()), "grouped_query");
  row("multi-query", "multi_query");
  return text;
}

std::string tensor_lines(const Json& tensors) {
  std::string text = "\ntensors\n";
  for (const Json& t : tensors)
    text += fmt::format("  {:<8} {:<20} {:>15}  {}\n", t.at("dtype").get<std::string>(),
                        t.at("shape").dump(), grouped(t.at("bytes").get<int64_t>()),
                        t.at("name").get<std::string>());
  return text;
}

}  // namespace

std::string inspect_text(const Json& report) {
  const Json& parameters = report.at("parameters");
  const int64_t total = parameters.at("total"), total_bytes = report.at("total_bytes");
  const int64_t context = report.at("config").at("max_context");
  Json parts = parameters;
  for (const char* name : {"total", "activated", "mtp", "mtp_stored"}) parts.erase(name);

  std::string text =
      fmt::format("{}\n{}: {}, {}, {}\n\n", report.at("architecture").get<std::string>(),
                  report.at("directory").get<std::string>(), plural(report.at("files"), "file"),
                  plural(report.at("n_tensors"), "tensor"), scaled(total_bytes, true));
  text += "configuration\n" + shape_line(report.at("config"), report.at("layers"));
  text += fmt::format("\nparameters: {}, of which a token uses {}\n", scaled(total, false),
                      scaled(parameters.at("activated"), false));
  text += share_table(parts, total, false);
  if (const int64_t mtp = parameters.at("mtp"); mtp > 0)
    text += fmt::format("  and {} of multi-token prediction ({} as stored)\n", scaled(mtp, false),
                        scaled(parameters.at("mtp_stored"), false));
  text += "\nbytes by class\n" + share_table(report.at("bytes_by_class"), total_bytes, true);
  text += "\nbytes by type\n" + share_table(report.at("bytes"), total_bytes, true);
  text += kv_table(report.at("kv_alternatives"), context);
  for (const Json& warning : report.at("warnings"))
    text += "\nwarning: " + warning.get<std::string>() + "\n";
  if (report.contains("tensors")) text += tensor_lines(report.at("tensors"));
  return text;
}

}  // namespace tandem
