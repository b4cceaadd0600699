// UTF-8 for the tokenizer and the templates: validation, iteration, and a stream that emits only
// complete characters.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace tandem {

struct ByteRange {
  size_t begin, end;  // byte offsets in a text
};

inline constexpr std::string_view kReplacementCharacter = "\xEF\xBF\xBD";  // U+FFFD

// Byte offset of the first byte of `text` that is not part of well-formed UTF-8 (Unicode table 3-7:
// no overlong forms, no surrogates, nothing above U+10FFFF), or npos.
size_t find_invalid_utf8(std::string_view text);

struct CodePoint {
  char32_t value;
  size_t n_bytes;  // 1..4
};

// The code point that starts at byte `at` < text.size(). `text` must be well-formed.
CodePoint decode_utf8(std::string_view text, size_t at);

// Appends a Unicode scalar value: at most U+10FFFF and not a surrogate.
void append_utf8(std::string& out, char32_t code_point);

// Byte offset after `n` code points from byte `at`, at which one begins. `text` must be well-formed
// and have at least that many.
size_t skip_code_points(std::string_view text, size_t at, size_t n);

// Number of code points of a well-formed text.
size_t count_code_points(std::string_view text);

// Turns bytes that arrive in pieces into text. Emits complete characters only: each maximal
// ill-formed subsequence becomes one U+FFFD (Unicode 3.9, as in Python and Rust), and up to 3 bytes
// of an incomplete character are held back.
class Utf8Stream {
 public:
  // Returns the text completed by `bytes`. The concatenated result of all calls does not depend on
  // how the bytes are divided among them.
  std::string push(std::string_view bytes);

  // Ends the stream: a held back incomplete character becomes one U+FFFD. The stream may be used
  // again afterwards.
  std::string flush();

 private:
  std::string tail_;  // 0 to 3 bytes: the beginning of a well-formed character
};

}  // namespace tandem
