// A row of a kernel's report as a line of text.
#pragma once
#include <nlohmann/json.hpp>
#include <string>

namespace tandem {

std::string row_header(const nlohmann::ordered_json& row);
std::string row_text(const nlohmann::ordered_json& row);

}  // namespace tandem
