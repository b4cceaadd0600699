#include <algorithm>
#include <compare>
#include <map>
#include <set>

#include "core/check.h"
#include "text/grammar/schema_writer.h"

namespace tandem {
namespace {

using Json = SchemaJson;
using Node = Grammar::Node;
using Rule = Grammar::Rule;
using Schemas = SchemaWriter::Schemas;

constexpr int kMaxOthers = 100;     // properties that no schema names, if "maxProperties" counts
constexpr size_t kMaxPatterns = 6;  // of names; every combination of them is handled separately
constexpr size_t kMaxOtherProperties = 4;

// What the constraints say about the properties of an object.
class ObjectShape {
 public:
  ObjectShape(SchemaDocument& document, SchemaValues& values, const Constraints& constraints)
      : document_(document), values_(values), constraints_(constraints) {
    for (const Json* schema : constraints.schemas) add(*schema);
    for (const Json* schema : constraints.schemas) add_required(*schema);
    for (const Json* schema : name_schemas) add_listed_names(*schema);
    min = largest_minimum(document, constraints, "minProperties");
    max = smallest_maximum(document, constraints, "maxProperties");
    const bool too_few = min > static_cast<int>(known.size());
    open = has_others_ || !describes_ || too_few;
    for (const Json* schema : other_properties)
      for (const Json& name : (*schema)["otherProperty"]["names"])
        add_name(name.get<std::string>(), open);
    require(
        patterns.size() <= kMaxPatterns && other_properties.size() <= kMaxOtherProperties,
        "{}: more than {} patterns of names, or {} of \"additionalProperties\" within \"not\", at "
        "once are not supported",
        location(), kMaxPatterns, kMaxOtherProperties);
    std::erase_if(names, [&](const std::string& name) { return !is_allowed(name); });
    for (const std::string& name : required)
      if (!contains(names, name)) missing = name;
    if (min <= static_cast<int>(required.size())) min = 0;
    const bool is_enough = max >= static_cast<int>(names.size()) && !open && patterns.empty();
    if (is_enough) max = kNoLimit;
  }

  const std::string& location() const { return document_.location(*constraints_.schemas.back()); }

  // The schemas that the value of property `name` must fit.
  Schemas values_of(const std::string& name) {
    return values_where(
        [&](const Json& schema) {
          const Json* properties = keyword(schema, "properties");
          return properties && properties->contains(name);
        },
        name, [&](const std::string& pattern) { return name_matches(pattern, name); });
  }
  // The schemas that values of unnamed properties must fit: properties that no schema names and
  // whose names match exactly the patterns `matched`.
  Schemas values_of(const std::set<std::string>& matched) {
    return values_where([](const Json&) { return false; }, "",
                        [&](const std::string& pattern) { return matched.count(pattern) > 0; });
  }
  // The schemas that the names of such properties must fit.
  Schemas names_with(const std::set<std::string>& matched) {
    Schemas schemas;
    for (const Json* schema : name_schemas)
      schemas.push_back(&document_.part(*schema, "propertyNames"));
    Json text = {{"type", "string"}};
    if (!known.empty()) text["excludedTexts"] = known;
    schemas.push_back(&document_.add_generated(text, location()));
    for (const std::string& pattern : patterns) {
      const char* word = matched.count(pattern) > 0 ? "pattern" : "excludedPattern";
      schemas.push_back(&document_.add_generated({{word, pattern}}, location()));
    }
    return schemas;
  }

  bool name_matches(const std::string& pattern, const std::string& name) {
    return matches(document_.automaton_for(pattern, location()), name);
  }
  // Whether a property can satisfy the "otherProperty" of `constraint`.
  bool can_satisfy(const Json& constraint, const std::string& name) {
    const Json& other = constraint["otherProperty"];
    const Json& excluded = other["names"];
    return std::find(excluded.begin(), excluded.end(), name) == excluded.end() &&
           std::none_of(other["patterns"].begin(), other["patterns"].end(),
                        [&](const Json& pattern) { return name_matches(pattern, name); });
  }
  static bool can_satisfy(const Json& constraint, const std::set<std::string>& matched) {
    const Json& excluded = constraint["otherProperty"]["patterns"];
    return std::none_of(excluded.begin(), excluded.end(), [&](const Json& pattern) {
      return matched.count(pattern.get<std::string>()) > 0;
    });
  }
  // Whether unnamed properties that match these patterns are allowed: other names are, or
  // "patternProperties" has one of the patterns.
  bool allows_others(const std::set<std::string>& matched) const {
    return open || std::any_of(matched.begin(), matched.end(), [&](const std::string& pattern) {
             return described_patterns_.count(pattern) > 0;
           });
  }

