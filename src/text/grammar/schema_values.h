// Checks whether constants fit schemas; a grammar contains only the constants that fit.
#pragma once
#include <map>
#include <optional>
#include <set>

#include "text/grammar/schema_document.h"

namespace tandem {

class SchemaValues {
 public:
  explicit SchemaValues(SchemaDocument& document) : document_(document) {}

  bool fits(const SchemaJson& value, const SchemaJson& schema);
  bool fits(const SchemaJson& value, const Constraints& constraints);

  // All values that fit, if "const", "enum", the types or the bounds of integers leave only few
  // candidates; nullopt if there may be others.
  std::optional<std::vector<SchemaJson>> constants(const Constraints& constraints);

 private:
  bool fits_keywords(const SchemaJson& value, const SchemaJson& schema);
  bool fits_text(const std::string& text, const SchemaJson& schema);
  bool fits_array(const SchemaJson& array, const SchemaJson& schema);
  bool fits_object(const SchemaJson& object, const SchemaJson& schema);
  std::optional<std::vector<SchemaJson>> candidates(const Constraints& constraints) const;

  bool holds(const SchemaJson& list, const SchemaJson& value);

  SchemaDocument& document_;
  std::map<const SchemaJson*, std::set<nlohmann::json>> sets_;  // members of lists, for holds()
};

// The types that all `constraints` allow; kIntegerType instead of kNumberType if numbers must be
// integers.
TypeSet types_of(const SchemaDocument& document, const Constraints& constraints);
// The numbers that all `constraints` allow.
NumberSet numbers_of(const SchemaDocument& document, const Constraints& constraints);
// The patterns of "pattern" and "format".
std::vector<std::string> patterns_of(const SchemaJson& schema, const std::string& location);

bool equal(const SchemaJson& a, const SchemaJson& b);

}  // namespace tandem
