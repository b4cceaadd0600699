// Benchmark rows as text: a Markdown table line by line, comma-separated values, and a chart of all
// rows.
#pragma once
#include <nlohmann/json.hpp>
#include <span>
#include <string>

namespace tandem {

// What was measured with which machine rates, then the table header. Columns are those of this row.
std::string row_header(const nlohmann::ordered_json& row);
std::string row_text(const nlohmann::ordered_json& row);

// Every field that is not a list; empty where it is null.
std::string csv_header(const nlohmann::ordered_json& row);
std::string csv_text(const nlohmann::ordered_json& row);

// SVG chart of times by tokens, with a line per format, part and context.
std::string rows_chart(std::span<const nlohmann::ordered_json> rows);

}  // namespace tandem
