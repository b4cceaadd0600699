// Characters that must be escaped inside JSON strings.
#pragma once
#include <string>

namespace tandem {

// True for quotation marks, backslashes and characters below 0x20.
bool needs_json_escape(char32_t c);
// The escape sequence of a character below 0x10000: the short form, such as "\n", if JSON has one,
// else the form "\u001f".
std::string json_escape(char32_t c);

}  // namespace tandem
