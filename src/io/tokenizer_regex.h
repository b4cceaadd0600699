// The regular expressions of tokenizer files: written for Oniguruma, run by PCRE2's compiler.
#pragma once
#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

namespace tandem {

// Rewrites an Oniguruma pattern (its Ruby syntax) as a PCRE2 pattern with the same matches under
// PCRE2_UTF, PCRE2_UCP and PCRE2_MULTILINE. Throws Error naming any construct whose meaning differs
// and that is not translated. What changes: \s is exactly Unicode's White_Space; script names mean
// the Script property, not Script_Extensions; \uHHHH; \v; and set intersection, [A&&[^B]], where A
// consists of general categories.
std::string translate_oniguruma(std::string_view pattern);

struct Match {
  size_t begin, end;  // bytes; begin == npos: no match
};

// A compiled pattern. Immutable and thread-safe; a RegexMatcher holds the working memory of one
// thread.
class Regex {
 public:
  // `pattern` in Oniguruma's syntax. Throws Error with the pattern and the position of its mistake.
  explicit Regex(std::string_view pattern);

 private:
  friend class RegexMatcher;
  std::string pattern_;
  std::shared_ptr<void> code_;  // pcre2_code
};

class RegexMatcher {
 public:
  explicit RegexMatcher(const Regex& regex);

  // Leftmost match in `subject` (well-formed UTF-8) at or after byte `start`. Throws Error when the
  // pattern needs too much backtracking for this subject.
  Match find(std::string_view subject, size_t start);

 private:
  Match find_with_more_memory(std::string_view subject, size_t start);
  Match matched() const;
  std::string shown_pattern() const;

  const Regex& regex_;
  std::shared_ptr<void> data_;  // pcre2_match_data
  std::shared_ptr<void>
      context_;  // pcre2_match_context; empty until the small JIT stack was too small
  std::shared_ptr<void> stack_;  // pcre2_jit_stack, used by context_
};

}  // namespace tandem
