// The keywords of JSON Schema: which are supported, the types they apply to, and checked access to
// their values.
#pragma once
#include <nlohmann/json.hpp>
#include <string>

#include "text/grammar/number_grammar.h"

namespace tandem {

using SchemaJson = nlohmann::ordered_json;

// A set of JSON types, as bits.
using TypeSet = unsigned;
inline constexpr TypeSet kNullType = 1, kBooleanType = 2, kNumberType = 4, kStringType = 8,
                         kArrayType = 16, kObjectType = 32, kIntegerType = 64, kNoTypes = 0;
inline constexpr TypeSet kAllTypes = 63;  // integers are numbers

TypeSet type_of(const SchemaJson& value);
// The types named by "type", all types without it. kIntegerType is set only if kNumberType is not.
TypeSet declared_types(const SchemaJson& schema, const std::string& location);
// The types to which the keywords of `schema` apply.
TypeSet implied_types(const SchemaJson& schema);
// The value of "type" for these types, a list of names.
SchemaJson type_names(TypeSet types);

// Throws Error unless `schema` is a boolean or an object whose keywords are all supported or only
// annotations.
void require_supported(const SchemaJson& schema, const std::string& location);

// The value of a keyword, or nullptr.
const SchemaJson* keyword(const SchemaJson& schema, const char* name);
// The value of a keyword that must be an object, a list or a string, or nullptr. Throw Error for
// values of other types.
const SchemaJson* object_at(const SchemaJson& schema, const std::string& location,
                            const char* name);
const SchemaJson* list_at(const SchemaJson& schema, const std::string& location, const char* name);
const SchemaJson* text_at(const SchemaJson& schema, const std::string& location, const char* name);
// The value of a keyword that is a count; larger values become kMaxCount. Throws Error unless it
// is an integer of at least 0.
int count_of(const SchemaJson& schema, const std::string& location, const char* name, int missing);
inline constexpr int kMaxCount = 1'000'000;

// "items", "prefixItems" and "additionalItems" of all drafts: the schemas of the first items, and
// the schema of all other items. Null if absent.
struct ItemSchemas {
  const SchemaJson* first = nullptr;  // a list
  const SchemaJson* others = nullptr;
  const char *first_name = "", *others_name = "";
};
ItemSchemas item_schemas(const SchemaJson& schema, const std::string& location);

// Narrows `set` by "minimum", "maximum", their exclusive forms and "multipleOf". Throws Error for
// values that are not numbers.
void narrow(NumberSet& set, const SchemaJson& schema, const std::string& location);
bool fits(const Decimal& value, const NumberSet& set);

// The pattern of a "format"; empty for a format that is only an annotation.
std::string format_pattern(const std::string& format);

// Number of code points of a well-formed text.
int n_characters(const std::string& text);

}  // namespace tandem
