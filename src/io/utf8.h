// UTF-8 as the tokenizer and the templates need it: checking, stepping, and a stream that never
// emits half a character.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace tandem {

struct ByteRange {  // of a text
  size_t begin, end;
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

// Appends one scalar value: at most U+10FFFF and no surrogate.
void append_utf8(std::string& out, char32_t code_point);

// Byte offset of the `n`-th code point after byte `at`, where one begins. `text` must be
// well-formed and have as many.
size_t skip_code_points(std::string_view text, size_t at, size_t n);

// Number of code points of a well-formed text.
size_t count_code_points(std::string_view text);

// Bytes in, text out. Emits complete characters only; every maximal ill-formed part becomes one
// U+FFFD (Unicode 3.9, the practice of Python and Rust); the last 1-3 bytes wait for their
// continuation.
class Utf8Stream {
 public:
  // Text that `bytes` completes. The concatenation over all calls does not depend on how the bytes
  // were cut.
  std::string push(std::string_view bytes);

  // Ends the stream: a waiting incomplete character becomes one U+FFFD. The stream may be used
  // again afterwards.
  std::string flush();

 private:
  std::string tail_;  // [0..3] bytes of a so far well-formed character
};

}  // namespace tandem
