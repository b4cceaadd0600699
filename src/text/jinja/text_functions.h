// String functions shared by methods and filters.
#pragma once
#include <string>
#include <string_view>

#include "text/jinja/value.h"

namespace tandem::jinja {

// Split at most `max_count` times (without limit when negative), at runs of whitespace if
// `separator` is null.
Items split(Heap& heap, const String& text, const String* separator, int64_t max_count);
Items split_right(Heap& heap, const String& text, const String* separator, int64_t max_count);
Items lines_of(Heap& heap, const String& text, bool keep_ends);

Value replace(Heap& heap, const String& text, std::string_view from, const String& to,
              int64_t max_count);
size_t occurrences(std::string_view text, std::string_view wanted);  // `wanted` is not empty

std::string title_str(std::string_view text);     // str.title(): capitals after non-letters
std::string title_filter(std::string_view text);  // the filter: capitals after spaces, - ( { [ <

// Puts `indent` before every line; before the first one only if `first`, before empty lines only if
// `blank`.
Value indent_lines(Heap& heap, const String& text, const String& indent, bool first, bool blank);

// Applies `convert` to the text. Since lengths may change, the whole result counts as given if any
// part of the text does.
Value map_text(Heap& heap, const String& text, std::string (*convert)(std::string_view));

Items entry_tuples(Heap& heap, const Value& dict);  // tuples (key, value)

// Character functions of Python's str (whitespace, case, what repr() escapes), and conversion
// between byte offsets and positions in code points.
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
