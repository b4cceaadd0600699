// A schema with its parts: what references point to, where parts stand, and what a value has to fit
// at once.
#pragma once
#include <algorithm>
#include <deque>
#include <map>
#include <string>
#include <unordered_map>
#include <vector>

#include "io/grammar/schema_keywords.h"
#include "io/grammar/text_automaton.h"

namespace tandem {

template <class T>
bool among(const std::vector<T>& list, const T& value) {
  return std::find(list.begin(), list.end(), value) != list.end();
}

// What a value has to fit: the keywords of schemas that speak of a type, and of each list one.
struct Claims {
  struct Choice {
    const SchemaJson* list;
    std::vector<const SchemaJson*> within;  // schemas that led to it
  };
  std::vector<const SchemaJson*> schemas;  // as they are met
  std::vector<Choice> choices;
  bool nothing_fits = false;
};

class SchemaDocument {
 public:
  // The schema outlives this.
  explicit SchemaDocument(const SchemaJson& root);

  const SchemaJson& root() const { return root_; }

  // Adds to `claims` what a value must fit to fit `schema`, or the i-th of a choice that was taken
  // out of them. Throws Error for what is not understood, for references to nothing, and for a
  // schema that refers to nothing but itself.
  void add_claims(const SchemaJson& schema, Claims& claims);
  void add_claims(const Claims::Choice& choice, size_t i, Claims& claims);

  // `schema` is the root, a part(), a target() or made.
  const std::string& place(const SchemaJson& schema) const { return placed_.at(&schema).place; }
  // Has words that only schema_rewriting.h uses.
  bool is_ours(const SchemaJson& schema) const { return placed_.at(&schema).ours; }
  // What stands in `of` under a keyword, and in a list or an object.
  const SchemaJson& part(const SchemaJson& of, const char* keyword);
  const SchemaJson& part(const SchemaJson& of, const char* keyword, const std::string& name);
  const SchemaJson& part(const SchemaJson& of, const char* keyword, size_t i);
  const SchemaJson& item(const SchemaJson& list, size_t i);
  const SchemaJson& target(const std::string& reference, const std::string& place);
  const SchemaJson& make(SchemaJson ours, const std::string& place);

  // The automaton of a "pattern", which is read once. Throws Error naming the place.
  const TextAutomaton& texts_with(const std::string& pattern, const std::string& place);

 private:
  struct Placed {
    std::string place;
    bool ours;
  };

  void add_applied(const SchemaJson& schema, Claims& claims);
  void add_choice(const SchemaJson& list, Claims& claims);
  const SchemaJson& placed(const SchemaJson& part, std::string place, bool ours);
  // Made once of each schema and keyword.
  template <class Make>
  const SchemaJson& derived(const SchemaJson& schema, const char* keyword, bool ours, Make make);
  bool are_apart(const SchemaJson& a, const SchemaJson& b);
  // What a schema that is nothing but a reference refers to.
  const SchemaJson& followed(const SchemaJson& schema);
  void find_anchors(const SchemaJson& in, const std::string& place);

  const SchemaJson& root_;
  std::unordered_map<const SchemaJson*, Placed> placed_;
  std::deque<SchemaJson> made_;
  std::map<std::pair<const SchemaJson*, std::string>, const SchemaJson*> derived_;
  std::map<std::string, std::string> anchors_;  // their places
  std::map<std::string, TextAutomaton> patterns_;
  std::vector<const SchemaJson*> open_;  // schemas whose claims are being added
  int n_steps_ = 0;
};

}  // namespace tandem
