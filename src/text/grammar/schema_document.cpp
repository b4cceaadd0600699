#include "text/grammar/schema_document.h"

#include <algorithm>
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

int hex_digit(char c) {
  const std::string_view digits = "0123456789abcdef";
  const size_t at = digits.find(static_cast<char>(c >= 'A' && c <= 'F' ? c + ('a' - 'A') : c));
  return at == digits.npos ? -1 : static_cast<int>(at);
}

std::string percent_decoded(const std::string& text) {
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    const bool is_code = text[i] == '%' && i + 2 < text.size() && hex_digit(text[i + 1]) >= 0 &&
                         hex_digit(text[i + 2]) >= 0;
    out +=
        is_code ? static_cast<char>(hex_digit(text[i + 1]) * 16 + hex_digit(text[i + 2])) : text[i];
    if (is_code) i += 2;
  }
  return out;
}

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
  placed(root, "#", false);
  find_anchors(root, "#");
}

void SchemaDocument::add_claims(const Json& schema, Claims& claims) {
  require(++n_steps_ <= kMaxSteps, "it is too large: its schemas combine in too many ways");
  if (schema.is_boolean()) {
    claims.nothing_fits = claims.nothing_fits || schema == false;
    return;
  }
  require(!among(open_, &schema), "{}: it is nothing but itself", place(schema));
  require(open_.size() < kMaxOpenSchemas && claims.schemas.size() < kMaxCombinedSchemas,
          "{}: too many references and schemas are combined", place(schema));
  if (among(claims.schemas, &schema)) return;
  if (!is_ours(schema)) require_understood(schema, place(schema));
  const bool has_id =
      !is_ours(schema) && &schema != &root_ && text_at(schema, place(schema), "$id");
  require(!has_id, "{}: \"$id\" of a part is not supported", place(schema));
  open_.push_back(&schema);
  add_applied(schema, claims);
  open_.pop_back();
}

void SchemaDocument::add_claims(const Claims::Choice& choice, size_t i, Claims& claims) {
  const std::vector<const Json*> open = std::exchange(open_, choice.within);
  add_claims(item(*choice.list, i), claims);
  open_ = open;
}

void SchemaDocument::add_applied(const Json& s, Claims& claims) {
  const std::string at = place(s);
  const Json* nullable = keyword(s, "nullable");
  if (nullable && *nullable == true) {
    return add_choice(derived(s, "nullable", false,
                              [&] {
                                Json other = s;
                                other.erase("nullable");
                                return Json::array({Json{{"type", "null"}}, other});
                              }),
                      claims);
  }
  claims.schemas.push_back(&s);
  if (const Json* reference = text_at(s, at, "$ref"))
    add_claims(target(reference->get<std::string>(), at), claims);
  for (const char* name : {"allOf", "anyOf", "oneOf"}) {
    const Json* list = list_at(s, at, name);
    require(!list || !list->empty() || is_ours(s), "{}: {} is []: must be a list of schemas", at,
            name);
  }
  if (const Json* all = keyword(s, "allOf"))
    for (size_t i = 0; i < all->size(); ++i) add_claims(part(s, "allOf", i), claims);
  if (keyword(s, "anyOf")) add_choice(part(s, "anyOf"), claims);
  if (keyword(s, "oneOf")) {
    const Json& list = part(s, "oneOf");
    const auto apart = [&](size_t a, size_t b) { return are_apart(item(list, a), item(list, b)); };
    add_choice(
        derived(list, "", true, [&] { return exactly_one_of(list.size(), place(list), apart); }),
        claims);
  }
  if (keyword(s, "not")) {
    const Json& excluded = followed(part(s, "not"));
    if (!is_ours(excluded)) require_understood(excluded, place(excluded));
    add_choice(
        derived(excluded, "not", true, [&] { return opposites_of(excluded, place(excluded)); }),
        claims);
  }
  if (keyword(s, "if"))
    add_choice(derived(s, "if", true, [&] { return choices_of_if(s, at); }), claims);
  const Json& dependencies =
      derived(s, "dependencies", true, [&] { return Json(choices_of_dependencies(s, at)); });
  for (size_t i = 0; i < dependencies.size(); ++i) add_choice(item(dependencies, i), claims);
}

void SchemaDocument::add_choice(const Json& list, Claims& claims) {
  const auto known = [&](const Claims::Choice& choice) { return choice.list == &list; };
  if (std::any_of(claims.choices.begin(), claims.choices.end(), known)) return;
  if (std::find(list.begin(), list.end(), Json(true)) != list.end()) return;
  if (list.empty()) claims.nothing_fits = true;
  if (list.size() == 1) return add_claims(item(list, 0), claims);
  claims.choices.push_back({&list, open_});
}

const Json& SchemaDocument::part(const Json& of, const char* keyword) {
  return placed(of.at(keyword), place(of) + "/" + keyword, is_ours(of));
}

