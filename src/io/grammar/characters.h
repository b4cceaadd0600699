// How a grammar reads one character of a set.
#pragma once
#include <map>
#include <string>
#include <string_view>
#include <utility>

#include "io/grammar/grammar.h"
#include "io/unicode.h"

namespace tandem {

enum class Writing { kRaw, kJson };  // kJson: as inside the quotes of a JSON string

// Of well-formed UTF-8.
std::u32string characters_of(std::string_view text);

// Every character there is.
inline const CharacterSet kAnyCharacter = {{0, 0xD7FF}, {0xE000, kLastCharacter}};

// Writes how a grammar reads characters: in UTF-8; in JSON, what must be escaped is, in one way,
// and nothing else.
class CharacterWriter {
 public:
  CharacterWriter(Grammar& grammar, Writing writing) : g_(grammar), writing_(writing) {}

  void write(Grammar::Node from, Grammar::Node to, const CharacterSet& set);

 private:
  void write_part(Grammar::Node from, Grammar::Node to, const CharacterSet& set);

  Grammar& g_;
  const Writing writing_;
  // Most sets have all control characters or none, and all beyond ASCII or none: written once for
  // each node that they lead to.
  std::map<std::pair<Grammar::Node, int>, Grammar::Node> whole_parts_;
};

}  // namespace tandem
