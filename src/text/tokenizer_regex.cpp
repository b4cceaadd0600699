#include "text/tokenizer_regex.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <array>

#include "core/check.h"
#include "io/json.h"

namespace tandem {
namespace {

std::string error_text(int code) {
  std::array<PCRE2_UCHAR, 256> text{};
  pcre2_get_error_message(code, text.data(), text.size());
  return reinterpret_cast<const char*>(text.data());
}

PCRE2_SPTR units(std::string_view text) { return reinterpret_cast<PCRE2_SPTR>(text.data()); }

pcre2_code* code(const std::shared_ptr<void>& p) { return static_cast<pcre2_code*>(p.get()); }

pcre2_match_data* match_data(const std::shared_ptr<void>& p) {
  return static_cast<pcre2_match_data*>(p.get());
}

pcre2_match_context* match_context(const std::shared_ptr<void>& p) {
  return static_cast<pcre2_match_context*>(p.get());
}

}  // namespace

Regex::Regex(const SplitPattern& pattern, const SymbolTable& symbols) : source_(pattern.source) {
  const std::string translated = symbols.translate(pattern);
  const std::unique_ptr<pcre2_compile_context, decltype(&pcre2_compile_context_free)> context(
      pcre2_compile_context_create(nullptr), pcre2_compile_context_free);
  pcre2_set_newline(context.get(), PCRE2_NEWLINE_LF);
  int error = 0;
  PCRE2_SIZE offset = 0;
  pcre2_code* compiled = pcre2_compile(units(translated), translated.size(), PCRE2_MULTILINE,
                                       &error, &offset, context.get());
  if (compiled == nullptr)
    fail("the split pattern {} is invalid: {}", shown(source_), error_text(error));
  code_ = std::shared_ptr<void>(compiled,
                                [](void* p) { pcre2_code_free(static_cast<pcre2_code*>(p)); });
  // Fails on systems that forbid generating machine code; pcre2_match() then interprets the
  // pattern.
  pcre2_jit_compile(compiled, PCRE2_JIT_COMPLETE);
}

RegexMatcher::RegexMatcher(const Regex& regex)
    : regex_(regex), data_(pcre2_match_data_create(1, nullptr), [](void* p) {
        pcre2_match_data_free(static_cast<pcre2_match_data*>(p));
      }) {}

Match RegexMatcher::find(std::string_view subject, size_t start) {
  const int n = pcre2_match(code(regex_.code_), units(subject), subject.size(), start, 0,
                            match_data(data_), match_context(context_));
  if (n >= 0) return matched();
  if (n == PCRE2_ERROR_NOMATCH) return {std::string_view::npos, std::string_view::npos};
  if (n == PCRE2_ERROR_JIT_STACKLIMIT) return find_with_larger_stack(subject, start);
  fail_to_split(subject, n);
}

// The default JIT stack has 32 KiB. A repeated group uses some of it for every repetition.
Match RegexMatcher::find_with_larger_stack(std::string_view subject, size_t start) {
  const size_t bytes = (size_t{1} << 20) + 256 * subject.size();
  if (bytes >= size_t{1} << 32)
    fail("a text of {} bytes is too long to be split into tokens: shorten it", subject.size());
  context_.reset();
  stack_ = std::shared_ptr<void>(
      pcre2_jit_stack_create(size_t{1} << 20, bytes, nullptr),
      [](void* p) { pcre2_jit_stack_free(static_cast<pcre2_jit_stack*>(p)); });
  context_ = std::shared_ptr<void>(pcre2_match_context_create(nullptr), [](void* p) {
    pcre2_match_context_free(static_cast<pcre2_match_context*>(p));
  });
  require(stack_ && context_,
          "not enough memory to split a text of {} bytes into tokens: shorten it", subject.size());
  pcre2_jit_stack_assign(match_context(context_), nullptr, stack_.get());
  const int n = pcre2_match(code(regex_.code_), units(subject), subject.size(), start, 0,
                            match_data(data_), match_context(context_));
  if (n == PCRE2_ERROR_NOMATCH) return {std::string_view::npos, std::string_view::npos};
  if (n < 0) fail_to_split(subject, n);
  return matched();
}

void RegexMatcher::fail_to_split(std::string_view subject, int error) const {
  if (error == PCRE2_ERROR_MATCHLIMIT)
    fail(
        "a text of {} bytes cannot be split into tokens: a part of it, such as white space, is "
        "millions of characters long: shorten it",
        subject.size());
  fail("the split pattern {} cannot split this text: {}", shown_pattern(), error_text(error));
}

std::string RegexMatcher::shown_pattern() const { return shown(regex_.source_); }

Match RegexMatcher::matched() const {
  const PCRE2_SIZE* bounds = pcre2_get_ovector_pointer(match_data(data_));
  return {bounds[0], bounds[1]};
}

}  // namespace tandem
