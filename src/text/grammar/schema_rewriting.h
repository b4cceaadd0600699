// Rewrites "oneOf", "not", "if" and dependencies as equivalent lists of alternatives, with a
// few internal keywords for constraints that JSON Schema cannot express.
#pragma once
#include <functional>
#include <string>

#include "text/grammar/schema_keywords.h"

namespace tandem {

// The internal keywords, which clients' schemas may not use:
//   "fractional": true             the number is not an integer
//   "excludedTexts": [..]          the string is none of these
//   "excludedPattern": ..          the string does not match this pattern
//   "otherProperty": {"names": [..], "patterns": [..], "value": schema}
//                                  some property with another name has a value that fits the schema
// A schema at a location is referred to by {"$ref": location}.

// A list of schemas such that a value that fits one of them does not fit `schema`, which is at
// `location`. Cases that cannot be expressed are omitted, so that the list never allows too much.
SchemaJson negations_of(const SchemaJson& schema, const std::string& location);

// A list of schemas such that a value fits one of them if and only if it fits exactly one of the n
// schemas of the list at `location`. are_disjoint(a, b) says whether no value fits both a and b.
using AreDisjoint = std::function<bool(size_t a, size_t b)>;
SchemaJson exactly_one_of(size_t n, const std::string& location, const AreDisjoint& are_disjoint);

// A list of schemas such that a value fits one of them if and only if it fits "if" with "then" and
// "else" of `schema`.
SchemaJson alternatives_of_if(const SchemaJson& schema, const std::string& location);

// One such list for each property of "dependentRequired", "dependentSchemas" and "dependencies".
std::vector<SchemaJson> alternatives_of_dependencies(const SchemaJson& schema,
                                                     const std::string& location);

// Escapes a name as a part of a location: a JSON pointer (RFC 6901) in a URI fragment.
std::string pointer_part(std::string_view name);

}  // namespace tandem
