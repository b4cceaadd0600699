#include "text/grammar/schema_document.h"

#include <utility>

#include "core/check.h"
#include "io/json.h"
#include "text/grammar/pattern_grammar.h"
#include "text/grammar/schema_rewriting.h"

namespace tandem {
namespace {

using Json = SchemaJson;

constexpr int kMaxSteps = 300'000;  // a step takes about 1 us
constexpr size_t kMaxOpenSchemas = 256, kMaxCombinedSchemas = 2'000;

// The constant or the list of constants that a required property must have; null if it may have
// other values.
const Json* constants(const Json& schema, const std::string& property) {
  const Json *required = keyword(schema, "required"), *properties = keyword(schema, "properties");
  if (!required || !required->is_array() || !properties || !properties->is_object()) return nullptr;
  if (std::find(required->begin(), required->end(), property) == required->end()) return nullptr;
  const auto it = properties->find(property);
  if (it == properties->end() || !it->is_object()) return nullptr;
  const Json *value = keyword(*it, "const"), *values = keyword(*it, "enum");
  return value && !value->is_array() ? value : values && values->is_array() ? values : nullptr;
}

// Compares as nlohmann::json, in which 1 and 1.0 are equal.
bool share_constant(const Json& a, const Json& b) {
  if (a.is_array())
    return std::any_of(a.begin(), a.end(), [&](const Json& v) { return share_constant(v, b); });
  if (b.is_array())
    return std::any_of(b.begin(), b.end(), [&](const Json& v) { return share_constant(a, v); });
  return nlohmann::json(a) == nlohmann::json(b);
}

}  // namespace

SchemaDocument::SchemaDocument(const Json& root) : root_(root) {
  register_part(root, "#", false);
  find_anchors(root, "#");
}

void SchemaDocument::add_constraints(const Json& schema, Constraints& constraints) {
  require(++n_steps_ <= kMaxSteps, "too large: its schemas can be combined in too many ways");
  if (schema.is_boolean()) {
    constraints.unsatisfiable = constraints.unsatisfiable || schema == false;
    return;
  }
  require(!contains(in_progress_, &schema), "{}: the schema refers only to itself",
          location(schema));
  require(in_progress_.size() < kMaxOpenSchemas && constraints.schemas.size() < kMaxCombinedSchemas,
          "{}: too many references and schemas are combined", location(schema));
  if (contains(constraints.schemas, &schema)) return;
  if (!is_generated(schema)) require_supported(schema, location(schema));
  const bool has_id =
      !is_generated(schema) && &schema != &root_ && text_at(schema, location(schema), "$id");
  require(!has_id, "{}: \"$id\" is only supported at the root", location(schema));
  in_progress_.push_back(&schema);
  add_applied(schema, constraints);
  in_progress_.pop_back();
}

void SchemaDocument::add_constraints(const Constraints::Choice& choice, size_t i,
                                     Constraints& constraints) {
  const std::vector<const Json*> open = std::exchange(in_progress_, choice.within);
  add_constraints(item(*choice.list, i), constraints);
  in_progress_ = open;
}

void SchemaDocument::add_applied(const Json& s, Constraints& constraints) {
  const std::string at = location(s);
  const Json* nullable = keyword(s, "nullable");
  if (nullable && *nullable == true) {
    return add_choice(derived(s, "nullable", false,
                              [&] {
                                Json other = s;
                                other.erase("nullable");
                                return Json::array({Json{{"type", "null"}}, other});
                              }),
                      constraints);
  }
  constraints.schemas.push_back(&s);
  if (const Json* reference = text_at(s, at, "$ref"))
    add_constraints(target(reference->get<std::string>(), at), constraints);
  for (const char* name : {"allOf", "anyOf", "oneOf"}) {
    const Json* list = list_at(s, at, name);
    require(!list || !list->empty() || is_generated(s),
            "{}: {} is []: must be a list of at least one schema", at, name);
  }
  if (const Json* all = keyword(s, "allOf"))
    for (size_t i = 0; i < all->size(); ++i) add_constraints(part(s, "allOf", i), constraints);
  if (keyword(s, "anyOf")) add_choice(part(s, "anyOf"), constraints);
  if (keyword(s, "oneOf")) {
    const Json& list = part(s, "oneOf");
    const auto disjoint = [&](size_t a, size_t b) {
      return are_disjoint(item(list, a), item(list, b));
    };
    add_choice(derived(list, "", true,
                       [&] { return exactly_one_of(list.size(), location(list), disjoint); }),
               constraints);
  }
  if (keyword(s, "not")) {
    const Json& excluded = resolved(part(s, "not"));
    if (!is_generated(excluded)) require_supported(excluded, location(excluded));
    add_choice(
        derived(excluded, "not", true, [&] { return negations_of(excluded, location(excluded)); }),
        constraints);
  }
  if (keyword(s, "if"))
    add_choice(derived(s, "if", true, [&] { return alternatives_of_if(s, at); }), constraints);
  const Json& dependencies =
      derived(s, "dependencies", true, [&] { return Json(alternatives_of_dependencies(s, at)); });
  for (size_t i = 0; i < dependencies.size(); ++i) add_choice(item(dependencies, i), constraints);
}

void SchemaDocument::add_choice(const Json& list, Constraints& constraints) {
  const auto known = [&](const Constraints::Choice& choice) { return choice.list == &list; };
  if (std::any_of(constraints.choices.begin(), constraints.choices.end(), known)) return;
  if (std::find(list.begin(), list.end(), Json(true)) != list.end()) return;
  if (list.empty()) constraints.unsatisfiable = true;
  if (list.size() == 1) return add_constraints(item(list, 0), constraints);
  constraints.choices.push_back({&list, in_progress_});
}

const Json& SchemaDocument::part(const Json& of, const char* keyword) {
  return register_part(of.at(keyword), location(of) + "/" + keyword, is_generated(of));
}

const Json& SchemaDocument::part(const Json& of, const char* keyword, const std::string& name) {
  return register_part(of.at(keyword).at(name),
                       location(of) + "/" + keyword + "/" + pointer_part(name), is_generated(of));
}

const Json& SchemaDocument::part(const Json& of, const char* keyword, size_t i) {
  return item(part(of, keyword), i);
}

const Json& SchemaDocument::item(const Json& list, size_t i) {
  return register_part(list.at(i), location(list) + "/" + std::to_string(i), is_generated(list));
}

const Json& SchemaDocument::register_part(const Json& part, std::string location, bool generated) {
  locations_.try_emplace(&part, Located{std::move(location), generated});
  return part;
}

const Json& SchemaDocument::add_generated(Json generated, const std::string& location) {
  generated_.push_back(std::move(generated));
  return register_part(generated_.back(), location, true);
}

template <class Make>
const Json& SchemaDocument::derived(const Json& schema, const char* keyword, bool generated,
                                    Make make) {
  const auto [it, is_new] = derived_.try_emplace({&schema, keyword}, nullptr);
  if (is_new) {
    generated_.push_back(make());
    it->second = &register_part(generated_.back(), location(schema), generated);
  }
  return *it->second;
}

const Json& SchemaDocument::target(const std::string& reference, const std::string& location) {
  std::string pointer = reference;
  const Json* id = root_.is_object() ? keyword(root_, "$id") : nullptr;
  const std::string root_id = id && id->is_string() ? id->get<std::string>() : "";
  if (!root_id.empty() && pointer.compare(0, root_id.size(), root_id) == 0)
    pointer = "#" + pointer.substr(std::min(pointer.size(), root_id.size() + 1));
  const auto anchor = anchors_.find(pointer);
  if (anchor != anchors_.end()) pointer = anchor->second;
  require(pointer == "#" || pointer.compare(0, 2, "#/") == 0,
          "{}: $ref {} is not supported: only references within the schema, such as "
          "\"#/$defs/name\"",
          location, shown(reference));
  try {
    const Json& found = root_.at(Json::json_pointer(percent_decoded(pointer.substr(1))));
    return register_part(found, pointer, false);
  } catch (const Json::exception&) {
    fail("{}: $ref {} does not exist", location, shown(reference));
  }
}

void SchemaDocument::find_anchors(const Json& in, const std::string& location) {
  if (in.is_array())
    for (size_t i = 0; i < in.size(); ++i) find_anchors(in[i], location + "/" + std::to_string(i));
  if (!in.is_object() || (&in != &root_ && in.contains("$id"))) return;
  for (const auto& [name, value] : in.items()) {
    const bool is_anchor = name == "$anchor" || name == "$dynamicAnchor";
    if (is_anchor && value.is_string()) {
      anchors_.try_emplace("#" + value.get<std::string>(), location);
    } else if (name != "const" && name != "enum") {
      find_anchors(value, location + "/" + pointer_part(name));
    }
  }
}

bool SchemaDocument::are_disjoint(const Json& schema_a, const Json& schema_b) {
  const Json &a = resolved(schema_a), &b = resolved(schema_b);
  if (!a.is_object() || !b.is_object() || keyword(a, "nullable") || keyword(b, "nullable"))
    return false;
  const auto types = [&](const Json& s) {
    const TypeSet declared = declared_types(s, location(s));
    return declared & kNumberType ? declared | kIntegerType : declared;
  };
  if ((types(a) & types(b)) == kNoTypes) return true;
  if (types(a) != kObjectType || types(b) != kObjectType) return false;
  const Json* properties = object_at(a, location(a), "properties");
  if (!properties) return false;
  for (const auto& [name, value] : properties->items()) {
    const Json *of_a = constants(a, name), *of_b = constants(b, name);
    if (of_a && of_b && !share_constant(*of_a, *of_b)) return true;
  }
  return false;
}

const Json& SchemaDocument::resolved(const Json& schema) {
  constexpr int kMaxReferences = 64;
  const Json* found = &schema;
  for (int i = 0; found->is_object() && found->size() == 1 && keyword(*found, "$ref"); ++i) {
    require(i < kMaxReferences, "{}: the schema refers only to itself", location(schema));
    found =
        &target(text_at(*found, location(*found), "$ref")->get<std::string>(), location(*found));
  }
  return *found;
}

const TextAutomaton& SchemaDocument::automaton_for(const std::string& pattern,
                                                   const std::string& location) {
  const auto [it, is_new] = patterns_.try_emplace(pattern);
  if (is_new) {
    try {
      it->second = pattern_automaton(pattern, false);
    } catch (const Error& error) {
      fail("{}: pattern {}: {}", location, shown(pattern), error.what());
    }
  }
  return it->second;
}

}  // namespace tandem
