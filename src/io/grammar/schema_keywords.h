// The keywords of JSON Schema: what each says something about, what is understood, and their values
// as they should be.
#pragma once
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "io/grammar/number_grammar.h"

namespace tandem {

using SchemaJson = nlohmann::ordered_json;

// Types of JSON, as a set.
using TypeSet = unsigned;
inline constexpr TypeSet kNullType = 1, kBooleanType = 2, kNumberType = 4, kStringType = 8,
                         kArrayType = 16, kObjectType = 32, kIntegerType = 64, kNoTypes = 0;
inline constexpr TypeSet kAllTypes = 63;  // integers are numbers

TypeSet type_of(const SchemaJson& value);
// What "type" says; every type without it. Integers only as kIntegerType, unless numbers are in.
TypeSet stated_types(const SchemaJson& schema, const std::string& place);
// Types that the keywords of `schema` speak of.
TypeSet described_types(const SchemaJson& schema);
// The list of names that "type" would have.
SchemaJson type_names(TypeSet types);

// Throws Error unless `schema` is an object or a boolean and all its keywords are understood.
// Keywords that describe and do not restrict are fine.
void require_understood(const SchemaJson& schema, const std::string& place);

// The value of a keyword, or null.
const SchemaJson* keyword(const SchemaJson& schema, const char* name);
// The same of one that must be an object, a list, a text. Throw Error for anything else.
const SchemaJson* object_at(const SchemaJson& schema, const std::string& place, const char* name);
const SchemaJson* list_at(const SchemaJson& schema, const std::string& place, const char* name);
const SchemaJson* text_at(const SchemaJson& schema, const std::string& place, const char* name);
// Throws Error unless it is a whole number of at least 0. What is more than kMostCount is that.
int count_of(const SchemaJson& schema, const std::string& place, const char* name, int missing);
inline constexpr int kMostCount = 1'000'000;

// What "items" and its like say in all drafts: schemas of the first items, and the one of all
// others or null.
struct ItemSchemas {
  const SchemaJson* first = nullptr;  // a list
  const SchemaJson* others = nullptr;
  const char *first_name = "", *others_name = "";
};
ItemSchemas item_schemas(const SchemaJson& schema, const std::string& place);

// Narrows `set` to "minimum" and its like and "multipleOf". Throws Error for what is no number.
void narrow(NumberSet& set, const SchemaJson& schema, const std::string& place);
bool fits(const Decimal& value, const NumberSet& set);

// The expression of a "format" that restricts texts; empty: it only describes.
std::string format_pattern(const std::string& format);

// The number of characters of a well-formed text.
int n_characters(const std::string& text);

}  // namespace tandem
