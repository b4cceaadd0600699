// A JSON Schema document: resolves references, knows the place of every part, and collects all
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
bool among(const std::vector<T>& list, const T& value) {
  return std::find(list.begin(), list.end(), value) != list.end();
}

// Everything a value must fit: all of `schemas`, and at least one schema of each choice.
struct Claims {
  struct Choice {
    const SchemaJson* list;
    std::vector<const SchemaJson*> within;  // chain of schemas that contains it, to detect cycles
  };
  std::vector<const SchemaJson*> schemas;  // in the order of discovery
  std::vector<Choice> choices;
  bool nothing_fits = false;
};

class SchemaDocument {
 public:
  // The schema must outlive this object.
  explicit SchemaDocument(const SchemaJson& root);

  const SchemaJson& root() const { return root_; }

  // Adds to `claims` what a value must fit to fit `schema`, or to fit the i-th schema of a choice
  // that was removed from `claims`. Throws Error for unsupported keywords, unresolved references
  // and a schema that refers only to itself.
  void add_claims(const SchemaJson& schema, Claims& claims);
  void add_claims(const Claims::Choice& choice, size_t i, Claims& claims);

  // The JSON pointer of `schema`, which comes from root(), part(), item(), target() or make().
  const std::string& place(const SchemaJson& schema) const { return placed_.at(&schema).place; }
  // Whether the schema was generated here and may use the keywords of schema_rewriting.h.
  bool is_ours(const SchemaJson& schema) const { return placed_.at(&schema).ours; }
  // The value of a keyword of `of`, or a member of that value; item(): a member of a list. target()
  // resolves a $ref found at `place`; make() stores a generated schema.
  const SchemaJson& part(const SchemaJson& of, const char* keyword);
  const SchemaJson& part(const SchemaJson& of, const char* keyword, const std::string& name);
  const SchemaJson& part(const SchemaJson& of, const char* keyword, size_t i);
  const SchemaJson& item(const SchemaJson& list, size_t i);
  const SchemaJson& target(const std::string& reference, const std::string& place);
  const SchemaJson& make(SchemaJson ours, const std::string& place);

  // The automaton of a "pattern", which is parsed once. Throws Error naming the place.
  const TextAutomaton& texts_with(const std::string& pattern, const std::string& place);

 private:
  struct Placed {
    std::string place;
    bool ours;
  };

  void add_applied(const SchemaJson& schema, Claims& claims);
  void add_choice(const SchemaJson& list, Claims& claims);
  const SchemaJson& placed(const SchemaJson& part, std::string place, bool ours);
  // The result of make(), computed once for each schema and keyword.
  template <class Make>
  const SchemaJson& derived(const SchemaJson& schema, const char* keyword, bool ours, Make make);
  bool are_apart(const SchemaJson& a, const SchemaJson& b);
  // Follows `schema` while it consists of a single $ref.
  const SchemaJson& followed(const SchemaJson& schema);
  void find_anchors(const SchemaJson& in, const std::string& place);

  const SchemaJson& root_;
  std::unordered_map<const SchemaJson*, Placed> placed_;
  std::deque<SchemaJson> made_;
  std::map<std::pair<const SchemaJson*, std::string>, const SchemaJson*> derived_;
  std::map<std::string, std::string> anchors_;  // "#name" -> place
  std::map<std::string, TextAutomaton> patterns_;
  std::vector<const SchemaJson*> open_;  // schemas whose claims are being added
  int n_steps_ = 0;
};

}  // namespace tandem
