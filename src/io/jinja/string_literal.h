// Literals of the template language: strings with Python's escapes, integers and floats.
#pragma once
#include <optional>
#include <string>
#include <string_view>

#include "io/jinja/value.h"

namespace tandem::jinja {

// What stands between the quotes, decoded. Nothing when an escape names no character.
std::optional<std::string> decode_string_literal(std::string_view text);

// Length of the number that `text` starts with. `may_be_real`: 1.5 is one number.
size_t number_length(std::string_view text, bool may_be_real);

// Underscores between digits, 0x, 0o, 0b. Nothing beyond 64 bits.
std::optional<Value> parse_number(std::string_view text);

// Digits without a prefix in `base` 2..36, optional sign, underscores between digits. Nothing when
// it is no integer.
std::optional<int64_t> parse_integer(std::string_view text, int base);
std::optional<double> parse_real(std::string_view text);

}  // namespace tandem::jinja
