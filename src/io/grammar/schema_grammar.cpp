#include "io/grammar/schema_grammar.h"

#include <fmt/format.h>

#include <algorithm>
#include <deque>
#include <map>
#include <memory>
#include <optional>

#include "core/check.h"
#include "io/grammar/characters.h"
#include "io/grammar/pattern_grammar.h"
#include "io/grammar/schema_keywords.h"
#include "io/json.h"

namespace tandem {
namespace {

using Node = Grammar::Node;
using Rule = Grammar::Rule;
using Json = SchemaJson;

constexpr int kNoLimit = -1;

class SchemaWriter {
 public:
  SchemaWriter(Grammar& grammar, const JsonRules& json, const Json& schema)
      : g_(grammar), json_(json), root_(schema) {}

  Rule write() {
    const Rule root = referred("#", "#");
    for (; !unwritten_.empty(); unwritten_.pop_front()) {
      const auto& [rule, schema, place] = unwritten_.front();
      write_rule(rule, *schema, place);
    }
    return root;
  }

 private:
  // The rule of what a reference points to, written later.
  Rule referred(const std::string& pointer, const std::string& place) {
    const auto [it, is_new] = referred_.try_emplace(pointer, -1);
    if (is_new) {
      const Json& schema = target(pointer, place);
      it->second = g_.add_rule();
      unwritten_.push_back({it->second, &schema, pointer});
    }
    return it->second;
  }

  const Json& target(const std::string& pointer, const std::string& place) const {
    require(pointer == "#" || pointer.compare(0, 2, "#/") == 0,
            "{}: $ref {} is not supported: only those into the schema itself, such as "
            "\"#/$defs/name\"",
            place, shown(pointer));
    try {
      return root_.at(Json::json_pointer(pointer.substr(1)));
    } catch (const Json::exception&) {
      fail("{}: $ref {} points to nothing", place, shown(pointer));
    }
  }

  Rule rule_of(const Json& schema, const std::string& place) {
    const std::optional<Rule> simple = simple_rule(schema, place);
    if (simple) return *simple;
    const Rule rule = g_.add_rule();
    write_rule(rule, schema, place);
    return rule;
  }

  // Of schemas that JSON has a rule for.
  std::optional<Rule> simple_rule(const Json& schema, const std::string& place) {
    if (schema.is_boolean() && schema == true) return json_.value;
    if (!schema.is_object()) return {};
    const Json* ref = keyword(schema, "$ref");
    if (ref && ref->is_string() && !keyword(schema, "nullable")) {
      require_understood(schema, place, "$ref");
      return referred(ref->get<std::string>(), place);
    }
    return {};
  }

  void write_rule(Rule rule, const Json& schema, const std::string& place) {
    require(schema != false, "{}: nothing fits false", place);
    if (const auto simple = simple_rule(schema, place))
      return g_.call(g_.start(rule), *simple, g_.end(rule));
    require(schema.is_object(), "{} is {}: must be a schema, which is an object", place,
            shown(schema));
    for (const char* alone : {"$ref", "const", "enum", "anyOf", "oneOf", "allOf"})
      if (keyword(schema, alone)) return write_alone(rule, schema, place, alone);
    require_understood(schema, place, "");
    const std::vector<std::string> types = schema_types(schema, place);
    if (types.empty()) return g_.call(g_.start(rule), json_.value, g_.end(rule));
    for (const std::string& type : types) write_type(rule, schema, place, type);
  }

