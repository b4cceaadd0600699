// What JSON cannot have within a text as it is.
#pragma once
#include <string>

namespace tandem {

// Quotation marks, backslashes and characters below 0x20.
bool needs_json_escape(char32_t c);
// "\n" and the like where JSON has them, else "\u001f", of a character below 0x10000.
std::string json_escape(char32_t c);

}  // namespace tandem
