#include "io/grammar/schema_keywords.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <string_view>

#include "core/check.h"
#include "io/json.h"

namespace tandem {
namespace {

constexpr std::array<std::string_view, 14> kDescribing = {
    "title",      "description", "default",   "examples", "example", "$comment",      "$schema",
    "deprecated", "readOnly",    "writeOnly", "$id",      "$anchor", "discriminator", "strict"};
// Hold definitions for $ref.
constexpr std::array<std::string_view, 2> kDefining = {"$defs", "definitions"};

struct Keyword {
  std::string_view name, type;  // empty: of any type
};
constexpr Keyword kKeywords[] = {{"type", ""},
                                 {"nullable", ""},
                                 {"enum", ""},
                                 {"const", ""},
                                 {"anyOf", ""},
                                 {"oneOf", ""},
                                 {"allOf", ""},
                                 {"$ref", ""},
                                 {"properties", "object"},
                                 {"required", "object"},
                                 {"additionalProperties", "object"},
                                 {"items", "array"},
                                 {"prefixItems", "array"},
                                 {"minItems", "array"},
                                 {"maxItems", "array"},
                                 {"pattern", "string"},
                                 {"minLength", "string"},
                                 {"maxLength", "string"},
                                 {"format", "string"},
                                 {"minimum", "number"},
                                 {"maximum", "number"},
                                 {"exclusiveMinimum", "number"},
                                 {"exclusiveMaximum", "number"}};
constexpr std::array<std::string_view, 7> kTypes = {"object",  "array",   "string", "number",
                                                    "integer", "boolean", "null"};

template <class List>
bool among(const List& list, std::string_view name) {
  return std::find(std::begin(list), std::end(list), name) != std::end(list);
}

const Keyword* find_keyword(std::string_view name) {
  const auto it = std::find_if(std::begin(kKeywords), std::end(kKeywords),
                               [&](const Keyword& k) { return k.name == name; });
  return it == std::end(kKeywords) ? nullptr : it;
}

// The constants that a property must be one of; null: it may be something else.
const SchemaJson* constants(const SchemaJson& schema, const std::string& property) {
  const SchemaJson* required = keyword(schema, "required");
  const SchemaJson* properties = keyword(schema, "properties");
  if (!required || !properties || !properties->is_object()) return nullptr;
  if (std::find(required->begin(), required->end(), property) == required->end()) return nullptr;
  const auto it = properties->find(property);
  if (it == properties->end() || !it->is_object()) return nullptr;
  const SchemaJson* value = keyword(*it, "const");
  return value ? value : keyword(*it, "enum");
}

bool share_constant(const SchemaJson& a, const SchemaJson& b) {
  if (a.is_array())
    return std::any_of(a.begin(), a.end(), [&](auto& v) { return share_constant(v, b); });
  if (b.is_array()) return std::find(b.begin(), b.end(), a) != b.end();
  return a == b;
}

// Of an integer any bound will do; one of a number that is not whole would need its digits.
void read_bound(const SchemaJson& schema, const std::string& place, const char* name, bool integer,
                std::optional<int64_t>& bound, bool& is_out) {
  constexpr double kMost = 1e15;
  const SchemaJson* value = keyword(schema, name);
  if (!value) return;
  const double v = value->is_number() ? value->get<double>() : std::nan("");
  require(std::abs(v) <= kMost, "{}: {} is {}: must be a number between {} and {}", place, name,
          shown(*value), -kMost, kMost);
  const bool whole = v == std::floor(v);
  require(integer || whole, "{}: {} is {}: bounds of numbers that are not whole are not supported",
          place, name, shown(*value));
  const std::string_view text = name;
  const bool is_min = text.find("inimum") != text.npos;
  const bool exclusive = whole && text.find("exclusive") == 0;
  const auto at = static_cast<int64_t>(is_min ? std::ceil(v) : std::floor(v));
  if (!bound || (is_min ? at > *bound : at < *bound)) {
    bound = at;
    is_out = exclusive;
  } else if (at == *bound) {
    is_out = is_out || exclusive;
  }
}

}  // namespace

NumberBounds number_bounds(const SchemaJson& schema, const std::string& place, bool integer) {
  NumberBounds bounds;
  for (const char* name : {"minimum", "exclusiveMinimum"})
    read_bound(schema, place, name, integer, bounds.min, bounds.above_min);
  for (const char* name : {"maximum", "exclusiveMaximum"})
    read_bound(schema, place, name, integer, bounds.max, bounds.below_max);
  return bounds;
}

std::vector<std::string> schema_types(const SchemaJson& schema, const std::string& place) {
  std::vector<std::string> types;
  if (const SchemaJson* type = keyword(schema, "type")) {
    const SchemaJson list = type->is_array() ? *type : SchemaJson::array({*type});
    for (const SchemaJson& name : list) {
      require(name.is_string() && among(kTypes, name.get<std::string>()),
              "{}: {} is not a type of JSON", place, shown(name));
      types.push_back(name.get<std::string>());
    }
    require(!types.empty(), "{}: \"type\" is empty: nothing fits", place);
  } else {
    for (const auto& [name, value] : schema.items())
      if (const Keyword* k = find_keyword(name); k && !k->type.empty() && !among(types, k->type))
        types.emplace_back(k->type);
  }
  const SchemaJson* nullable = keyword(schema, "nullable");
  const bool or_null = nullable && *nullable == true && !types.empty() && !among(types, "null");
  if (or_null) types.emplace_back("null");
  return types;
}

void require_understood(const SchemaJson& schema, const std::string& place,
                        const std::string& alone) {
  const bool has_type = alone == "enum" || alone == "const";
  for (const auto& [name, value] : schema.items()) {
    if (among(kDescribing, name) || among(kDefining, name)) continue;
    require(find_keyword(name), "{}: {} is not supported", place, shown(name));
    const bool fine = alone.empty() || name == alone || name == "nullable" ||
                      (has_type && (name == "type" || name == "enum" || name == "const"));
    require(fine, "{}: {} beside {} is not supported", place, shown(name), shown(alone));
  }
}

const SchemaJson* keyword(const SchemaJson& schema, const char* name) {
  const auto it = schema.find(name);
  return it == schema.end() ? nullptr : &*it;
}

int count_of(const SchemaJson& schema, const std::string& place, const char* name, int missing) {
  constexpr int kMost = 100'000;
  const SchemaJson* value = keyword(schema, name);
  if (!value) return missing;
  const bool ok = value->is_number() && value->get<double>() >= 0 && value->get<double>() <= kMost;
  const int count = ok ? static_cast<int>(value->get<double>()) : 0;
  require(ok && value->get<double>() == count, "{}: {} is {}: must be a whole number from 0 to {}",
          place, shown(std::string(name)), shown(*value), kMost);
  return count;
}

std::string format_pattern(const std::string& format) {
  const std::string date =
      "(\\d{4}-((0[13578]|1[02])-(0[1-9]|[12]\\d|3[01])|"
      "(0[469]|11)-(0[1-9]|[12]\\d|30)|02-(0[1-9]|1\\d|2[0-8])))";
  const std::string time =
      "(([01]\\d|2[0-3]):[0-5]\\d:[0-5]\\d(\\.\\d{1,9})?(Z|[+-]([01]\\d|2[0-3]):[0-5]\\d))";
  const std::string octet = "(25[0-5]|2[0-4]\\d|1\\d\\d|[1-9]?\\d)";
  const std::string hex = "[0-9a-f]";
  if (format == "date") return "^" + date + "$";
  if (format == "time") return "^" + time + "$";
  if (format == "date-time") return "^" + date + "T" + time + "$";
  if (format == "ipv4") return "^" + octet + "(\\." + octet + "){3}$";
  if (format == "uuid")
    return "^" + hex + "{8}-" + hex + "{4}-" + hex + "{4}-" + hex + "{4}-" + hex + "{12}$";
  return {};
}

bool are_apart(const SchemaJson& a, const SchemaJson& b) {
  if (!a.is_object() || !b.is_object()) return false;
  const auto types_a = schema_types(a, ""), types_b = schema_types(b, "");
  const bool typed = keyword(a, "type") && keyword(b, "type");
  const auto both = [&](const std::string& type) {
    return among(types_b, type) || (type == "integer" && among(types_b, "number")) ||
           (type == "number" && among(types_b, "integer"));
  };
  if (typed && std::none_of(types_a.begin(), types_a.end(), both)) return true;
  const std::vector<std::string> objects = {"object"};
  if (types_a != objects || types_b != objects || !keyword(a, "properties")) return false;
  for (const auto& [name, value] : keyword(a, "properties")->items()) {
    const SchemaJson *of_a = constants(a, name), *of_b = constants(b, name);
    if (of_a && of_b && !share_constant(*of_a, *of_b)) return true;
  }
  return false;
}

}  // namespace tandem
