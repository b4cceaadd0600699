#include "bench/row_text.h"

#include <fmt/format.h>

namespace tandem {
namespace {

constexpr const char* kColumns = "{:<10}{:<18}{:>7}{:>8}{:>8}{:>10}{:>9}{:>10}{:>9}\n";

std::string whole(const nlohmann::ordered_json& row, const char* key) {
  return row.contains(key) ? fmt::format("{}", row[key].get<int64_t>()) : "";
}

std::string text(const nlohmann::ordered_json& row, const char* key) {
  return row.contains(key) ? row[key].get<std::string>() : "";
}

}  // namespace

std::string row_header(const nlohmann::ordered_json& row) {
  return fmt::format(
             "{} of {}, {}, {} threads; measured beside it: reading {:.1f} GB/s, {} {:.0f} Gop/s\n",
             text(row, "bench"), text(row, "config"), text(row, "isa"), row["threads"].get<int>(),
             row["read_bytes_per_second"].get<double>() * 1e-9, text(row, "instruction"),
             row["peak_ops_per_second"].get<double>() * 1e-9) +
         fmt::format(fmt::runtime(kColumns), "format", "what", "tokens", "ctx", "rows/e", "ms",
                     "GB/s", "Gop/s", "roofline");
}

std::string row_text(const nlohmann::ordered_json& row) {
  const auto giga = [&](const char* key) {
    return fmt::format("{:.1f}", row[key].get<double>() * 1e-9);
  };
  const std::string rows = row.contains("rows_per_expert")
                               ? fmt::format("{:.1f}", row["rows_per_expert"].get<double>())
                               : "";
  std::string line = fmt::format(
      fmt::runtime(kColumns), text(row, "format"),
      row.contains("routing") ? text(row, "routing") : text(row, "what"), whole(row, "tokens"),
      whole(row, "context"), rows, fmt::format("{:.3f}", row["seconds"].get<double>() * 1e3),
      giga("bytes_per_second"), giga("ops_per_second"),
      fmt::format("{:.0f} %", row["roofline_ratio"].get<double>() * 100));
  if (row.contains("seconds_over_uniform"))
    line.insert(line.size() - 1,
                fmt::format("  {:.2f} x uniform", row["seconds_over_uniform"].get<double>()));
  return line;
}

}  // namespace tandem
