// Turns a JSON Schema into a grammar; every text of the grammar fits the schema.
#pragma once
#include <nlohmann/json.hpp>

#include "text/grammar/grammar.h"
#include "text/grammar/json_rules.h"

namespace tandem {

// Returns the rule of values that fit `schema`. The grammar has only a subset of the fitting texts:
// properties in the schema's order, the white space of JsonRules, and no properties that the schema
// does not describe, unless it explicitly allows others. A schema without "type" that has keywords
// of objects, arrays, strings or numbers allows only values of these types.
//
// docs/schemas.md lists the supported keywords. Throws Error for others, naming the location and
// the keyword. If no value fits, Grammar::finish() throws.
Grammar::Rule add_schema(Grammar& grammar, const JsonRules& json,
                         const nlohmann::ordered_json& schema);

}  // namespace tandem
