// How the parts of a schema's grammar are written: a rule for what a value has to fit.
#pragma once
#include <functional>

#include "io/grammar/json_rules.h"
#include "io/grammar/schema_values.h"

namespace tandem {

struct SchemaWriter {
  using Schemas = std::vector<const SchemaJson*>;

  Grammar& grammar;
  const JsonRules& json;
  SchemaDocument& document;
  SchemaValues& values;
  // The rule of values that fit all of these schemas; it is written later.
  std::function<Grammar::Rule(const Schemas&)> rule_of;
};

// Write the rule of the values of one type that fit `claims`, which have no choices. A rule stays
// empty where none fits. Throw Error naming the place of what is not supported.
void write_object(SchemaWriter& writer, Grammar::Rule rule, const Claims& claims);
void write_array(SchemaWriter& writer, Grammar::Rule rule, const Claims& claims);
void write_string(SchemaWriter& writer, Grammar::Rule rule, const Claims& claims);
void write_number(SchemaWriter& writer, Grammar::Rule rule, const Claims& claims);

// The greatest of a keyword such as "minItems" in all schemas; the least of one such as "maxItems",
// kNoLimit without it.
int greatest_count(const SchemaDocument& document, const Claims& claims, const char* name);
int least_count(const SchemaDocument& document, const Claims& claims, const char* name);

}  // namespace tandem
