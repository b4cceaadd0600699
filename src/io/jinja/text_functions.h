// Functions on texts that both methods and filters use.
#pragma once
#include <string>
#include <string_view>

#include "io/jinja/value.h"

namespace tandem::jinja {

// At most `most` cuts (all when negative); `separator` null cuts at runs of whitespace.
Items split(Heap& heap, const String& text, const String* separator, int64_t most);
Items split_right(Heap& heap, const String& text, const String* separator, int64_t most);
Items lines_of(Heap& heap, const String& text, bool keep_ends);

Value replace(Heap& heap, const String& text, std::string_view from, const String& to,
              int64_t most);
size_t occurrences(std::string_view text, std::string_view wanted);  // `wanted` is not empty

std::string title_of_str(std::string_view text);     // str.title(): after every non-letter
std::string title_of_filter(std::string_view text);  // the filter: after spaces, - ( { [ <

// `indent` before every line but the first (with it when `first`); not before blank lines unless
// `blank`.
Value indent_lines(Heap& heap, const String& text, const String& indent, bool first, bool blank);

// `change` of a text's characters. As its length may change, all of the result counts as given
// where any of the text does.
Value changed(Heap& heap, const String& text, std::string (*change)(std::string_view));

Items entry_tuples(Heap& heap, const Value& dict);  // (key, value) each

}  // namespace tandem::jinja
