// The rules of JSON itself (RFC 8259), which every grammar of JSON begins with: their nodes have
// the same numbers in all of them.
#pragma once
#include "io/grammar/repetition.h"

namespace tandem {

// White space is the model's choice within bounds, or it might write nothing else: a space, or one
// or two new lines and at most 64 spaces or tabs. So are the digits of numbers, which also keeps
// them within what programs can read: 18 before the point, 32 after it, 2 of an exponent.
struct JsonRules {
  static constexpr int kWholeDigits = 18, kFractionDigits = 32, kExponentDigits = 2;

  // The grammar is empty.
  explicit JsonRules(Grammar& grammar);

  Grammar::Rule space;  // at least a byte of it
  Grammar::Rule string, integer, number, boolean, null, value, object, array;
  Repetition characters;  // of a string, after its first quotation mark, and the last mark
};

// A character of a string, escaped where it must be or may be; well-formed UTF-8. No rule of its
// own: most tokens of a vocabulary are within a text, and no caller is to be looked at for them.
void add_string_character(Grammar& grammar, Grammar::Node from, Grammar::Node to);

// From 1 to `most` digits.
void add_digits(Grammar& grammar, Grammar::Node from, Grammar::Node to, int most);

// A node after `from` and space, or none.
Grammar::Node after_space(Grammar& grammar, const JsonRules& json, Grammar::Node from);

}  // namespace tandem
