// Schemas that say the same as keywords which choose: "oneOf", "not", "if" and the like, written
// with "anyOf", "allOf" and a few words of our own for what JSON Schema has no keyword for.
#pragma once
#include <functional>
#include <string>

#include "io/grammar/schema_keywords.h"

namespace tandem {

// Our own words, which no schema of a client may use:
//   "fractional": true             no integer
//   "excludedTexts": [..]          none of these texts
//   "excludedPattern": ..          no match of this pattern
//   "otherProperty": {"names": [..], "patterns": [..], "value": schema}
//                                  a property of another name whose value fits the schema
// Schemas that stand at a place are referred to by {"$ref": place}.

// A list of schemas: a value that fits one of them does not fit `schema`, which stands at `place`.
// What cannot be said is left out, so that they never let through too much.
SchemaJson opposites_of(const SchemaJson& schema, const std::string& place);

// A list of schemas, of which a value fits one if and only if it fits exactly one of the list at
// `place`. Says whether no value fits both of two of them.
using AreApart = std::function<bool(size_t a, size_t b)>;
SchemaJson exactly_one_of(size_t n, const std::string& place, const AreApart& are_apart);

// The same for "if" with "then" and "else".
SchemaJson choices_of_if(const SchemaJson& schema, const std::string& place);

// The same for what a property asks of its object: one list for each property of
// "dependentRequired", "dependentSchemas" and "dependencies".
std::vector<SchemaJson> choices_of_dependencies(const SchemaJson& schema, const std::string& place);

// A name in the place of a schema (RFC 6901, as part of a URI).
std::string pointer_part(std::string_view name);

}  // namespace tandem
