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
class RulesOfSchemas {
 public:
  RulesOfSchemas(Grammar& grammar, const JsonRules& json, const Json& schema)
      : g_(grammar),
        json_(json),
        document_(schema),
        values_(document_),
        writer_{grammar, json, document_, values_,
                [this](const SchemaWriter::Schemas& schemas) { return rule_of(schemas); }} {}

  Rule write() {
    const Rule root = rule_of({&document_.root()});
    for (; !unwritten_.empty(); unwritten_.pop_front()) {
      const auto [rule, claims] = std::move(unwritten_.front());
      write_rule(rule, claims);
    }
    return root;
  }

 private:
  using Key = std::pair<std::set<const Json*>, std::set<const Json*>>;

  Rule rule_of(const SchemaWriter::Schemas& schemas) {
    Claims claims;
    for (const Json* schema : schemas) document_.add_claims(*schema, claims);
    return rule_of(std::move(claims));
  }

  Rule rule_of(Claims claims) {
    if (claims.nothing_fits) return nothing();
    if (is_anything(claims)) return json_.value;
    Key key;
    for (const Json* schema : claims.schemas) key.first.insert(schema);
    for (const Claims::Choice& choice : claims.choices) key.second.insert(choice.list);
    const auto [it, is_new] = rules_.try_emplace(std::move(key), -1);
    if (is_new) {
      require(rules_.size() <= kMaxRules, "it is too large: its schemas combine in too many ways");
      it->second = g_.add_rule();
      unwritten_.emplace_back(it->second, std::move(claims));
    }
    return it->second;
  }

  // The rule that no text matches.
  Rule nothing() {
    if (nothing_ < 0) {
      nothing_ = g_.add_rule();
      g_.explain(nothing_, "a schema of it is false, or the opposite of true");
    }
    return nothing_;
  }

  static bool restricts(const Json& schema) {
    for (const char* name : {"type", "const", "enum"})
      if (keyword(schema, name)) return true;
    return described_types(schema) != kNoTypes;
  }

  static bool is_anything(const Claims& claims) {
    return claims.choices.empty() &&
           std::none_of(claims.schemas.begin(), claims.schemas.end(),
                        [](const Json* schema) { return restricts(*schema); });
  }

  void write_rule(Rule rule, const Claims& claims) {
    explain(rule, claims, "what it asks for contradicts itself");
    if (is_listed(claims)) return write_constants(rule, claims);
    if (!claims.choices.empty()) return write_choice(rule, claims);
    const TypeSet types = types_of(document_, claims);
    if (types == kNoTypes) explain(rule, claims, "no type fits");
    if (types & kNullType) g_.call(g_.start(rule), json_.null, g_.end(rule));
    if (types & kBooleanType) g_.call(g_.start(rule), json_.boolean, g_.end(rule));
    if (types & (kNumberType | kIntegerType)) write_number(writer_, rule, claims);
    if (types & kStringType) write_string(writer_, rule, claims);
    if (types & kArrayType) write_array(writer_, rule, claims);
    if (types & kObjectType) write_object(writer_, rule, claims);
  }

  // Expands the shortest list first, since the others are written once for each of its schemas.
  void write_choice(Rule rule, const Claims& claims) {
    Claims others = claims;
    const auto it = std::min_element(
        others.choices.begin(), others.choices.end(),
        [](const auto& a, const auto& b) { return a.list->size() < b.list->size(); });
    const Claims::Choice choice = std::move(*it);
    others.choices.erase(it);
    for (size_t i = 0; i < choice.list->size(); ++i) {
      Claims with = others;
      document_.add_claims(choice, i, with);
      // Skips alternatives that no value fits, so that many choices do not make many empty rules.
      const bool may_be = !with.nothing_fits && types_of(document_, with) != kNoTypes;
      if (may_be) g_.call(g_.start(rule), rule_of(std::move(with)), g_.end(rule));
    }
  }

  static bool is_listed(const Claims& claims) {
    return std::any_of(claims.schemas.begin(), claims.schemas.end(), [](const Json* schema) {
      return keyword(*schema, "const") || keyword(*schema, "enum");
    });
  }

  void write_constants(Rule rule, const Claims& claims) {
    explain(rule, claims, "none of its constants fits");
    const auto constants = values_.constants(claims);
    for (const Json& value : constants.value()) g_.text(g_.start(rule), value.dump(), g_.end(rule));
  }

  void explain(Rule rule, const Claims& claims, const char* what) {
    if (!claims.schemas.empty())
      g_.explain(rule, fmt::format("{}: {}", document_.place(*claims.schemas.back()), what));
  }

  Grammar& g_;
  const JsonRules& json_;
  SchemaDocument document_;
  SchemaValues values_;
  SchemaWriter writer_;
  std::map<Key, Rule> rules_;
  std::deque<std::pair<Rule, Claims>> unwritten_;
  Rule nothing_ = -1;
};

}  // namespace

Rule add_schema(Grammar& grammar, const JsonRules& json, const Json& schema) {
  return RulesOfSchemas(grammar, json, schema).write();
}

}  // namespace tandem
