// On arbitrary bytes the check, the decoder and the stream agree with each other, wherever the
// bytes are split.
#include <cstdint>
#include <string>
#include <string_view>

#include "core/check.h"
#include "text/utf8.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace tandem;
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  Utf8Stream at_once, cut;
  std::string text = at_once.push(bytes);
  text += at_once.flush();
  std::string cut_text;
  for (size_t at = 0; at < size;) {
    const size_t n = 1 + bytes[at] % 3u;
    const std::string piece = cut.push(bytes.substr(at, n));
    check(find_invalid_utf8(piece) == std::string_view::npos, "whole characters");
    cut_text += piece;
    at += n;
  }
  check(cut_text + cut.flush() == text, "the same wherever it is cut");
  check(find_invalid_utf8(text) == std::string_view::npos, "well-formed");

  const size_t invalid = find_invalid_utf8(bytes);
  check((invalid == std::string_view::npos) == (text == bytes), "changed only where ill-formed");
  const std::string_view valid = bytes.substr(0, invalid);
  std::string again;
  for (size_t at = 0; at < valid.size();) {
    const CodePoint c = decode_utf8(valid, at);
    append_utf8(again, c.value);
    at += c.n_bytes;
  }
  check(again == valid, "decoded and encoded");
  return 0;
}