  std::vector<std::string> names;  // named properties that are allowed, in the schema's order
  std::vector<std::string> known;  // all named properties, also those that are not allowed
  std::set<std::string> required, patterns;
  std::vector<const Json*> name_schemas, other_properties;
  int min = 0, max = kNoLimit;
  bool open = false;    // properties that no schema names are allowed
  std::string missing;  // a required property that is not allowed

 private:
  // Properties that the schemas `by` do not describe must fit `others`. For "additionalProperties"
  // `by` is the schema itself; for "unevaluatedProperties" also the schemas applied within it.
  struct Described {
    std::vector<const Json*> by;
    const Json* others;  // or null
  };

  void add(const Json& schema) {
    const std::string& at = document_.location(schema);
    const bool is_from_client = !document_.is_generated(schema);
    if (const Json* properties = object_at(schema, at, "properties"))
      for (const auto& [name, value] : properties->items()) {
        add_name(name, true);
        describes_ = describes_ || (is_from_client && value != false);
      }
    if (const Json* by_pattern = object_at(schema, at, "patternProperties"))
      for (const auto& [pattern, value] : by_pattern->items()) {
        patterns.insert(pattern);
        described_patterns_.insert(pattern);
        describes_ = describes_ || is_from_client;
      }
    if (keyword(schema, "propertyNames")) name_schemas.push_back(&schema);
    if (const Json* other = keyword(schema, "otherProperty")) {
      other_properties.push_back(&schema);
      for (const Json& pattern : (*other)["patterns"]) patterns.insert(pattern);
    }
    const bool has_others = keyword(schema, "additionalProperties") != nullptr;
    has_others_ = has_others_ || has_others;
    described_.push_back(
        {{&schema}, has_others ? &document_.part(schema, "additionalProperties") : nullptr});
    if (keyword(schema, "unevaluatedProperties")) add_unevaluated(schema);
  }

  void add_unevaluated(const Json& schema) {
    has_others_ = true;
    Described described = {{}, &document_.part(schema, "unevaluatedProperties")};
    collect(schema, described.by);
    const auto describes_all = [&](const Json* s) {
      return keyword(*s, "additionalProperties") ||
             (s != &schema && keyword(*s, "unevaluatedProperties"));
    };
    if (std::none_of(described.by.begin(), described.by.end(), describes_all))
      described_.push_back(std::move(described));
  }

  // Collects `schema` and the schemas applied to the same value within it, if `constraints` has
  // them.
  void collect(const Json& schema, std::vector<const Json*>& found) {
    if (contains(found, &schema) || !contains(constraints_.schemas, &schema)) return;
    found.push_back(&schema);
    const std::string& at = document_.location(schema);
    if (const Json* reference = text_at(schema, at, "$ref"))
      collect(document_.target(reference->get<std::string>(), at), found);
    for (const char* name : {"allOf", "anyOf", "oneOf"})
      if (const Json* list = list_at(schema, at, name))
        for (size_t i = 0; i < list->size(); ++i) collect(document_.part(schema, name, i), found);
    for (const char* name : {"if", "then", "else"})
      if (keyword(schema, name)) collect(document_.part(schema, name), found);
    if (const Json* dependent = object_at(schema, at, "dependentSchemas"))
      for (const auto& [name, value] : dependent->items())
        collect(document_.part(schema, "dependentSchemas", name), found);
  }

  void add_required(const Json& schema) {
    const std::string& at = document_.location(schema);
    const Json* list = list_at(schema, at, "required");
    if (!list) return;
    for (const Json& name : *list) {
      require(name.is_string(), "{}: required has {}: must be a name", at, name.dump());
      add_name(name.get<std::string>(), true);
      required.insert(name.get<std::string>());
      describes_ = describes_ || !document_.is_generated(schema);
    }
  }

  // Names listed in an "enum" of "propertyNames" are known as well, in that order.
  void add_listed_names(const Json& schema) {
    Constraints constraints;
    document_.add_constraints(document_.part(schema, "propertyNames"), constraints);
    for (const Json* s : constraints.schemas)
      if (const Json* list = list_at(*s, document_.location(*s), "enum"))
        for (const Json& name : *list)
          if (name.is_string()) add_name(name.get<std::string>(), true);
  }

  void add_name(const std::string& name, bool allowed) {
    if (!known_.insert(name).second) return;
    known.push_back(name);
    if (allowed) names.push_back(name);
  }

  bool is_allowed(const std::string& name) {
    const bool fits = std::all_of(name_schemas.begin(), name_schemas.end(), [&](const Json* s) {
      return values_.fits(Json(name), document_.part(*s, "propertyNames"));
    });
    return fits && !has_false(values_of(name));
  }

