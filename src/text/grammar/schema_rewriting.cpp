#include "text/grammar/schema_rewriting.h"

#include <algorithm>

#include "core/check.h"

namespace tandem {
namespace {

using Json = SchemaJson;

Json reference(const std::string& location) { return {{"$ref", location}}; }
Json negated(Json schema) { return {{"not", std::move(schema)}}; }

Json all_of(Json a, Json b) { return {{"allOf", Json::array({std::move(a), std::move(b)})}}; }

Json with_property(const std::string& name, Json value) {
  return {{"type", "object"},
          {"required", Json::array({name})},
          {"properties", {{name, std::move(value)}}}};
}

Json without_property(const std::string& name) {
  return {{"type", "object"}, {"properties", {{name, false}}}};
}

Json of_type(const char* type, const char* name, Json value) {
  return {{"type", type}, {name, std::move(value)}};
}

// Builds the list of negations_of(), keyword by keyword.
class Negations {
 public:
  Negations(const Json& schema, const std::string& location) : s_(schema), location_(location) {}

  Json write() {
    const Json* nullable = keyword(s_, "nullable");
    require(!nullable || *nullable != true, "{}: \"nullable\" within \"not\" is not supported",
            location_);
    if (keyword(s_, "type")) add_types();
    if (keyword(s_, "const")) add_other_constants(Json::array({s_["const"]}));
    if (const Json* values = list_at(s_, location_, "enum")) add_other_constants(*values);
    add_combined();
    add_numbers();
    add_texts();
    add_arrays();
    add_objects();
    return std::move(out_);
  }

 private:
  void add(Json schema) { out_.push_back(std::move(schema)); }
  std::string at(const std::string& name) const { return location_ + "/" + name; }
  std::string at(const std::string& name, const std::string& part) const {
    return at(name) + "/" + pointer_part(part);
  }
  bool is(const char* name) const { return keyword(s_, name) != nullptr; }

  void add_types() {
    const TypeSet types = declared_types(s_, location_);
    const TypeSet others = kAllTypes & ~types;
    const bool has_integers = (types & kIntegerType) != 0;
    const TypeSet named = has_integers ? others & ~kNumberType : others;
    if (named != kNoTypes) add({{"type", type_names(named)}});
    if (has_integers) add({{"type", "number"}, {"fractional", true}});
  }

  void add_other_constants(const Json& values) {
    TypeSet types = kNoTypes;
    Json texts = Json::array(), numbers = Json::array();
    size_t most_items = 0, most_properties = 0;
    for (const Json& value : values) {
      types |= type_of(value);
      if (value.is_string()) texts.push_back(value);
      if (value.is_number()) numbers.push_back(value);
      if (value.is_array()) most_items = std::max(most_items, value.size());
      if (value.is_object()) most_properties = std::max(most_properties, value.size());
    }
    if ((kAllTypes & ~types) != 0) add({{"type", type_names(kAllTypes & ~types)}});
    if (!texts.empty()) add(of_type("string", "excludedTexts", texts));
    if (types & kBooleanType)
      for (const bool value : {false, true})
        if (std::find(values.begin(), values.end(), Json(value)) == values.end())
          add({{"const", value}});
    // Other arrays and objects must be larger than all constants.
    if (types & kArrayType) add(of_type("array", "minItems", most_items + 1));
    if (types & kObjectType) add(of_type("object", "minProperties", most_properties + 1));
    add_between(std::move(numbers));
  }

  // Adds the intervals below, between and above `numbers`.
  void add_between(Json numbers) {
    std::sort(numbers.begin(), numbers.end(), [](const Json& a, const Json& b) {
      return compare(decimal_of(a), decimal_of(b)) < 0;
    });
    for (size_t i = 0; i <= numbers.size() && !numbers.empty(); ++i) {
      Json between = {{"type", "number"}};
      if (i > 0) between["exclusiveMinimum"] = numbers[i - 1];
      if (i < numbers.size()) between["exclusiveMaximum"] = numbers[i];
      add(std::move(between));
    }
  }

  void add_combined() {
    if (is("$ref")) add(negated({{"$ref", s_["$ref"]}}));
    if (is("not")) add(reference(at("not")));
    if (const Json* all = list_at(s_, location_, "allOf"))
      for (size_t i = 0; i < all->size(); ++i)
        add(negated(reference(at("allOf", std::to_string(i)))));
    if (const Json* any = list_at(s_, location_, "anyOf")) add(none_of("anyOf", any->size()));
    if (const Json* one = list_at(s_, location_, "oneOf")) {
      add(none_of("oneOf", one->size()));
      for (size_t a = 0; a < one->size(); ++a)
        for (size_t b = 0; b < a; ++b)
          add(all_of(reference(at("oneOf", std::to_string(a))),
                     reference(at("oneOf", std::to_string(b)))));
    }
    if (is("if")) {
      if (is("then")) add(all_of(reference(at("if")), negated(reference(at("then")))));
      if (is("else")) add(all_of(negated(reference(at("if"))), negated(reference(at("else")))));
    }
  }

  Json none_of(const std::string& name, size_t n) const {
    Json none = Json::array();
    for (size_t i = 0; i < n; ++i) none.push_back(negated(reference(at(name, std::to_string(i)))));
    return {{"allOf", none}};
  }

