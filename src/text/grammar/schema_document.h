// A JSON Schema document: resolves references, knows the location of every part, and collects all
// schemas that apply to one value.
#pragma once
#include <algorithm>
#include <deque>
#include <map>
#include <string>
#include <unordered_map>
#include <vector>

#include "text/grammar/schema_keywords.h"
#include "text/grammar/text_automaton.h"

namespace tandem {

template <class T>
bool contains(const std::vector<T>& list, const T& value) {
  return std::find(list.begin(), list.end(), value) != list.end();
}

// Everything a value must fit: all of `schemas`, and at least one schema of each choice.
struct Constraints {
  struct Choice {
    const SchemaJson* list;
    std::vector<const SchemaJson*> within;  // chain of schemas that contains it, to detect cycles
  };
  std::vector<const SchemaJson*> schemas;  // in the order of discovery
  std::vector<Choice> choices;
  bool unsatisfiable = false;
};

class SchemaDocument {
 public:
  // The schema must outlive this object.
  explicit SchemaDocument(const SchemaJson& root);

  const SchemaJson& root() const { return root_; }

  // Adds to `constraints` what a value must fit to fit `schema`, or to fit the i-th schema of a
  // choice that was removed from `constraints`. Throws Error for unsupported keywords, unresolved
  // references and a schema that refers only to itself.
  void add_constraints(const SchemaJson& schema, Constraints& constraints);
  void add_constraints(const Constraints::Choice& choice, size_t i, Constraints& constraints);

  // The JSON pointer of `schema`, which comes from root(), part(), item(), target() or
  // add_generated().
  const std::string& location(const SchemaJson& schema) const {
    return locations_.at(&schema).location;
  }
  // Whether the schema was generated here and may use the keywords of schema_rewriting.h.
  bool is_generated(const SchemaJson& schema) const { return locations_.at(&schema).generated; }
  // The value of a keyword of `of`, or a member of that value; item(): a member of a list. target()
  // resolves a $ref found at `location`; add_generated() stores a generated schema.
  const SchemaJson& part(const SchemaJson& of, const char* keyword);
  const SchemaJson& part(const SchemaJson& of, const char* keyword, const std::string& name);
  const SchemaJson& part(const SchemaJson& of, const char* keyword, size_t i);
  const SchemaJson& item(const SchemaJson& list, size_t i);
  const SchemaJson& target(const std::string& reference, const std::string& location);
  const SchemaJson& add_generated(SchemaJson generated, const std::string& location);

  // The automaton of a "pattern", which is parsed once. Throws Error naming the location.
  const TextAutomaton& automaton_for(const std::string& pattern, const std::string& location);

 private:
  struct Located {
    std::string location;
    bool generated;
  };

  void add_applied(const SchemaJson& schema, Constraints& constraints);
  void add_choice(const SchemaJson& list, Constraints& constraints);
  const SchemaJson& register_part(const SchemaJson& part, std::string location, bool generated);
  // The result of `make`, computed once for each schema and keyword.
  template <class Make>
  const SchemaJson& derived(const SchemaJson& schema, const char* keyword, bool generated,
                            Make make);
  bool are_disjoint(const SchemaJson& a, const SchemaJson& b);
  // Follows `schema` while it consists of a single $ref.
  const SchemaJson& resolved(const SchemaJson& schema);
  void find_anchors(const SchemaJson& in, const std::string& location);

  const SchemaJson& root_;
  std::unordered_map<const SchemaJson*, Located> locations_;
  std::deque<SchemaJson> generated_;
  std::map<std::pair<const SchemaJson*, std::string>, const SchemaJson*> derived_;
  std::map<std::string, std::string> anchors_;  // "#name" -> location
  std::map<std::string, TextAutomaton> patterns_;
  std::vector<const SchemaJson*> in_progress_;  // schemas whose constraints are being added
  int n_steps_ = 0;
};

}  // namespace tandem