  template <class IsNamed, class IsMatched>
  Schemas values_where(IsNamed is_named, const std::string& name, IsMatched is_matched) {
    Schemas schemas;
    for (const Described& described : described_) {
      bool is_described = false;
      for (const Json* by : described.by) {
        if (is_named(*by)) {
          schemas.push_back(&document_.part(*by, "properties", name));
          is_described = true;
        }
        const Json* by_pattern = keyword(*by, "patternProperties");
        if (!by_pattern) continue;
        for (const auto& [pattern, value] : by_pattern->items()) {
          if (!is_matched(pattern)) continue;
          schemas.push_back(&document_.part(*by, "patternProperties", pattern));
          is_described = true;
        }
      }
      if (!is_described && described.others) schemas.push_back(described.others);
    }
    return schemas;
  }

  SchemaDocument& document_;
  SchemaValues& values_;
  const Constraints& constraints_;
  std::set<std::string> known_, described_patterns_;
  std::vector<Described> described_;
  bool describes_ = false, has_others_ = false;
};

class ObjectWriter {
 public:
  ObjectWriter(SchemaWriter& writer, Rule rule, ObjectShape& shape)
      : w_(writer), g_(writer.grammar), rule_(rule), shape_(shape) {
    for (const Json* constraint : shape.other_properties)
      required_values_.push_back(&w_.document.part(*constraint, "otherProperty", "value"));
    all_satisfied_ = (1U << required_values_.size()) - 1;
  }

  void write() {
    Layer layer;
    layer[{0, 0}].first = add_optional_space(g_, w_.json, g_.add_byte(g_.start(rule_), '{'));
    for (const std::string& name : shape_.names) layer = after_property(name, layer);
    close_ = g_.add_node();
    g_.add_byte(close_, '}', g_.end(rule_));
    const std::vector<Other> others = find_others();
    for (const auto& [count, before] : layer) write_others(count, before, others);
  }

 private:
  // Number of properties so far, up to the largest count that matters, and a bit set of the members
  // of required_values_ that they satisfy.
  struct Count {
    int n;
    unsigned satisfied;
    auto operator<=>(const Count&) const = default;  // NOLINT(modernize-use-nullptr)
  };
  // Nodes where the next property may begin: the first of the object, or one after others.
  struct Before {
    Node first = -1, later = -1;
  };
  using Layer = std::map<Count, Before>;

  Layer after_property(const std::string& name, const Layer& layer) {
    const Schemas values = shape_.values_of(name);
    // If properties are counted, the member is a rule of its own, which all counts share.
    const bool is_counted = layer.size() > 1 || shape_.max != kNoLimit;
    Rule member = -1;
    const auto write_member = [&](Node from, Node to, Rule value) {
      const Node colon = g_.add_text(from, Json(name).dump() + ":");
      g_.add_call(add_optional_space(g_, w_.json, colon), value, to);
    };
    const auto write = [&](Node from, Node to) {
      if (!is_counted) return write_member(from, to, w_.rule_of(values));
      if (member < 0) {
        member = g_.add_rule();
        write_member(g_.start(member), g_.end(member), w_.rule_of(values));
      }
      g_.add_call(from, member, to);
    };
    const int most = shape_.max != kNoLimit ? shape_.max : shape_.min;
    Layer next;
    for (const auto& [count, before] : layer) {
      if (shape_.required.count(name) == 0) join(next[count], before);
      if (count.n == shape_.max) continue;
      const Node key = key_after(before);
      const int n = std::min(count.n + 1, most);
      write(key, later(next, {n, count.satisfied}));
      unsigned satisfiable = 0;
      for (size_t i = 0; i < required_values_.size(); ++i)
        if (shape_.can_satisfy(*shape_.other_properties[i], name)) satisfiable |= 1U << i;
      for (unsigned satisfied = 1; satisfied <= satisfiable; ++satisfied)
        if ((satisfied & ~satisfiable) == 0 && (satisfied & count.satisfied) == 0)
          write_member(key, later(next, {n, count.satisfied | satisfied}),
                       w_.rule_of(with_required_values(values, satisfied)));
    }
    return next;
  }

  Schemas with_required_values(Schemas values, unsigned satisfied) const {
    for (size_t i = 0; i < required_values_.size(); ++i)
      if ((satisfied >> i & 1) != 0) values.push_back(required_values_[i]);
    return values;
  }

  void join(Before& to, const Before& from) {
    const auto link = [&](Node& target, Node node) {
      if (node < 0) return;
      if (target < 0) target = g_.add_node();
      g_.add_epsilon(node, target);
    };
    link(to.first, from.first);
    link(to.later, from.later);
  }

  Node later(Layer& layer, const Count& count) {
    Node& node = layer[count].later;
    if (node < 0) node = g_.add_node();
    return node;
  }

  Node key_after(const Before& before) {
    if (before.later < 0) return before.first;
    const Node key = add_optional_space(g_, w_.json, g_.add_byte(before.later, ','));
    if (before.first >= 0) g_.add_epsilon(before.first, key);
    return key;
  }

