// Functions on texts that both methods and filters use.
#pragma once
#include <string>
#include <string_view>

#include "io/jinja/value.h"

namespace tandem::jinja {

// At most `most` cuts (all when negative); `separator` null cuts at runs of whitespace.
Items split(Heap& heap, std::string_view text, const String* separator, int64_t most);
Items split_right(Heap& heap, std::string_view text, const String* separator, int64_t most);
Items lines_of(Heap& heap, std::string_view text, bool keep_ends);

std::string replace(Heap& heap, std::string_view text, std::string_view from, std::string_view to,
                    int64_t most);
size_t occurrences(std::string_view text, std::string_view wanted);  // `wanted` is not empty

std::string title_of_str(std::string_view text);     // str.title(): after every non-letter
std::string title_of_filter(std::string_view text);  // the filter: after spaces, - ( { [ <

// `indent` before every line but the first (with it when `first`); not before blank lines unless
// `blank`.
std::string indent_lines(Heap& heap, std::string_view text, std::string_view indent, bool first,
                         bool blank);

Items entry_tuples(Heap& heap, const Value& dict);  // (key, value) each

}  // namespace tandem::jinja
