// Adds nodes and edges to a grammar that read one character of a set.
#pragma once
#include <map>
#include <string>
#include <string_view>
#include <utility>

#include "text/grammar/grammar.h"
#include "text/unicode.h"

namespace tandem {

enum class Writing { kRaw, kJson };  // kJson: escaped as inside the quotes of a JSON string

// The code points of well-formed UTF-8.
std::u32string characters_of(std::string_view text);

// All Unicode characters.
inline const CharacterSet kAnyCharacter = {{0, 0xD7FF}, {0xE000, kLastCharacter}};

// Adds edges that read characters as UTF-8. With Writing::kJson, characters that JSON requires to
// be escaped are read in one escaped form (json_escape()), all others unescaped.
class CharacterWriter {
 public:
  CharacterWriter(Grammar& grammar, Writing writing) : g_(grammar), writing_(writing) {}

  void write(Grammar::Node from, Grammar::Node to, const CharacterSet& set);

 private:
  void write_part(Grammar::Node from, Grammar::Node to, const CharacterSet& set);

  Grammar& g_;
  const Writing writing_;
  // Most sets contain all control characters or none, and all characters beyond ASCII or none.
  // These two parts are written once per target node and shared.
  std::map<std::pair<Grammar::Node, int>, Grammar::Node> whole_parts_;
};

}  // namespace tandem
