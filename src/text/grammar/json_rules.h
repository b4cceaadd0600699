// The rules of JSON itself (RFC 8259). Every grammar of JSON begins with them, so that their nodes
// have the same numbers in all grammars.
#pragma once
#include "text/grammar/repetition.h"

namespace tandem {

// White space is optional but limited, or a model might write nothing else: one space, or one or
// two line breaks followed by at most 64 spaces or tabs. The digits of numbers are limited for the
// same reason and to what programs can parse: 18 before the point, 32 after it, 2 in an exponent.
struct JsonRules {
  static constexpr int kWholeDigits = 18, kFractionDigits = 32, kExponentDigits = 2;

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
void add_digits(Grammar& grammar, Grammar::Node from, Grammar::Node to, int most);

// Adds optional white space after `from` and returns the node after it.
Grammar::Node after_space(Grammar& grammar, const JsonRules& json, Grammar::Node from);

}  // namespace tandem
