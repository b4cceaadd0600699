// Rows of a benchmark for people: a Markdown table line by line, comma-separated values, and a
// chart of all.
#pragma once
#include <nlohmann/json.hpp>
#include <span>
#include <string>

namespace tandem {

// What was measured and beside what, then the head of the table. Columns are those that this row
// has.
std::string row_header(const nlohmann::ordered_json& row);
std::string row_text(const nlohmann::ordered_json& row);

// Every field that is no list; nothing where it is null.
std::string csv_header(const nlohmann::ordered_json& row);
std::string csv_text(const nlohmann::ordered_json& row);

// Times by tokens as an SVG file's text, a line for each format, part and context.
std::string rows_chart(std::span<const nlohmann::ordered_json> rows);

}  // namespace tandem
