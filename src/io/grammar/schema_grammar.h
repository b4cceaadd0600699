// JSON Schema as a grammar: what a model may write so that every text fits the schema.
#pragma once
#include <nlohmann/json.hpp>

#include "io/grammar/grammar.h"
#include "io/grammar/json_rules.h"

namespace tandem {

// The rule of a value that `schema` describes. Of all texts that fit, the grammar has those whose
// properties stand in the schema's order, which is how a model is asked to write, and whose white
// space is that of JsonRules; where a schema says what objects, arrays, texts or numbers look like
// but has no "type", only such values; additional properties only where the schema asks for them.
//
// Understood: type, enum, const, properties, required, additionalProperties, items, prefixItems,
// minItems, maxItems, pattern, minLength, maxLength, format (of dates, times, UUIDs, IPv4
// addresses), minimum and its like, anyOf, allOf of one, $ref within the schema, nullable. Throws
// Error for anything else that would change what fits, naming the place and the keyword.
Grammar::Rule add_schema(Grammar& grammar, const JsonRules& json,
                         const nlohmann::ordered_json& schema);

}  // namespace tandem
