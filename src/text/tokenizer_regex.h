// The regular expressions of tokenizer files, written for Oniguruma and executed by PCRE2. PCRE2
// does not match the text itself but symbols, one byte for all characters that the patterns treat
// alike. So character properties come only from our table (unicode.h).
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "text/unicode.h"

namespace tandem {

struct SplitPattern {
  struct Part {
    std::string syntax;  // syntax with the same meaning in Oniguruma and PCRE2; empty for a set
    CharacterSet set;    // matches any one of these characters
    bool is_set = false;
  };
  std::string source;  // in Oniguruma's syntax
  std::vector<Part> parts;
};

// Parses an Oniguruma pattern (Ruby syntax). Throws Error naming a construct that is not supported
// or that has another meaning in PCRE2.
SplitPattern parse_oniguruma(std::string_view pattern);

// Maps characters to symbols; two characters share a symbol if every set of the patterns contains
// both or neither. Immutable and thread-safe.
class SymbolTable {
 public:
  // Throws Error when the sets distinguish more than 256 kinds of characters.
  explicit SymbolTable(const std::vector<SplitPattern>& patterns);

  // One byte for each character of well-formed UTF-8. Only "\n" maps to "\n", which "^" and "$"
  // look for.
  std::string symbols_of(std::string_view text) const;

  // `pattern` over symbols, in PCRE2's syntax; it contains no characters or properties.
  std::string translate(const SplitPattern& pattern) const;

 private:
  std::string write(const CharacterSet& set) const;

  std::vector<uint8_t> symbols_;           // [code point]
  std::vector<char32_t> representatives_;  // [symbol] a character that maps to it
};

struct Match {
  size_t begin, end;  // offsets in symbols; begin is npos if there is no match
};

// A compiled pattern. Immutable and thread-safe; a RegexMatcher holds the working memory of one
// thread.
class Regex {
 public:
  // Throws Error naming the pattern and what is wrong with it.
  Regex(const SplitPattern& pattern, const SymbolTable& symbols);

 private:
  friend class RegexMatcher;
  std::string source_;
  std::shared_ptr<void> code_;  // pcre2_code
};

class RegexMatcher {
 public:
  explicit RegexMatcher(const Regex& regex);

  // Leftmost match in `subject`, which consists of symbols, at or after `start`. Throws Error when
  // the pattern needs too much backtracking for this subject.
  Match find(std::string_view subject, size_t start);

 private:
  Match find_with_larger_stack(std::string_view subject, size_t start);
  Match matched() const;
  [[noreturn]] void fail_to_split(std::string_view subject, int error) const;
  std::string shown_pattern() const;

  const Regex& regex_;
  std::shared_ptr<void> data_;  // pcre2_match_data
  std::shared_ptr<void>
      context_;  // pcre2_match_context; empty until the default JIT stack was too small
  std::shared_ptr<void> stack_;  // pcre2_jit_stack, used by context_
};

}  // namespace tandem
