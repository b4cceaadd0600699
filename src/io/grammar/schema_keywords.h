// The keywords of JSON Schema: what each says something about, and what is understood.
#pragma once
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "io/grammar/number_grammar.h"

namespace tandem {

using SchemaJson = nlohmann::ordered_json;

// Names of types that `schema` allows: as "type" says, or else those that its keywords speak of;
// empty: any. Throws Error for what is no type.
std::vector<std::string> schema_types(const SchemaJson& schema, const std::string& place);

// Throws Error naming the first keyword that is not understood, or that stands beside `alone`,
// which is to stand alone ("": nothing is). Keywords that describe and do not restrict are fine.
void require_understood(const SchemaJson& schema, const std::string& place,
                        const std::string& alone);

// The value of a keyword, or null.
const SchemaJson* keyword(const SchemaJson& schema, const char* name);
// Throws Error unless it is a whole number from 0 to most.
int count_of(const SchemaJson& schema, const std::string& place, const char* name, int missing);

// "minimum" and its like. Throws Error for bounds that are no numbers, too large, or not whole
// where numbers need not be.
NumberBounds number_bounds(const SchemaJson& schema, const std::string& place, bool integer);

// The expression of a "format" that restricts texts; empty: it only describes.
std::string format_pattern(const std::string& format);

// True when no value fits both: other types, or objects with a required property that is one of
// other constants. References have been followed.
bool are_apart(const SchemaJson& a, const SchemaJson& b);

}  // namespace tandem