  void write_alone(Rule rule, const Json& schema, const std::string& place,
                   const std::string& name) {
    require_understood(schema, place, name);
    const Json& value = schema[name];
    if (name == "$ref") {
      require(value.is_string(), "{}: $ref is {}: must be a text", place, shown(value));
      g_.call(g_.start(rule), referred(value.get<std::string>(), place), g_.end(rule));
    } else if (name == "const") {
      write_constants(rule, schema, place, Json::array({value}));
    } else if (name == "enum") {
      require(value.is_array(), "{}: enum is {}: must be a list", place, shown(value));
      write_constants(rule, schema, place, value);
    } else {
      require(value.is_array() && !value.empty(), "{}: {} is {}: must be a list of schemas", place,
              name, shown(value));
      require(name != "allOf" || value.size() == 1,
              "{}: allOf of more than one schema is not supported", place);
      for (size_t i = 0; i < value.size(); ++i)
        g_.call(g_.start(rule), rule_of(value[i], fmt::format("{}/{}/{}", place, name, i)),
                g_.end(rule));
      if (name == "oneOf") require_apart(value, place);
    }
    const Json* nullable = keyword(schema, "nullable");
    if (nullable && *nullable == true) g_.call(g_.start(rule), json_.null, g_.end(rule));
  }

  // A text of one of them must not fit another: the grammar does not look at them together.
  void require_apart(const Json& schemas, const std::string& place) const {
    for (size_t a = 0; a < schemas.size(); ++a)
      for (size_t b = 0; b < a; ++b)
        require(are_apart(followed(schemas[a], place), followed(schemas[b], place)),
                "{}: oneOf is supported only where its schemas have different types, or a required "
                "property with different constants: use anyOf",
                place);
  }

  const Json& followed(const Json& schema, const std::string& place) const {
    constexpr int kMostSteps = 16;
    const Json* found = &schema;
    for (int i = 0; i < kMostSteps && found->is_object() && keyword(*found, "$ref"); ++i)
      if ((*found)["$ref"].is_string()) found = &target((*found)["$ref"].get<std::string>(), place);
    return *found;
  }

  void write_constants(Rule rule, const Json& schema, const std::string& place,
                       const Json& values) {
    const std::vector<std::string> types = schema_types(schema, place);
    const Json* fixed = keyword(schema, "const");
    int n = 0;
    for (const Json& value : values) {
      const bool fits =
          types.empty() || std::any_of(types.begin(), types.end(), [&](auto& type) {
            return type == value.type_name() || (type == "integer" && value.is_number_integer());
          });
      if (!fits || (fixed && *fixed != value)) continue;
      g_.text(g_.start(rule), value.dump(), g_.end(rule));
      ++n;
    }
    require(n > 0, "{}: none of its constants fits its type", place);
  }

  void write_type(Rule rule, const Json& schema, const std::string& place,
                  const std::string& type) {
    if (type == "object") return write_object(rule, schema, place);
    if (type == "array") return write_array(rule, schema, place);
    if (type == "string") return write_string(rule, schema, place);
    if (type == "integer" || type == "number") return write_number(rule, schema, place, type);
    g_.call(g_.start(rule), type == "null" ? json_.null : json_.boolean, g_.end(rule));
  }

  struct Property {
    std::string name;
    Rule value;
    bool required;
  };

  void write_object(Rule rule, const Json& schema, const std::string& place) {
    const bool free = !keyword(schema, "properties") && !keyword(schema, "required") &&
                      !keyword(schema, "additionalProperties");
    if (free) return g_.call(g_.start(rule), json_.object, g_.end(rule));
    const Json* more = keyword(schema, "additionalProperties");
    const bool has_more = more && *more != false;
    const std::vector<Property> properties = properties_of(schema, place, more);

    // Before the property: the first of its object, or one after a comma.
    Node first = after_space(g_, json_, g_.byte(g_.start(rule), '{')), later = g_.add_node();
    for (const Property& property : properties) {
      const Node key = key_after(first, later);
      const Node colon = g_.text(key, Json(property.name).dump() + ":");
      const Node next_first = g_.add_node(), next_later = g_.add_node();
      g_.call(after_space(g_, json_, colon), property.value, next_later);
      if (!property.required) {
        g_.skip(first, next_first);
        g_.skip(later, next_later);
      }
      first = next_first;
      later = next_later;
    }
    if (has_more) {
      const Node colon = g_.byte(g_.called(key_after(first, later), other_name(properties)), ':');
      g_.call(after_space(g_, json_, colon), rule_of(*more, place + "/additionalProperties"),
              later);
    }
    const Node close = g_.add_node();
    g_.skip(first, close);
    g_.skip(after_space(g_, json_, later), close);
    g_.bytes(close, '}', '}', g_.end(rule));
  }

