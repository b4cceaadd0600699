// Writes the rules of a schema's grammar: one for each set of schemas that a value must fit.
#pragma once
#include <functional>

#include "text/grammar/json_rules.h"
#include "text/grammar/schema_values.h"

namespace tandem {

struct SchemaWriter {
  using Schemas = std::vector<const SchemaJson*>;

  Grammar& grammar;
  const JsonRules& json;
  SchemaDocument& document;
  SchemaValues& values;
  // Returns the rule of values that fit all of these schemas; its nodes may be written later.
  std::function<Grammar::Rule(const Schemas&)> rule_of;
};

// Add to `rule` the values of one type that fit `constraints`, which have no choices; nothing is
// added if no value fits. Throw Error naming the location of what is not supported.
void write_object(SchemaWriter& writer, Grammar::Rule rule, const Constraints& constraints);
void write_array(SchemaWriter& writer, Grammar::Rule rule, const Constraints& constraints);
void write_string(SchemaWriter& writer, Grammar::Rule rule, const Constraints& constraints);
void write_number(SchemaWriter& writer, Grammar::Rule rule, const Constraints& constraints);

// Whether no value fits, because one of the schemas is `false`.
bool has_false(const SchemaWriter::Schemas& schemas);

// The greatest value of a keyword such as "minItems" in all schemas, and the least value of one
// such as "maxItems", kNoLimit without it.
int largest_minimum(const SchemaDocument& document, const Constraints& constraints,
                    const char* name);
int smallest_maximum(const SchemaDocument& document, const Constraints& constraints,
                     const char* name);

}  // namespace tandem