  void add_numbers() {
    const std::pair<const char*, const char*> bounds[] = {{"minimum", "exclusiveMaximum"},
                                                          {"maximum", "exclusiveMinimum"},
                                                          {"exclusiveMinimum", "maximum"},
                                                          {"exclusiveMaximum", "minimum"}};
    for (const auto& [name, opposite] : bounds)
      if (is(name) && s_[name].is_number()) add(of_type("number", opposite, s_[name]));
  }

  void add_texts() {
    if (is("pattern")) add(of_type("string", "excludedPattern", s_["pattern"]));
    add_counts("string", "minLength", "maxLength");
  }

  void add_counts(const char* type, const char* least, const char* most) {
    const int min = count_of(s_, location_, least, 0);
    if (min > 0) add(of_type(type, most, min - 1));
    if (is(most)) add(of_type(type, least, count_of(s_, location_, most, 0) + 1));
  }

  void add_arrays() {
    add_counts("array", "minItems", "maxItems");
    const ItemSchemas items = item_schemas(s_, location_);
    const size_t n_first = items.first ? items.first->size() : 0;
    for (size_t i = 0; i < n_first; ++i) {
      Json first = Json(Json::array_t(i, Json(true)));
      first.push_back(negated(reference(at(items.first_name, std::to_string(i)))));
      add({{"type", "array"}, {"minItems", i + 1}, {"prefixItems", first}});
    }
    if (items.others && n_first == 0)
      add(of_type("array", "contains", negated(reference(at(items.others_name)))));
    if (items.others && n_first > 0 && *items.others == false)
      add(of_type("array", "minItems", n_first + 1));
    if (is("contains") && !is("minContains") && !is("maxContains"))
      add(of_type("array", "items", negated(reference(at("contains")))));
  }

  void add_objects() {
    add_counts("object", "minProperties", "maxProperties");
    if (const Json* names = list_at(s_, location_, "required"))
      for (const Json& name : *names)
        if (name.is_string()) add(without_property(name));
    Json known = Json::array(), patterns = Json::array();
    if (const Json* properties = object_at(s_, location_, "properties"))
      for (const auto& [name, value] : properties->items()) {
        known.push_back(name);
        add(with_property(name, negated(reference(at("properties", name)))));
      }
    if (const Json* described = object_at(s_, location_, "patternProperties"))
      for (const auto& [pattern, value] : described->items()) patterns.push_back(pattern);
    if (is("additionalProperties"))
      add(of_type("object", "otherProperty",
                  {{"names", known},
                   {"patterns", patterns},
                   {"value", negated(reference(at("additionalProperties")))}}));
    if (const Json* required = object_at(s_, location_, "dependentRequired"))
      for (const auto& [name, others] : required->items())
        for (const Json& other : others)
          if (other.is_string() && other != name)
            add(all_of(with_property(name, true), without_property(other)));
    if (const Json* dependent = object_at(s_, location_, "dependentSchemas"))
      for (const auto& [name, value] : dependent->items())
        add(all_of(with_property(name, true), negated(reference(at("dependentSchemas", name)))));
  }

  const Json& s_;
  const std::string& location_;
  Json out_ = Json::array();
};

}  // namespace

SchemaJson negations_of(const SchemaJson& schema, const std::string& location) {
  if (schema.is_boolean()) return schema == true ? Json::array() : Json::array({Json(true)});
  return Negations(schema, location).write();
}

SchemaJson exactly_one_of(size_t n, const std::string& location, const AreDisjoint& are_disjoint) {
  const auto one = [&](size_t i) { return reference(location + "/" + std::to_string(i)); };
  Json out = Json::array();
  for (size_t i = 0; i < n; ++i) {
    Json all = Json::array({one(i)});
    for (size_t other = 0; other < n; ++other)
      if (other != i && !are_disjoint(i, other)) all.push_back(negated(one(other)));
    out.push_back(all.size() == 1 ? all[0] : Json{{"allOf", all}});
  }
  return out;
}

SchemaJson alternatives_of_if(const SchemaJson& schema, const std::string& location) {
  const auto part = [&](const char* name) {
    return keyword(schema, name) ? reference(location + "/" + name) : Json(true);
  };
  return Json::array({all_of(part("if"), part("then")), all_of(negated(part("if")), part("else"))});
}

std::vector<SchemaJson> alternatives_of_dependencies(const SchemaJson& schema,
                                                     const std::string& location) {
  std::vector<Json> all;
  const TypeSet others = kAllTypes & ~kObjectType;
  for (const char* kind : {"dependentRequired", "dependentSchemas", "dependencies"}) {
    const Json* dependencies = object_at(schema, location, kind);
    if (!dependencies) continue;
    for (const auto& [name, asked] : dependencies->items()) {
      Json fits = reference(location + "/" + kind + "/" + pointer_part(name));
      if (asked.is_array()) {
        fits = {{"type", "object"}, {"required", asked}};
        fits["required"].push_back(name);
      } else {
        fits = all_of(with_property(name, true), std::move(fits));
      }
      all.push_back(Json::array(
          {without_property(name), std::move(fits), Json{{"type", type_names(others)}}}));
    }
  }
  return all;
}

std::string pointer_part(std::string_view name) {
  std::string part;
  for (const char c : name) {
    if (c == '~') {
      part += "~0";
    } else if (c == '/') {
      part += "~1";
    } else if (c == '%') {
      part += "%25";
    } else {
      part += c;
    }
  }
  return part;
}

}  // namespace tandem