  // Properties that no schema names and whose names match one set of patterns.
  struct Other {
    Rule name;
    std::map<unsigned, Rule> values;  // by the set of members of required_values_ that they satisfy
  };

  std::vector<Other> find_others() {
    std::vector<Other> others;
    const std::vector<std::string> patterns(shape_.patterns.begin(), shape_.patterns.end());
    for (unsigned bits = 0; bits < 1U << patterns.size(); ++bits) {
      std::set<std::string> matched;
      for (size_t i = 0; i < patterns.size(); ++i)
        if ((bits >> i & 1) != 0) matched.insert(patterns[i]);
      const Schemas values = shape_.values_of(matched);
      if (!shape_.allows_others(matched) || has_false(values)) continue;
      Other other = {w_.rule_of(shape_.names_with(matched)), {}};
      unsigned satisfiable = 0;
      for (size_t i = 0; i < required_values_.size(); ++i)
        if (ObjectShape::can_satisfy(*shape_.other_properties[i], matched)) satisfiable |= 1U << i;
      for (unsigned satisfied = 0; satisfied <= satisfiable; ++satisfied)
        if ((satisfied & ~satisfiable) == 0)
          other.values[satisfied] = w_.rule_of(with_required_values(values, satisfied));
      others.push_back(std::move(other));
    }
    return others;
  }

  // A model may write the same name twice, which makes only one property. So all unnamed properties
  // together count as one towards "minProperties", but each counts towards "maxProperties".
  void write_others(const Count& count, const Before& before, const std::vector<Other>& others) {
    const int most = shape_.max == kNoLimit ? 1 : std::min(shape_.max - count.n, kMaxOthers);
    std::map<std::pair<int, unsigned>, Node> nodes;
    std::vector<std::pair<int, unsigned>> pending;
    const auto node_of = [&](int n, unsigned satisfied) {
      const auto [it, is_new] = nodes.try_emplace({n, satisfied}, -1);
      if (is_new) {
        it->second = g_.add_node();
        pending.emplace_back(n, satisfied);
      }
      return it->second;
    };
    const auto write_next = [&](const Before& from, int n, unsigned satisfied) {
      const bool enough = count.n + (n > 0 ? 1 : 0) >= shape_.min && satisfied == all_satisfied_;
      if (enough) write_end(from);
      const bool is_full = shape_.max != kNoLimit && n == most;
      if (is_full || others.empty()) return;
      const Node key = key_after(from);
      for (const Other& other : others) {
        const Node colon = g_.add_byte(g_.add_call(key, other.name), ':');
        const Node value = add_optional_space(g_, w_.json, colon);
        for (const auto& [newly_satisfied, rule] : other.values)
          if ((satisfied & newly_satisfied) == 0)
            g_.add_call(value, rule, node_of(std::min(n + 1, most), satisfied | newly_satisfied));
      }
    };
    write_next(before, 0, count.satisfied);
    while (!pending.empty()) {
      const auto [n, satisfied] = pending.back();
      pending.pop_back();
      write_next({.first = -1, .later = nodes.at({n, satisfied})}, n, satisfied);
    }
  }

  void write_end(const Before& before) {
    if (before.first >= 0) g_.add_epsilon(before.first, close_);
    if (before.later >= 0) g_.add_epsilon(add_optional_space(g_, w_.json, before.later), close_);
  }

  SchemaWriter& w_;
  Grammar& g_;
  const Rule rule_;
  ObjectShape& shape_;
  std::vector<const Json*> required_values_;  // schemas of the values of shape_.other_properties
  unsigned all_satisfied_ = 0;
  Node close_ = -1;
};

}  // namespace

void write_object(SchemaWriter& w, Rule rule, const Constraints& constraints) {
  ObjectShape shape(w.document, w.values, constraints);
  Grammar& g = w.grammar;
  const bool is_free = shape.open && shape.known.empty() && shape.patterns.empty() &&
                       shape.name_schemas.empty() && shape.other_properties.empty() &&
                       shape.min == 0 && shape.max == kNoLimit &&
                       shape.values_of(std::set<std::string>()).empty();
  if (is_free) return g.add_call(g.start(rule), w.json.object, g.end(rule));
  if (!shape.missing.empty())
    return g.explain_if_empty(rule, fmt::format("{}: \"{}\" is required, but not allowed",
                                                shape.location(), shape.missing));
  if (shape.min > static_cast<int>(shape.names.size()) + 1)
    g.explain_if_empty(
        rule, fmt::format("{}: minProperties exceeds its named properties by more than one: "
                          "duplicates of other names cannot be prevented",
                          shape.location()));
  ObjectWriter(w, rule, shape).write();
}

}  // namespace tandem
