#include "text/grammar/schema_grammar.h"

#include <algorithm>
#include <deque>
#include <map>
#include <set>

#include "core/check.h"
#include "text/grammar/schema_writer.h"

namespace tandem {
namespace {

using Rule = Grammar::Rule;
using Json = SchemaJson;

constexpr size_t kMaxRules = 10'000;  // a rule takes a few kilobytes while it is written

// Writes one rule for each set of schemas that a value must fit together. Schemas of "allOf" and
// references are added to the set; for a list of alternatives there is one rule for each of them,
// with that alternative in the set.
class SchemaCompiler {
 public:
  SchemaCompiler(Grammar& grammar, const JsonRules& json, const Json& schema)
      : g_(grammar),
        json_(json),
        document_(schema),
        values_(document_),
        writer_{grammar, json, document_, values_,
                [this](const SchemaWriter::Schemas& schemas) { return rule_of(schemas); }} {}

  Rule write() {
    const Rule root = rule_of({&document_.root()});
    for (; !pending_.empty(); pending_.pop_front()) {
      const auto [rule, constraints] = std::move(pending_.front());
      write_rule(rule, constraints);
    }
    return root;
  }

 private:
  using Key = std::pair<std::set<const Json*>, std::set<const Json*>>;

  Rule rule_of(const SchemaWriter::Schemas& schemas) {
    Constraints constraints;
    for (const Json* schema : schemas) document_.add_constraints(*schema, constraints);
    return rule_of(std::move(constraints));
  }

  Rule rule_of(Constraints constraints) {
    if (constraints.unsatisfiable) return empty_rule();
    if (is_unconstrained(constraints)) return json_.value;
    Key key;
    for (const Json* schema : constraints.schemas) key.first.insert(schema);
    for (const Constraints::Choice& choice : constraints.choices) key.second.insert(choice.list);
    const auto [it, is_new] = rules_.try_emplace(std::move(key), -1);
    if (is_new) {
      require(rules_.size() <= kMaxRules,
              "too large: its schemas can be combined in too many ways");
      it->second = g_.add_rule();
      pending_.emplace_back(it->second, std::move(constraints));
    }
    return it->second;
  }

  // The rule that no text matches.
  Rule empty_rule() {
    if (empty_rule_ < 0) {
      empty_rule_ = g_.add_rule();
      g_.explain_if_empty(empty_rule_, "a schema is false, or the negation of true");
    }
    return empty_rule_;
  }

  static bool restricts(const Json& schema) {
    for (const char* name : {"type", "const", "enum"})
      if (keyword(schema, name)) return true;
    return implied_types(schema) != kNoTypes;
  }

  static bool is_unconstrained(const Constraints& constraints) {
    return constraints.choices.empty() &&
           std::none_of(constraints.schemas.begin(), constraints.schemas.end(),
                        [](const Json* schema) { return restricts(*schema); });
  }

  void write_rule(Rule rule, const Constraints& constraints) {
    explain(rule, constraints, "its constraints contradict each other");
    if (has_constants(constraints)) return write_constants(rule, constraints);
    if (!constraints.choices.empty()) return write_choice(rule, constraints);
    const TypeSet types = types_of(document_, constraints);
    if (types == kNoTypes) explain(rule, constraints, "no type is possible");
    if (types & kNullType) g_.add_call(g_.start(rule), json_.null, g_.end(rule));
    if (types & kBooleanType) g_.add_call(g_.start(rule), json_.boolean, g_.end(rule));
    if (types & (kNumberType | kIntegerType)) write_number(writer_, rule, constraints);
    if (types & kStringType) write_string(writer_, rule, constraints);
    if (types & kArrayType) write_array(writer_, rule, constraints);
    if (types & kObjectType) write_object(writer_, rule, constraints);
  }

  // Expands the shortest list first, since the others are written once for each of its schemas.
  void write_choice(Rule rule, const Constraints& constraints) {
    Constraints others = constraints;
    const auto it = std::min_element(
        others.choices.begin(), others.choices.end(),
        [](const auto& a, const auto& b) { return a.list->size() < b.list->size(); });
    const Constraints::Choice choice = std::move(*it);
    others.choices.erase(it);
    for (size_t i = 0; i < choice.list->size(); ++i) {
      Constraints with = others;
      document_.add_constraints(choice, i, with);
      // Skips alternatives that no value fits, so that many choices do not make many empty rules.
      const bool is_possible = !with.unsatisfiable && types_of(document_, with) != kNoTypes;
      if (is_possible) g_.add_call(g_.start(rule), rule_of(std::move(with)), g_.end(rule));
    }
  }

  static bool has_constants(const Constraints& constraints) {
    return std::any_of(
        constraints.schemas.begin(), constraints.schemas.end(),
        [](const Json* schema) { return keyword(*schema, "const") || keyword(*schema, "enum"); });
  }

  void write_constants(Rule rule, const Constraints& constraints) {
    explain(rule, constraints, "none of its constants is valid");
    const auto constants = values_.constants(constraints);
    for (const Json& value : constants.value())
      g_.add_text(g_.start(rule), value.dump(), g_.end(rule));
  }

  void explain(Rule rule, const Constraints& constraints, const char* what) {
    if (!constraints.schemas.empty())
      g_.explain_if_empty(
          rule, fmt::format("{}: {}", document_.location(*constraints.schemas.back()), what));
  }

  Grammar& g_;
  const JsonRules& json_;
  SchemaDocument document_;
  SchemaValues values_;
  SchemaWriter writer_;
  std::map<Key, Rule> rules_;
  std::deque<std::pair<Rule, Constraints>> pending_;
  Rule empty_rule_ = -1;
};

}  // namespace

Rule add_schema(Grammar& grammar, const JsonRules& json, const Json& schema) {
  return SchemaCompiler(grammar, json, schema).write();
}

}  // namespace tandem
