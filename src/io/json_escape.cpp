#include "io/json_escape.h"

#include <fmt/format.h>

namespace tandem {

bool needs_json_escape(char32_t c) { return c < 0x20 || c == '"' || c == '\\'; }

std::string json_escape(char32_t c) {
  switch (c) {
    case '"':
    case '\\':
      return {'\\', static_cast<char>(c)};
    case '\b':
      return "\\b";
    case '\f':
      return "\\f";
    case '\n':
      return "\\n";
    case '\r':
      return "\\r";
    case '\t':
      return "\\t";
    default:
      return fmt::format("\\u{:04x}", static_cast<uint32_t>(c));
  }
}

}  // namespace tandem
