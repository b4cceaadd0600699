// The rules of JSON itself (RFC 8259). Every grammar of JSON begins with them, so that their nodes
// have the same numbers in all grammars.
#pragma once
#include <map>
#include <string>
#include <string_view>
#include <utility>

#include "text/grammar/grammar.h"
#include "text/grammar/repetition.h"
#include "text/unicode.h"

namespace tandem {

// White space is optional but limited, or a model might write nothing else: one space, or one or
// two line breaks followed by at most 64 spaces or tabs. The digits of numbers are limited for the
// same reason and to what programs can parse: 18 before the point, 32 after it, 2 in an exponent.
struct JsonRules {
  static constexpr int kIntegerDigits = 18, kFractionDigits = 32, kExponentDigits = 2;

  // The grammar must be empty.
  explicit JsonRules(Grammar& grammar);

  Grammar::Rule space;  // white space of at least one byte
  Grammar::Rule string, integer, number, boolean, null, value, object, array;
  Repetition characters;  // characters of a string and its closing quotation mark
};

// Adds one character of a string in well-formed UTF-8, escaped where JSON requires or allows it.
// Not a rule of its own: most tokens of a vocabulary lie inside strings, and so their callers need
// not be examined.
void add_string_character(Grammar& grammar, Grammar::Node from, Grammar::Node to);

// Adds 1 to `most` digits.
void add_digits(Grammar& grammar, Grammar::Node from, Grammar::Node to, int max_digits);

// Adds optional white space after `from` and returns the node after it.
Grammar::Node add_optional_space(Grammar& grammar, const JsonRules& json, Grammar::Node from);

// Adds nodes and edges to a grammar that read one character of a set.
enum class Escaping { kNone, kJson };  // kJson: escaped as inside the quotes of a JSON string

// The code points of well-formed UTF-8.
std::u32string characters_of(std::string_view text);

// All Unicode characters.
inline const CharacterSet kAnyCharacter = {{0, 0xD7FF}, {0xE000, kLastCharacter}};

// Adds edges that read characters as UTF-8. With Escaping::kJson, characters that JSON requires to
// be escaped are read in one escaped form (json_escape()), all others unescaped.
class CharacterWriter {
 public:
  CharacterWriter(Grammar& grammar, Escaping escaping) : g_(grammar), escaping_(escaping) {}

  void write(Grammar::Node from, Grammar::Node to, const CharacterSet& set);

 private:
  void write_part(Grammar::Node from, Grammar::Node to, const CharacterSet& set);

  Grammar& g_;
  const Escaping escaping_;
  // Most sets contain all control characters or none, and all characters beyond ASCII or none.
  // These two parts are written once per target node and shared.
  std::map<std::pair<Grammar::Node, int>, Grammar::Node> shared_parts_;
};

}  // namespace tandem