const Json& SchemaDocument::part(const Json& of, const char* keyword, const std::string& name) {
  return placed(of.at(keyword).at(name), place(of) + "/" + keyword + "/" + pointer_part(name),
                is_ours(of));
}

const Json& SchemaDocument::part(const Json& of, const char* keyword, size_t i) {
  return item(part(of, keyword), i);
}

const Json& SchemaDocument::item(const Json& list, size_t i) {
  return placed(list.at(i), place(list) + "/" + std::to_string(i), is_ours(list));
}

const Json& SchemaDocument::placed(const Json& part, std::string place, bool ours) {
  placed_.try_emplace(&part, Placed{std::move(place), ours});
  return part;
}

const Json& SchemaDocument::make(Json ours, const std::string& place) {
  made_.push_back(std::move(ours));
  return placed(made_.back(), place, true);
}

template <class Make>
const Json& SchemaDocument::derived(const Json& schema, const char* keyword, bool ours, Make make) {
  const auto [it, is_new] = derived_.try_emplace({&schema, keyword}, nullptr);
  if (is_new) {
    made_.push_back(make());
    it->second = &placed(made_.back(), place(schema), ours);
  }
  return *it->second;
}

const Json& SchemaDocument::target(const std::string& reference, const std::string& place) {
  std::string pointer = reference;
  const Json* id = root_.is_object() ? keyword(root_, "$id") : nullptr;
  const std::string root_id = id && id->is_string() ? id->get<std::string>() : "";
  if (!root_id.empty() && pointer.compare(0, root_id.size(), root_id) == 0)
    pointer = "#" + pointer.substr(std::min(pointer.size(), root_id.size() + 1));
  const auto anchor = anchors_.find(pointer);
  if (anchor != anchors_.end()) pointer = anchor->second;
  require(pointer == "#" || pointer.compare(0, 2, "#/") == 0,
          "{}: $ref {} is not supported: only those into the schema itself, such as "
          "\"#/$defs/name\"",
          place, shown(reference));
  try {
    const Json& found = root_.at(Json::json_pointer(percent_decoded(pointer.substr(1))));
    return placed(found, pointer, false);
  } catch (const Json::exception&) {
    fail("{}: $ref {} points to nothing", place, shown(reference));
  }
}

void SchemaDocument::find_anchors(const Json& in, const std::string& place) {
  if (in.is_array())
    for (size_t i = 0; i < in.size(); ++i) find_anchors(in[i], place + "/" + std::to_string(i));
  if (!in.is_object() || (&in != &root_ && in.contains("$id"))) return;
  for (const auto& [name, value] : in.items()) {
    const bool is_anchor = name == "$anchor" || name == "$dynamicAnchor";
    if (is_anchor && value.is_string()) {
      anchors_.try_emplace("#" + value.get<std::string>(), place);
    } else if (name != "const" && name != "enum") {
      find_anchors(value, place + "/" + pointer_part(name));
    }
  }
}

bool SchemaDocument::are_apart(const Json& schema_a, const Json& schema_b) {
  const Json &a = followed(schema_a), &b = followed(schema_b);
  if (!a.is_object() || !b.is_object() || keyword(a, "nullable") || keyword(b, "nullable"))
    return false;
  const auto types = [&](const Json& s) {
    const TypeSet stated = stated_types(s, place(s));
    return stated & kNumberType ? stated | kIntegerType : stated;
  };
  if ((types(a) & types(b)) == kNoTypes) return true;
  if (types(a) != kObjectType || types(b) != kObjectType) return false;
  const Json* properties = object_at(a, place(a), "properties");
  if (!properties) return false;
  for (const auto& [name, value] : properties->items()) {
    const Json *of_a = constants(a, name), *of_b = constants(b, name);
    if (of_a && of_b && !share_constant(*of_a, *of_b)) return true;
  }
  return false;
}

const Json& SchemaDocument::followed(const Json& schema) {
  constexpr int kMaxReferences = 64;
  const Json* found = &schema;
  for (int i = 0; found->is_object() && found->size() == 1 && keyword(*found, "$ref"); ++i) {
    require(i < kMaxReferences, "{}: it is nothing but itself", place(schema));
    found = &target(text_at(*found, place(*found), "$ref")->get<std::string>(), place(*found));
  }
  return *found;
}

const TextAutomaton& SchemaDocument::texts_with(const std::string& pattern,
                                                const std::string& place) {
  const auto [it, is_new] = patterns_.try_emplace(pattern);
  if (is_new) {
    try {
      it->second = pattern_automaton(pattern, false);
    } catch (const Error& error) {
      fail("{}: pattern {}: {}", place, shown(pattern), error.what());
    }
  }
  return it->second;
}

}  // namespace tandem
