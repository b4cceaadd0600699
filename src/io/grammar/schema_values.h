// Whether constants fit schemas: of a list of constants a grammar has those that do.
#pragma once
#include <map>
#include <optional>
#include <set>

#include "io/grammar/schema_document.h"

namespace tandem {

class SchemaValues {
 public:
  explicit SchemaValues(SchemaDocument& document) : document_(document) {}

  bool fits(const SchemaJson& value, const SchemaJson& schema);
  bool fits(const SchemaJson& value, const Claims& claims);

  // The constants that "const", "enum", two booleans or the bounds of few integers leave; empty:
  // there may be others.
  std::optional<std::vector<SchemaJson>> constants(const Claims& claims);

 private:
  bool fits_keywords(const SchemaJson& value, const SchemaJson& schema);
  bool fits_text(const std::string& text, const SchemaJson& schema);
  bool fits_array(const SchemaJson& array, const SchemaJson& schema);
  bool fits_object(const SchemaJson& object, const SchemaJson& schema);
  std::optional<std::vector<SchemaJson>> candidates(const Claims& claims) const;

  bool holds(const SchemaJson& list, const SchemaJson& value);

  SchemaDocument& document_;
  std::map<const SchemaJson*, std::set<nlohmann::json>> sets_;  // of lists
};

// The types that all `claims` leave, with kIntegerType where numbers must be integers.
TypeSet types_of(const SchemaDocument& document, const Claims& claims);
// Their numbers.
NumberSet numbers_of(const SchemaDocument& document, const Claims& claims);
// "format" as a pattern too.
std::vector<std::string> patterns_of(const SchemaJson& schema, const std::string& place);

bool equal(const SchemaJson& a, const SchemaJson& b);

}  // namespace tandem
