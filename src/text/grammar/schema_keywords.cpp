#include "text/grammar/schema_keywords.h"

#include <algorithm>
#include <cmath>
#include <span>

#include "core/check.h"
#include "io/json.h"
#include "text/utf8.h"

namespace tandem {
namespace {

// Keywords that do not restrict values by themselves: annotations, definitions for $ref, and "then"
// and "else", which are read together with "if".
constexpr std::string_view kAnnotations[] = {"title",
                                             "description",
                                             "default",
                                             "examples",
                                             "example",
                                             "$comment",
                                             "$schema",
                                             "deprecated",
                                             "readOnly",
                                             "writeOnly",
                                             "$id",
                                             "id",
                                             "$anchor",
                                             "$dynamicAnchor",
                                             "discriminator",
                                             "strict",
                                             "contentEncoding",
                                             "contentMediaType",
                                             "contentSchema",
                                             "$vocabulary",
                                             "externalDocs",
                                             "xml",
                                             "$defs",
                                             "definitions",
                                             "then",
                                             "else"};

// The keywords that restrict values of some types, or of all.
constexpr std::string_view kOfAll[] = {"type",  "nullable", "enum", "const", "anyOf",
                                       "oneOf", "allOf",    "not",  "if",    "$ref"};
constexpr std::string_view kOfObjects[] = {
    "properties",       "required",      "additionalProperties", "patternProperties",
    "propertyNames",    "minProperties", "maxProperties",        "dependentRequired",
    "dependentSchemas", "dependencies",  "unevaluatedProperties"};
constexpr std::string_view kOfArrays[] = {"items",    "prefixItems", "additionalItems",
                                          "minItems", "maxItems",    "uniqueItems",
                                          "contains", "minContains", "maxContains"};
constexpr std::string_view kOfStrings[] = {"pattern", "minLength", "maxLength", "format"};
constexpr std::string_view kOfNumbers[] = {"minimum", "maximum", "exclusiveMinimum",
                                           "exclusiveMaximum", "multipleOf"};
struct Keywords {
  TypeSet types;
  std::span<const std::string_view> names;
};
constexpr Keywords kKeywords[] = {{kAllTypes, kOfAll},
                                  {kObjectType, kOfObjects},
                                  {kArrayType, kOfArrays},
                                  {kStringType, kOfStrings},
                                  {kNumberType, kOfNumbers}};
constexpr std::pair<const char*, TypeSet> kTypes[] = {
    {"null", kNullType},     {"boolean", kBooleanType}, {"integer", kIntegerType},
    {"number", kNumberType}, {"string", kStringType},   {"array", kArrayType},
    {"object", kObjectType}};

// The types that a keyword restricts; none for an unknown one.
std::optional<TypeSet> types_of_keyword(std::string_view name) {
  for (const Keywords& k : kKeywords)
    if (std::find(k.names.begin(), k.names.end(), name) != k.names.end()) return k.types;
  return {};
}

bool is_annotation(std::string_view name) {
  const bool is_extension = name.substr(0, 2) == "x-";
  return is_extension || std::find(std::begin(kAnnotations), std::end(kAnnotations), name) !=
                             std::end(kAnnotations);
}

const SchemaJson* checked(const SchemaJson& schema, const std::string& location, const char* name,
                          bool (SchemaJson::*is)() const noexcept, const char* what) {
  const SchemaJson* value = keyword(schema, name);
  require(!value || (value->*is)(), "{}: {} is {}: must be {}", location, name,
          value ? shown(*value) : "", what);
  return value;
}

Decimal number_at(const SchemaJson& value, const std::string& location, const char* name) {
  require(value.is_number() && std::isfinite(value.get<double>()), "{}: {} is {}: must be a number",
          location, name, shown(value));
  return decimal_of(value);
}

void narrow_min(NumberSet& set, const Decimal& min, bool is_exclusive) {
  const int order = set.min ? compare(min, *set.min) : 1;
  if (order < 0) return;
  set.above_min = is_exclusive || (order == 0 && set.above_min);
  set.min = min;
}

void narrow_max(NumberSet& set, const Decimal& max, bool is_exclusive) {
  const int order = set.max ? compare(max, *set.max) : -1;
  if (order > 0) return;
  set.below_max = is_exclusive || (order == 0 && set.below_max);
  set.max = max;
}

// Before draft 6, "exclusiveMinimum" and "exclusiveMaximum" were booleans.
void narrow_to(NumberSet& set, const SchemaJson& schema, const std::string& location,
               const char* name, const char* exclusive_name,
               void (*narrow_bound)(NumberSet&, const Decimal&, bool)) {
  const SchemaJson *bound = keyword(schema, name), *exclusive = keyword(schema, exclusive_name);
  const bool is_flag = exclusive && exclusive->is_boolean();
  if (bound)
    narrow_bound(set, number_at(*bound, location, name), is_flag && exclusive->get<bool>());
  if (exclusive && !is_flag)
    narrow_bound(set, number_at(*exclusive, location, exclusive_name), true);
}

}  // namespace

TypeSet type_of(const SchemaJson& value) {
  if (value.is_number()) return kNumberType;
  for (const auto& [name, type] : kTypes)
    if (std::string_view(name) == value.type_name()) return type;
  return kNoTypes;
}

TypeSet declared_types(const SchemaJson& schema, const std::string& location) {
  const SchemaJson* type = keyword(schema, "type");
  if (!type) return kAllTypes;
  TypeSet types = kNoTypes;
  for (const SchemaJson& name : type->is_array() ? *type : SchemaJson::array({*type})) {
    const auto it = std::find_if(std::begin(kTypes), std::end(kTypes),
                                 [&](const auto& known) { return name == known.first; });
    require(it != std::end(kTypes), "{}: {} is not a type of JSON", location, shown(name));
    types |= it->second;
  }
  require(types != kNoTypes, "{}: \"type\" is an empty list: no value matches", location);
  return types & kNumberType ? types & ~kIntegerType : types;
}

TypeSet implied_types(const SchemaJson& schema) {
  TypeSet types = kNoTypes;
  for (const auto& [name, value] : schema.items())
    if (const auto of = types_of_keyword(name); of && *of != kAllTypes) types |= *of;
  return types;
}

SchemaJson type_names(TypeSet types) {
  SchemaJson names = SchemaJson::array();
  for (const auto& [name, type] : kTypes)
    if (types & type) names.push_back(name);
  return names;
}

void require_supported(const SchemaJson& schema, const std::string& location) {
  if (schema.is_boolean()) return;
  require(schema.is_object(), "{} is {}: must be a schema, which is an object", location,
          shown(schema));
  for (const auto& [name, value] : schema.items())
    require(is_annotation(name) || types_of_keyword(name), "{}: {} is not supported", location,
            shown(name));
}

const SchemaJson* keyword(const SchemaJson& schema, const char* name) {
  const auto it = schema.find(name);
  return it == schema.end() ? nullptr : &*it;
}

const SchemaJson* object_at(const SchemaJson& schema, const std::string& location,
                            const char* name) {
  return checked(schema, location, name, &SchemaJson::is_object, "an object");
}

const SchemaJson* list_at(const SchemaJson& schema, const std::string& location, const char* name) {
  return checked(schema, location, name, &SchemaJson::is_array, "a list");
}

const SchemaJson* text_at(const SchemaJson& schema, const std::string& location, const char* name) {
  return checked(schema, location, name, &SchemaJson::is_string, "a string");
}

int count_of(const SchemaJson& schema, const std::string& location, const char* name, int missing) {
  const SchemaJson* value = keyword(schema, name);
  if (!value) return missing;
  const double count = value->is_number() ? value->get<double>() : -1;
  require(count >= 0 && count == std::floor(count),
          "{}: {} is {}: must be an integer of at least 0", location, shown(std::string(name)),
          shown(*value));
  return static_cast<int>(std::min<double>(count, kMaxCount));
}

ItemSchemas item_schemas(const SchemaJson& schema, const std::string& location) {
  const SchemaJson* all = keyword(schema, "items");
  if (all && all->is_array())
    return {all, keyword(schema, "additionalItems"), "items", "additionalItems"};
  return {list_at(schema, location, "prefixItems"), all, "prefixItems", "items"};
}

void narrow(NumberSet& set, const SchemaJson& schema, const std::string& location) {
  narrow_to(set, schema, location, "minimum", "exclusiveMinimum", narrow_min);
  narrow_to(set, schema, location, "maximum", "exclusiveMaximum", narrow_max);
  if (const SchemaJson* value = keyword(schema, "multipleOf")) {
    auto step = step_of(number_at(*value, location, "multipleOf"));
    if (step && set.step) step = common_multiple(*step, *set.step);
    require(step.has_value(),
            "{}: multipleOf is {}: must be above 0 and have at most nine digits, also when "
            "combined with others",
            location, shown(*value));
    set.step = step;
  }
}

bool fits(const Decimal& value, const NumberSet& set) {
  const int above = set.min ? compare(value, *set.min) : 1;
  const int below = set.max ? -compare(value, *set.max) : 1;
  return above >= (set.above_min ? 1 : 0) && below >= (set.below_max ? 1 : 0) &&
         (!set.step || is_multiple(value, *set.step)) &&
         (!set.fractional || !value.fraction.empty());
}

std::string format_pattern(const std::string& format) {
  const std::string date =
      "(\\d{4}-((0[13578]|1[02])-(0[1-9]|[12]\\d|3[01])|"
      "(0[469]|11)-(0[1-9]|[12]\\d|30)|02-(0[1-9]|1\\d|2[0-8]))|"
      "(\\d\\d(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)-02-29)";
  const std::string time =
      "(([01]\\d|2[0-3]):[0-5]\\d:[0-5]\\d(\\.\\d{1,9})?(Z|[+-]([01]\\d|2[0-3]):[0-5]\\d))";
  const std::string octet = "(25[0-5]|2[0-4]\\d|1\\d\\d|[1-9]?\\d)";
  const std::string ipv4 = octet + "(\\." + octet + "){3}";
  const std::string hex = "[0-9a-f]";
  // Labels of at most 63 characters without "--", and host names of at most 255.
  const std::string label = "[A-Za-z0-9]{1,15}(-[A-Za-z0-9]{1,15}){0,3}";
  const std::string host = label + "(\\." + label + "){0,3}";
  const std::string part = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]{1,15}";
  const std::string in_path = "([A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2})";
  const std::string after_path = "(\\?(" + in_path + "|[/?])*)?(#(" + in_path + "|[/?])*)?";
  if (format == "date") return "^" + date + "$";
  if (format == "time") return "^" + time + "$";
  if (format == "date-time") return "^" + date + "T" + time + "$";
  if (format == "duration")
    return "^P(\\d{1,9}W|(\\d{1,9}Y(\\d{1,9}M(\\d{1,9}D)?)?|\\d{1,9}M(\\d{1,9}D)?|\\d{1,9}D)"
           "(T(\\d{1,9}H(\\d{1,9}M(\\d{1,9}S)?)?|\\d{1,9}M(\\d{1,9}S)?|\\d{1,9}S))?|"
           "T(\\d{1,9}H(\\d{1,9}M(\\d{1,9}S)?)?|\\d{1,9}M(\\d{1,9}S)?|\\d{1,9}S))$";
  if (format == "ipv4") return "^" + ipv4 + "$";
  if (format == "ipv6") {
    const std::string group = "[0-9a-f]{1,4}";
    std::string all = "^((" + group + ":){7}" + group + "|::(" + group + "(:" + group + "){0,6})?";
    for (int n = 1; n <= 6; ++n)
      all += fmt::format("|{0}(:{0}){{{1}}}::({0}(:{0}){{0,{2}}})?", group, n - 1, 6 - n);
    return all + "|(" + group + ":){7}:)$";
  }
  if (format == "uuid")
    return "^" + hex + "{8}-" + hex + "{4}-" + hex + "{4}-" + hex + "{4}-" + hex + "{12}$";
  if (format == "hostname") return "^" + host + "$";
  if (format == "email") return "^" + part + "(\\." + part + "){0,2}@" + host + "$";
  if (format == "uri")
    return "^[A-Za-z][A-Za-z0-9+.-]*:(//" + host + "(:\\d{1,5})?(/" + in_path + "*)*|" + in_path +
           "+)" + after_path + "$";
  return {};
}

int n_characters(const std::string& text) { return static_cast<int>(count_code_points(text)); }

}  // namespace tandem
