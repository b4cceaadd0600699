// Character functions of Python's str (whitespace, case, what repr() escapes), and conversion
// between byte offsets and positions in code points.
#pragma once
#include <string>
#include <string_view>

#include "text/jinja/value.h"

namespace tandem::jinja {

bool is_space(char32_t c);
bool is_printable(char32_t c);  // not escaped by repr() of Python 3.14 (Unicode 16)

// Map ASCII, Latin-1, Latin Extended-A, Greek and Cyrillic letters; others are unchanged.
char32_t to_upper(char32_t c);
char32_t to_lower(char32_t c);
std::string to_upper(std::string_view text);
std::string to_lower(std::string_view text);
std::string capitalize(std::string_view text);

enum class Side { kLeft, kRight, kBoth };
// Removes the characters of `set` from the ends, or whitespace when `set` is null.
std::string_view strip(std::string_view text, Side side, const String* set = nullptr);

size_t byte_of_char(const String& text, size_t index);  // index <= n_chars
size_t char_of_byte(const String& text, size_t at);

}  // namespace tandem::jinja