  Node key_after(Node first, Node later) {
    const Node key = after_space(g_, json_, g_.byte(later, ','));
    g_.skip(first, key);
    return key;
  }

  std::vector<Property> properties_of(const Json& schema, const std::string& place,
                                      const Json* more) {
    std::vector<std::string> required;
    if (const Json* names = keyword(schema, "required")) {
      require(names->is_array(), "{}: required is {}: must be a list of names", place,
              shown(*names));
      for (const Json& name : *names) {
        require(name.is_string(), "{}: required has {}: must be a name", place, shown(name));
        required.push_back(name.get<std::string>());
      }
    }
    std::vector<Property> properties;
    if (const Json* described = keyword(schema, "properties")) {
      require(described->is_object(), "{}: properties is {}: must be an object", place,
              shown(*described));
      for (const auto& [name, value] : described->items()) {
        const auto it = std::find(required.begin(), required.end(), name);
        const bool is_required = it != required.end();
        if (is_required) required.erase(it);
        // What is never there may be anything.
        if (value == false && !is_required) continue;
        properties.push_back(
            {name, rule_of(value, fmt::format("{}/properties/{}", place, name)), is_required});
      }
    }
    for (const std::string& name : required) {
      require(!more || *more != false, "{}: {} is required, but no property", place, shown(name));
      properties.push_back({name, more ? rule_of(*more, place) : json_.value, true});
    }
    return properties;
  }

  // A name in quotes that none of `properties` has: at each of their beginnings it may go on
  // otherwise. What is escaped is left out, as it might be one of them.
  Rule other_name(const std::vector<Property>& properties) {
    const Rule rule = g_.add_rule();
    const Node quote = g_.byte(g_.start(rule), '"'), rest = g_.add_node();
    add_string_character(g_, rest, rest);
    g_.bytes(rest, '"', '"', g_.end(rule));
    struct Begin {
      std::map<char32_t, std::unique_ptr<Begin>> next;
      bool is_name = false;
    } names;
    for (const Property& property : properties) {
      Begin* at = &names;
      for (const char32_t c : characters_of(property.name)) {
        auto& next = at->next[c];
        if (!next) next = std::make_unique<Begin>();
        at = next.get();
      }
      at->is_name = true;
    }
    std::vector<std::pair<Node, const Begin*>> open = {{quote, &names}};
    while (!open.empty()) {
      const auto [node, begin] = open.back();
      open.pop_back();
      CharacterSet known;
      for (const auto& [c, next] : begin->next) {
        known.push_back({c, c});
        const Node after = g_.add_node();
        add_characters(g_, node, after, {{c, c}}, Writing::kJson);
        open.emplace_back(after, next.get());
      }
      add_characters(g_, node, rest, inverted(known), Writing::kJson);
      if (!begin->is_name) g_.bytes(node, '"', '"', g_.end(rule));
    }
    return rule;
  }

