// JSON Schema as a grammar: what a model may write so that every text fits the schema.
#pragma once
#include <nlohmann/json.hpp>

#include "io/grammar/grammar.h"
#include "io/grammar/json_rules.h"

namespace tandem {

// The rule of a value that `schema` describes. Of all texts that fit, the grammar has those that a
// model is asked to write: properties in the schema's order, the white space of JsonRules, no
// properties but those that are described unless the schema asks for others; where a schema says
// what objects, arrays, texts or numbers look like but has no "type", only such values.
//
// docs/schemas.md lists what is understood. Throws Error for what is not, naming the place and the
// keyword. Where nothing fits, Grammar::finish() throws.
Grammar::Rule add_schema(Grammar& grammar, const JsonRules& json,
                         const nlohmann::ordered_json& schema);

}  // namespace tandem
