// Benchmark rows as text: a Markdown table line by line, comma-separated values, and a chart of all
// rows.
#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "bench/benchmark.h"
#include "bench/line_chart.h"

namespace tandem {
namespace {

using Json = nlohmann::ordered_json;

// How a number is formatted in a cell.
enum class Form { kText, kWhole, kTenths, kMega, kGiga, kMilliseconds, kGpuTime, kPercent, kTimes };

struct Column {
  const char* key;
  const char* title;
  Form form;
  int width;
};
constexpr Column kColumns[] = {
    {"format", "format", Form::kText, 8},
    {"routing", "routing", Form::kText, 8},
    {"what", "what", Form::kText, 17},
    {"tokens", "tokens", Form::kWhole, 6},
    {"context", "context", Form::kWhole, 7},
    {"context_limit", "limit", Form::kWhole, 7},
    {"rows_per_expert", "rows an expert", Form::kTenths, 14},
    {"seconds", "CPU ms", Form::kMilliseconds, 9},
    {"cpu_to_gpu_seconds", "CPU + copy to GPU ms", Form::kGpuTime, 20},
    {"gpu_seconds", "GPU ms", Form::kGpuTime, 7},
    {"torch_seconds", "PyTorch BF16 ms", Form::kMilliseconds, 15},
    {"bytes", "MB", Form::kMega, 8},
    {"ops", "Mop", Form::kMega, 9},
    {"bytes_per_second", "GB/s", Form::kGiga, 7},
    {"ops_per_second", "Gop/s", Form::kGiga, 7},
    {"roofline_ratio", "of the roofline", Form::kPercent, 15},
    {"bound_ratio", "of the bound", Form::kPercent, 12},
    {"seconds_over_uniform", "times uniform", Form::kTimes, 13},
};

std::string cell(const Json& row, const Column& column) {
  if (!row.contains(column.key)) return "";
  const Json& value = row[column.key];
  switch (column.form) {
    case Form::kText:
      return value.get<std::string>();
    case Form::kWhole:
      return fmt::format("{}", value.get<int64_t>());
    case Form::kTenths:
      return fmt::format("{:.1f}", value.get<double>());
    case Form::kMega:
      return fmt::format("{:.4g}", value.get<double>() * 1e-6);
    case Form::kGiga:
      return fmt::format("{:.1f}", value.get<double>() * 1e-9);
    case Form::kGpuTime:
      if (value.is_null()) return "no GPU";
      [[fallthrough]];
    case Form::kMilliseconds:
      return fmt::format("{:.4g}", value.get<double>() * 1e3);
    case Form::kPercent:
      return fmt::format("{:.0f} %", value.get<double>() * 100);
    case Form::kTimes:
      return fmt::format("{:.2f}", value.get<double>());
  }
  return "";
}

// Concatenates text(column) over the table's columns. Skewed rows have an additional column, which
// is present from the start if rows have a routing.
template <class Text>
std::string line(const Json& row, Text text) {
  std::string all = "|";
  for (const Column& column : kColumns) {
    const bool optional = column.form == Form::kTimes && row.contains("routing");
    if (row.contains(column.key) || optional) all += text(column);
  }
  return all + "\n";
}

std::string series_name(const Json& row) {
  std::string name = row.value("format", "");
  for (const char* key : {"routing", "what"})
    if (row.contains(key)) name += " " + row[key].get<std::string>();
  if (row.contains("context")) name += fmt::format(", context {}", row["context"].get<int64_t>());
  return name;
}

}  // namespace

std::string simulated_routing_text(const Json& row) {
  if (!row.contains("simulated_routing")) return "";
  return ", routing simulated: " + row["simulated_routing"].get<std::string>();
}

std::string row_header(const Json& row) {
  const auto titles = [](const Column& c) {
    return c.form == Form::kText ? fmt::format(" {:<{}} |", c.title, c.width)
                                 : fmt::format(" {:>{}} |", c.title, c.width);
  };
  const auto rules = [](const Column& c) {
    const bool left = c.form == Form::kText;
    return fmt::format("{}{:-<{}}{}|", left ? ":" : "-", "", c.width, left ? "-" : ":");
  };
  return fmt::format(
             "{} of {}, {}, {} threads{}; measured beside it: reading {:.1f} GB/s, {} {:.0f} "
             "Gop/s\n\n",
             row["bench"].get<std::string>(), row["config"].get<std::string>(),
             row["isa"].get<std::string>(), row["threads"].get<int>(), simulated_routing_text(row),
             row["read_bytes_per_second"].get<double>() * 1e-9,
             row["instruction"].get<std::string>(),
             row["peak_ops_per_second"].get<double>() * 1e-9) +
         line(row, titles) + line(row, rules);
}

std::string row_text(const Json& row) {
  return line(row, [&](const Column& c) {
    return c.form == Form::kText ? fmt::format(" {:<{}} |", cell(row, c), c.width)
                                 : fmt::format(" {:>{}} |", cell(row, c), c.width);
  });
}

std::string csv_header(const Json& row) {
  std::string text;
  for (const auto& [key, value] : row.items())
    if (!value.is_structured()) text += (text.empty() ? "" : ",") + key;
  return text + "\n";
}

std::string csv_text(const Json& row) {
  std::string text, separator;
  for (const auto& [key, value] : row.items()) {
    if (value.is_structured()) continue;
    // JSON escapes quotes with backslashes, CSV doubles them; none of these texts contains a quote.
    text += separator + (value.is_null() ? "" : value.dump());
    separator = ",";
  }
  return text + "\n";
}

std::string rows_chart(std::span<const Json> rows) {
  LineChart chart = {
      .title = fmt::format("{} of {}, {}, {} threads", rows[0]["bench"].get<std::string>(),
                           rows[0]["config"].get<std::string>(), rows[0]["isa"].get<std::string>(),
                           rows[0]["threads"].get<int>()),
      .x_label = "tokens",
      .y_label = "milliseconds",
      .lines = {}};
  const auto line_of = [&](const std::string& name) -> LineChart::Line& {
    auto found = std::find_if(chart.lines.begin(), chart.lines.end(),
                              [&](const LineChart::Line& l) { return l.name == name; });
    return found == chart.lines.end() ? chart.lines.emplace_back(LineChart::Line{name, {}, {}})
                                      : *found;
  };
  for (const Json& row : rows) {
    const std::string name = series_name(row);
    const auto point = [&](const char* key) {
      return std::pair(row["tokens"].get<double>(), row[key].get<double>() * 1e3);
    };
    LineChart::Line& cpu = line_of(name);
    cpu.points.push_back(point("seconds"));
    cpu.bounds.push_back(point("roofline_seconds"));
    for (const auto& [key, device] :
         {std::pair("cpu_to_gpu_seconds", ", CPU and copy"), {"gpu_seconds", ", GPU"}})
      if (row.contains(key) && row[key].is_number())
        line_of(name + device).points.push_back(point(key));
  }
  return svg_of(chart);
}

}  // namespace tandem
