// Tests whether a JSON value fits a schema, keyword by keyword, without code of the grammar.
#pragma once
#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <regex>
#include <string>

#include "text/utf8.h"

namespace tandem::test {

using SchemaJson = nlohmann::ordered_json;

class JsonValidator {
 public:
  explicit JsonValidator(const SchemaJson& root) : root_(root) {}

  bool fits(const SchemaJson& value) const { return fits(value, root_); }

 private:
  bool fits(const SchemaJson& v, const SchemaJson& s) const {
    if (s.is_boolean()) return s.get<bool>();
    if (s.value("nullable", false) && v.is_null()) return true;
    if (s.contains("$ref") &&
        !fits(v, root_.at(SchemaJson::json_pointer(s["$ref"].get<std::string>().substr(1)))))
      return false;
    if (s.contains("type") && !has_type(v, s["type"])) return false;
    if (s.contains("const") && !equal(v, s["const"])) return false;
    if (s.contains("enum") &&
        std::none_of(s["enum"].begin(), s["enum"].end(), [&](auto& one) { return equal(v, one); }))
      return false;
    if (s.contains("anyOf") && count(v, s["anyOf"]) == 0) return false;
    if (s.contains("oneOf") && count(v, s["oneOf"]) != 1) return false;
    if (s.contains("allOf") && count(v, s["allOf"]) != s["allOf"].size()) return false;
    if (s.contains("not") && fits(v, s["not"])) return false;
    if (s.contains("if")) {
      const char* then = fits(v, s["if"]) ? "then" : "else";
      if (s.contains(then) && !fits(v, s[then])) return false;
    }
    if (v.is_object()) return object_fits(v, s);
    if (v.is_array()) return array_fits(v, s);
    if (v.is_string()) return string_fits(v, s);
    if (v.is_number()) return number_fits(v.get<double>(), s);
    return true;
  }

  size_t count(const SchemaJson& v, const SchemaJson& schemas) const {
    return std::count_if(schemas.begin(), schemas.end(), [&](auto& s) { return fits(v, s); });
  }

  static bool equal(const SchemaJson& a, const SchemaJson& b) {
    return nlohmann::json(a) == nlohmann::json(b);
  }

  static bool has_type(const SchemaJson& v, const SchemaJson& type) {
    if (type.is_array())
      return std::any_of(type.begin(), type.end(), [&](auto& t) { return has_type(v, t); });
    if (type == "integer") return v.is_number() && v.get<double>() == std::floor(v.get<double>());
    return type == v.type_name();
  }

  bool object_fits(const SchemaJson& v, const SchemaJson& s) const {
    for (const auto& name : s.value("required", SchemaJson::array()))
      if (!v.contains(name.get<std::string>())) return false;
    if (s.contains("minProperties") && v.size() < s["minProperties"]) return false;
    if (s.contains("maxProperties") && v.size() > s["maxProperties"]) return false;
    const SchemaJson dependent = s.value("dependentRequired", SchemaJson::object());
    for (const auto& [name, others] : dependent.items())
      for (const SchemaJson& other : others)
        if (v.contains(name) && !v.contains(other.get<std::string>())) return false;
    const SchemaJson dependent_schemas = s.value("dependentSchemas", SchemaJson::object());
    for (const auto& [name, schema] : dependent_schemas.items())
      if (v.contains(name) && !fits(v, schema)) return false;
    const SchemaJson properties = s.value("properties", SchemaJson::object());
    const SchemaJson patterns = s.value("patternProperties", SchemaJson::object());
    for (const auto& [name, value] : v.items()) {
      bool known = properties.contains(name);
      if (known && !fits(value, properties[name])) return false;
      if (s.contains("propertyNames") && !fits(SchemaJson(name), s["propertyNames"])) return false;
      for (const auto& [pattern, schema] : patterns.items()) {
        if (!std::regex_search(wide(name), std::wregex(wide(pattern)))) continue;
        known = true;
        if (!fits(value, schema)) return false;
      }
      if (!known && s.contains("additionalProperties") && !fits(value, s["additionalProperties"]))
        return false;
    }
    return true;
  }

  bool array_fits(const SchemaJson& v, const SchemaJson& s) const {
    if (s.contains("minItems") && v.size() < s["minItems"]) return false;
    if (s.contains("maxItems") && v.size() > s["maxItems"]) return false;
    const SchemaJson prefix = s.value("prefixItems", SchemaJson::array());
    for (size_t i = 0; i < v.size(); ++i)
      if (!fits(v[i], i < prefix.size() ? prefix[i] : s.value("items", SchemaJson(true))))
        return false;
    if (s.contains("contains")) {
      const size_t n =
          std::count_if(v.begin(), v.end(), [&](auto& item) { return fits(item, s["contains"]); });
      if (n < s.value("minContains", 1U) || n > s.value("maxContains", 1000U)) return false;
    }
    if (s.value("uniqueItems", false))
      for (size_t a = 0; a < v.size(); ++a)
        for (size_t b = 0; b < a; ++b)
          if (equal(v[a], v[b])) return false;
    return true;
  }

  static bool string_fits(const SchemaJson& v, const SchemaJson& s) {
    const std::string text = v;
    const size_t n =
        std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xc0) != 0x80; });
    if (s.contains("minLength") && n < s["minLength"]) return false;
    if (s.contains("maxLength") && n > s["maxLength"]) return false;
    return !s.contains("pattern") ||
           std::regex_search(wide(text), std::wregex(wide(s["pattern"].get<std::string>())));
  }

  static std::wstring wide(const std::string& text) {
    std::wstring wide;
    for (size_t at = 0; at < text.size();) {
      const CodePoint c = decode_utf8(text, at);
      wide += static_cast<wchar_t>(c.value);
      at += c.n_bytes;
    }
    return wide;
  }

  static bool number_fits(double v, const SchemaJson& s) {
    if (s.contains("multipleOf")) {
      const double times = v / s["multipleOf"].get<double>();
      if (std::abs(times - std::round(times)) > 1e-9) return false;
    }
    return (!s.contains("minimum") || v >= s["minimum"].get<double>()) &&
           (!s.contains("maximum") || v <= s["maximum"].get<double>()) &&
           (!s.contains("exclusiveMinimum") || v > s["exclusiveMinimum"].get<double>()) &&
           (!s.contains("exclusiveMaximum") || v < s["exclusiveMaximum"].get<double>());
  }

  const SchemaJson& root_;
};

}  // namespace tandem::test
