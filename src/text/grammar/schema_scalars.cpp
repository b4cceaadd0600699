#include <algorithm>

#include "core/check.h"
#include "text/grammar/schema_writer.h"

namespace tandem {
namespace {

using Json = SchemaJson;

// Constraints of strings: automata they must match and must not match, and excluded strings.
struct TextSets {
  std::vector<const TextAutomaton*> in, out;
  std::vector<std::string> excluded;
};

TextSets text_sets(SchemaDocument& document, const Constraints& constraints) {
  TextSets sets;
  for (const Json* schema : constraints.schemas) {
    const std::string& at = document.location(*schema);
    for (const std::string& pattern : patterns_of(*schema, at))
      sets.in.push_back(&document.automaton_for(pattern, at));
    if (const Json* pattern = text_at(*schema, at, "excludedPattern"))
      sets.out.push_back(&document.automaton_for(pattern->get<std::string>(), at));
    if (const Json* texts = keyword(*schema, "excludedTexts"))
      for (const Json& text : *texts) sets.excluded.push_back(text.get<std::string>());
  }
  return sets;
}

TextAutomaton common_texts(const TextSets& sets) {
  TextAutomaton texts = sets.in.empty() ? every_text() : *sets.in.front();
  for (size_t i = 1; i < sets.in.size(); ++i) texts = intersection(texts, *sets.in[i]);
  for (const TextAutomaton* out : sets.out) texts = intersection(texts, complement(*out));
  if (sets.excluded.empty()) return texts;
  return intersection(texts, complement(texts_in(sets.excluded)));
}

}  // namespace

void write_string(SchemaWriter& w, Grammar::Rule rule, const Constraints& constraints) {
  Grammar& g = w.grammar;
  const std::string& at = w.document.location(*constraints.schemas.back());
  const int min = largest_minimum(w.document, constraints, "minLength");
  const int max = smallest_maximum(w.document, constraints, "maxLength");
  if (max != kNoLimit && min > max)
    return g.explain_if_empty(
        rule, fmt::format("{}: no text has from {} to {} characters", at, min, max));
  const bool any_length = min == 0 && max == kNoLimit;
  const TextSets sets = text_sets(w.document, constraints);
  const bool restricted = !sets.in.empty() || !sets.out.empty() || !sets.excluded.empty();
  if (!restricted && any_length) return g.add_call(g.start(rule), w.json.string, g.end(rule));
  const Grammar::Node quote = g.add_byte(g.start(rule), '"');
  if (!restricted) return w.json.characters.add(g, quote, g.end(rule), min, max);
  g.explain_if_empty(rule, fmt::format("{}: no text fits its patterns and lengths", at));
  const Grammar::Node last = g.add_node();
  g.add_byte(last, '"', g.end(rule));
  try {
    const TextAutomaton texts = common_texts(sets);
    add_automaton(g, quote, last, any_length ? texts : with_length(texts, min, max),
                  Escaping::kJson);
  } catch (const Error& error) {
    fail("{}: {}", at, error.what());
  }
}

void write_number(SchemaWriter& w, Grammar::Rule rule, const Constraints& constraints) {
  const std::string& at = w.document.location(*constraints.schemas.back());
  const NumberSet numbers = numbers_of(w.document, constraints);
  if (numbers.min || numbers.max)
    w.grammar.explain_if_empty(rule, fmt::format("{}: no {} is between its bounds", at,
                                                 numbers.step ? "such number" : "number"));
  try {
    add_numbers(w.grammar, w.json, rule, numbers);
  } catch (const Error& error) {
    fail("{}: {}", at, error.what());
  }
}

bool has_false(const SchemaWriter::Schemas& schemas) {
  return std::any_of(schemas.begin(), schemas.end(),
                     [](const SchemaJson* s) { return *s == false; });
}

int largest_minimum(const SchemaDocument& document, const Constraints& constraints,
                    const char* name) {
  int greatest = 0;
  for (const Json* schema : constraints.schemas)
    greatest = std::max(greatest, count_of(*schema, document.location(*schema), name, 0));
  return greatest;
}

int smallest_maximum(const SchemaDocument& document, const Constraints& constraints,
                     const char* name) {
  int least = kMaxCount;
  for (const Json* schema : constraints.schemas)
    least = std::min(least, count_of(*schema, document.location(*schema), name, kMaxCount));
  return least == kMaxCount ? kNoLimit : least;
}

}  // namespace tandem
