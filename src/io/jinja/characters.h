// What Python's str knows about characters: whitespace, case, what repr escapes; and positions that
// count code points in UTF-8.
#pragma once
#include <string>
#include <string_view>

#include "io/jinja/value.h"

namespace tandem::jinja {

bool is_space(char32_t c);
bool is_printable(char32_t c);  // as repr of a Python with Unicode 16 (3.14) sees it

// Case of ASCII, Latin-1, Latin Extended-A, Greek and Cyrillic letters; others stay as they are.
char32_t to_upper(char32_t c);
char32_t to_lower(char32_t c);
std::string to_upper(std::string_view text);
std::string to_lower(std::string_view text);
std::string capitalize(std::string_view text);

enum class Side { kLeft, kRight, kBoth };
// Without the characters of `set` at the ends, or without whitespace when `set` is null.
std::string_view strip(std::string_view text, Side side, const String* set = nullptr);

size_t byte_of_char(const String& text, size_t index);  // index <= n_chars
size_t char_of_byte(const String& text, size_t at);

}  // namespace tandem::jinja
