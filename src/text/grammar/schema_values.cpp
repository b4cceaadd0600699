#include "text/grammar/schema_values.h"

#include <algorithm>

#include "core/check.h"

namespace tandem {
namespace {

using Json = SchemaJson;

constexpr int64_t kFewIntegers = 64;

TypeSet with_integers(TypeSet types) { return types & kNumberType ? types | kIntegerType : types; }

}  // namespace

bool SchemaValues::fits(const Json& value, const Json& schema) {
  Constraints constraints;
  document_.add_constraints(schema, constraints);
  return fits(value, constraints);
}

bool SchemaValues::fits(const Json& value, const Constraints& constraints) {
  if (constraints.unsatisfiable) return false;
  for (const Json* schema : constraints.schemas)
    if (!fits_keywords(value, *schema)) return false;
  return std::all_of(constraints.choices.begin(), constraints.choices.end(), [&](auto& choice) {
    for (size_t i = 0; i < choice.list->size(); ++i) {
      Constraints one;
      document_.add_constraints(choice, i, one);
      if (fits(value, one)) return true;
    }
    return false;
  });
}

bool SchemaValues::fits_keywords(const Json& v, const Json& s) {
  const std::string& at = document_.location(s);
  const TypeSet types = with_integers(declared_types(s, at));
  const bool is_integer = v.is_number() && decimal_of(v).fraction.empty();
  if (((is_integer ? kIntegerType : type_of(v)) & types) == 0) return false;
  if (const Json* fixed = keyword(s, "const"); fixed && !equal(v, *fixed)) return false;
  if (const Json* values = list_at(s, at, "enum"); values && !holds(*values, v)) return false;
  if (v.is_number()) {
    NumberSet numbers;
    numbers.fractional = keyword(s, "fractional") != nullptr;
    narrow(numbers, s, at);
    return tandem::fits(decimal_of(v), numbers);
  }
  if (v.is_string()) return fits_text(v.get_ref<const std::string&>(), s);
  if (v.is_array()) return fits_array(v, s);
  return !v.is_object() || fits_object(v, s);
}

bool SchemaValues::fits_text(const std::string& text, const Json& s) {
  const std::string& at = document_.location(s);
  const int n = n_characters(text), max = count_of(s, at, "maxLength", kMaxCount);
  if (n < count_of(s, at, "minLength", 0) || (n > max && max < kMaxCount)) return false;
  for (const std::string& pattern : patterns_of(s, at))
    if (!matches(document_.automaton_for(pattern, at), text)) return false;
  if (const Json* texts = keyword(s, "excludedTexts"); texts && holds(*texts, text)) return false;
  const Json* excluded = text_at(s, at, "excludedPattern");
  return !excluded || !matches(document_.automaton_for(excluded->get<std::string>(), at), text);
}

bool SchemaValues::fits_array(const Json& v, const Json& s) {
  const std::string& at = document_.location(s);
  const auto n = static_cast<int>(v.size());
  if (n < count_of(s, at, "minItems", 0) || n > count_of(s, at, "maxItems", n)) return false;
  const ItemSchemas items = item_schemas(s, at);
  const size_t n_first = items.first ? items.first->size() : 0;
  for (size_t i = 0; i < v.size(); ++i) {
    if (i < n_first && !fits(v[i], document_.part(s, items.first_name, i))) return false;
    if (i >= n_first && items.others && !fits(v[i], document_.part(s, items.others_name)))
      return false;
  }
  if (keyword(s, "contains")) {
    const auto n_fit = static_cast<int>(std::count_if(v.begin(), v.end(), [&](const Json& item) {
      return fits(item, document_.part(s, "contains"));
    }));
    if (n_fit < count_of(s, at, "minContains", 1) || n_fit > count_of(s, at, "maxContains", n_fit))
      return false;
  }
  const Json* unique = keyword(s, "uniqueItems");
  return !unique || *unique != true ||
         std::set<nlohmann::json>(v.begin(), v.end()).size() == v.size();
}

bool SchemaValues::holds(const Json& list, const Json& value) {
  const auto [it, is_new] = sets_.try_emplace(&list);
  if (is_new) it->second.insert(list.begin(), list.end());
  return it->second.count(nlohmann::json(value)) > 0;
}

bool SchemaValues::fits_object(const Json& v, const Json& s) {
  const std::string& at = document_.location(s);
  require(!keyword(s, "unevaluatedProperties"),
          "{}: constants beside \"unevaluatedProperties\" are not supported", at);
  const auto n = static_cast<int>(v.size());
  if (n < count_of(s, at, "minProperties", 0) || n > count_of(s, at, "maxProperties", n))
    return false;
  if (const Json* required = list_at(s, at, "required"))
    for (const Json& name : *required)
      if (!name.is_string() || !v.contains(name.get<std::string>())) return false;
  const Json* properties = object_at(s, at, "properties");
  const Json* by_pattern = object_at(s, at, "patternProperties");
  const Json patterns = by_pattern ? *by_pattern : Json::object();
  const auto matches_name = [&](const std::string& pattern, const std::string& name) {
    return matches(document_.automaton_for(pattern, at), name);
  };
  for (const auto& [name, value] : v.items()) {
    bool known = false;
    if (keyword(s, "propertyNames") && !fits(Json(name), document_.part(s, "propertyNames")))
      return false;
    if (properties && properties->contains(name)) {
      known = true;
      if (!fits(value, document_.part(s, "properties", name))) return false;
    }
    for (const auto& [pattern, described] : patterns.items()) {
      if (!matches_name(pattern, name)) continue;
      known = true;
      if (!fits(value, document_.part(s, "patternProperties", pattern))) return false;
    }
    if (!known && keyword(s, "additionalProperties") &&
        !fits(value, document_.part(s, "additionalProperties")))
      return false;
  }
  const Json* other = keyword(s, "otherProperty");
  if (!other) return true;
  for (const auto& [name, value] : v.items()) {
    const Json &names = (*other)["names"], &excluded = (*other)["patterns"];
    const bool named =
        std::find(names.begin(), names.end(), name) != names.end() ||
        std::any_of(excluded.begin(), excluded.end(), [&, &text = name](const Json& pattern) {
          return matches_name(pattern.get<std::string>(), text);
        });
    if (!named && fits(value, document_.part(s, "otherProperty", "value"))) return true;
  }
  return false;
}

std::optional<std::vector<Json>> SchemaValues::constants(const Constraints& constraints) {
  auto values = candidates(constraints);
  if (!values) return {};
  std::vector<Json> fitting;
  std::set<nlohmann::json> seen;
  for (Json& value : *values)
    if (seen.insert(nlohmann::json(value)).second && fits(value, constraints))
      fitting.push_back(std::move(value));
  return fitting;
}

std::optional<std::vector<Json>> SchemaValues::candidates(const Constraints& constraints) const {
  std::vector<Json> values;
  for (const Json* schema : constraints.schemas) {
    if (const Json* value = keyword(*schema, "const")) return std::vector<Json>{*value};
    if (const Json* list = list_at(*schema, document_.location(*schema), "enum"))
      return std::vector<Json>(list->begin(), list->end());
  }
  const TypeSet types = types_of(document_, constraints);
  if ((types & ~(kNullType | kBooleanType | kIntegerType)) != 0) return {};
  if (types & kNullType) values.emplace_back(nullptr);
  if (types & kBooleanType) values.insert(values.end(), {false, true});
  if (types & kIntegerType) {
    const NumberSet set = numbers_of(document_, constraints);
    constexpr size_t kMaxDigits = 15;
    const bool near = set.min && set.max && set.min->integer.size() <= kMaxDigits &&
                      set.max->integer.size() <= kMaxDigits;
    if (!near) return {};
    const auto to_integer = [](const Decimal& d) {
      return (d.negative ? -1 : 1) * std::stoll(d.integer);
    };
    const int64_t first = to_integer(*set.min), last = to_integer(*set.max);
    if (last < first || last - first >= kFewIntegers) return {};
    for (int64_t value = first; value <= last; ++value) values.emplace_back(value);
  }
  return values;
}

TypeSet types_of(const SchemaDocument& document, const Constraints& constraints) {
  TypeSet declared = kAllTypes | kIntegerType, described = kNoTypes;
  bool is_declared = false;
  for (const Json* schema : constraints.schemas) {
    declared &= with_integers(declared_types(*schema, document.location(*schema)));
    described |= implied_types(*schema);
    is_declared = is_declared || keyword(*schema, "type");
  }
  const TypeSet types = is_declared || described == kNoTypes ? declared : declared & described;
  return types & kNumberType ? types & ~kIntegerType : types;
}

NumberSet numbers_of(const SchemaDocument& document, const Constraints& constraints) {
  NumberSet numbers;
  if (types_of(document, constraints) & kIntegerType) numbers.step = DecimalStep{};
  for (const Json* schema : constraints.schemas) {
    narrow(numbers, *schema, document.location(*schema));
    numbers.fractional = numbers.fractional || keyword(*schema, "fractional");
  }
  return numbers;
}

std::vector<std::string> patterns_of(const Json& schema, const std::string& location) {
  std::vector<std::string> patterns;
  if (const Json* pattern = text_at(schema, location, "pattern"))
    patterns.push_back(pattern->get<std::string>());
  const Json* format = text_at(schema, location, "format");
  const std::string of_format = format ? format_pattern(format->get<std::string>()) : "";
  if (!of_format.empty()) patterns.push_back(of_format);
  return patterns;
}

bool equal(const Json& a, const Json& b) { return nlohmann::json(a) == nlohmann::json(b); }

}  // namespace tandem
