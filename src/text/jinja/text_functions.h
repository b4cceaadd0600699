// String functions shared by methods and filters.
#pragma once
#include <string>
#include <string_view>

#include "text/jinja/value.h"

namespace tandem::jinja {

// Split at most `most` times (without limit when negative), at runs of whitespace if `separator` is
// null.
Items split(Heap& heap, const String& text, const String* separator, int64_t most);
Items split_right(Heap& heap, const String& text, const String* separator, int64_t most);
Items lines_of(Heap& heap, const String& text, bool keep_ends);

Value replace(Heap& heap, const String& text, std::string_view from, const String& to,
              int64_t most);
size_t occurrences(std::string_view text, std::string_view wanted);  // `wanted` is not empty

std::string title_of_str(std::string_view text);     // str.title(): capitals after non-letters
std::string title_of_filter(std::string_view text);  // the filter: capitals after spaces, - ( { [ <

// Puts `indent` before every line; before the first one only if `first`, before empty lines only if
// `blank`.
Value indent_lines(Heap& heap, const String& text, const String& indent, bool first, bool blank);

// Applies `change` to the text. Since lengths may change, the whole result counts as given if any
// part of the text does.
Value changed(Heap& heap, const String& text, std::string (*change)(std::string_view));

Items entry_tuples(Heap& heap, const Value& dict);  // tuples (key, value)

}  // namespace tandem::jinja