  void write_array(Rule rule, const Json& schema, const std::string& place) {
    const Json* items = keyword(schema, "items");
    const Json* prefix = keyword(schema, "prefixItems");
    const int min = count_of(schema, place, "minItems", 0);
    int max = count_of(schema, place, "maxItems", kNoLimit);
    std::vector<Rule> begin;
    if (prefix) {
      require(prefix->is_array(), "{}: prefixItems is {}: must be a list of schemas", place,
              shown(*prefix));
      for (size_t i = 0; i < prefix->size(); ++i)
        begin.push_back(rule_of((*prefix)[i], fmt::format("{}/prefixItems/{}", place, i)));
    }
    const auto n_begin = static_cast<int>(begin.size());
    const bool ends = items && *items == false;
    if (ends) max = max == kNoLimit ? n_begin : std::min(max, n_begin);
    require(max == kNoLimit || min <= max, "{}: no array has from {} to {} items", place, min, max);
    const Rule item = !items || ends ? json_.value : rule_of(*items, place + "/items");

    const Node close = g_.add_node();
    Node node = after_space(g_, json_, g_.byte(g_.start(rule), '['));
    const int n = std::max({min, max, n_begin, 1});
    for (int i = 0; i < n && i != max; ++i) {
      if (i > 0) {
        if (i >= min) g_.skip(after_space(g_, json_, node), close);
        node = after_space(g_, json_, g_.byte(node, ','));
      } else if (min == 0) {
        g_.skip(node, close);
      }
      node = g_.called(node, i < n_begin ? begin[i] : item);
    }
    if (max == 0) {
      g_.skip(node, close);
    } else {
      if (max == kNoLimit) g_.call(after_space(g_, json_, g_.byte(node, ',')), item, node);
      g_.skip(after_space(g_, json_, node), close);
    }
    g_.bytes(close, ']', ']', g_.end(rule));
  }

  void write_string(Rule rule, const Json& schema, const std::string& place) {
    const Json *pattern = keyword(schema, "pattern"), *format = keyword(schema, "format");
    require(!format || format->is_string(), "{}: format must be a text", place);
    const std::string of_format = format ? format_pattern(format->get<std::string>()) : "";
    const int min = count_of(schema, place, "minLength", 0);
    const int max = count_of(schema, place, "maxLength", kNoLimit);
    const bool any_length = min == 0 && max == kNoLimit;
    require((pattern != nullptr) + !of_format.empty() + !any_length <= 1,
            "{}: only one of pattern, format and a length is supported at a time", place);
    require(max == kNoLimit || min <= max, "{}: no text has from {} to {} characters", place, min,
            max);
    if (!pattern && of_format.empty() && any_length)
      return g_.call(g_.start(rule), json_.string, g_.end(rule));

    Node node = g_.byte(g_.start(rule), '"');
    const Node last = g_.add_node();
    g_.bytes(last, '"', '"', g_.end(rule));
    if (pattern || !of_format.empty()) {
      require(!pattern || pattern->is_string(), "{}: pattern must be a text", place);
      return write_pattern(node, last, pattern ? pattern->get<std::string>() : of_format, place);
    }
    for (int i = 0; i < std::max(min, max); ++i) {
      if (i >= min) g_.skip(node, last);
      const Node next = g_.add_node();
      add_string_character(g_, node, next);
      node = next;
    }
    if (max == kNoLimit) add_string_character(g_, node, node);
    g_.skip(node, last);
  }

  void write_pattern(Node from, Node to, const std::string& pattern, const std::string& place) {
    try {
      add_pattern(g_, from, to, pattern, Writing::kJson, false);
    } catch (const Error& error) {
      fail("{}: pattern {}: {}", place, shown(pattern), error.what());
    }
  }

  void write_number(Rule rule, const Json& schema, const std::string& place,
                    const std::string& type) {
    const bool integer = type == "integer";
    const NumberBounds bounds = number_bounds(schema, place, integer);
    if (!bounds.min && !bounds.max)
      return g_.call(g_.start(rule), integer ? json_.integer : json_.number, g_.end(rule));
    try {
      (integer ? add_integers : add_numbers)(g_, rule, bounds);
    } catch (const Error& error) {
      fail("{}: {}", place, error.what());
    }
  }

  struct Unwritten {
    Rule rule;
    const Json* schema;
    std::string place;
  };

  Grammar& g_;
  const JsonRules& json_;
  const Json& root_;
  std::map<std::string, Rule> referred_;
  std::deque<Unwritten> unwritten_;
};

}  // namespace

Rule add_schema(Grammar& grammar, const JsonRules& json, const SchemaJson& schema) {
  return SchemaWriter(grammar, json, schema).write();
}

}  // namespace tandem
