#include "text/jinja/characters.h"

#include "text/unicode.h"
#include "text/utf8.h"

namespace tandem::jinja {
namespace {

bool between(char32_t c, char32_t first, char32_t last) { return first <= c && c <= last; }

// Latin Extended-A: capitals have even code points, but odd ones where has_odd_capitals() holds.
bool is_latin_pair(char32_t c) {
  return between(c, 0x100, 0x177) && c != 0x130 && c != 0x131 && c != 0x138 && c != 0x149;
}
bool has_odd_capitals(char32_t c) { return between(c, 0x139, 0x148) || between(c, 0x179, 0x17E); }

template <class Map>
std::string map_characters(std::string_view text, Map map) {
  std::string out;
  for (size_t at = 0; at < text.size();) {
    const CodePoint c = decode_utf8(text, at);
    at += c.n_bytes;
    append_utf8(out, map(c.value));
  }
  return out;
}

bool is_stripped(char32_t c, const String* set) {
  if (!set) return is_space(c);
  for (size_t at = 0; at < set->text.size();) {
    const CodePoint member = decode_utf8(set->text, at);
    if (member.value == c) return true;
    at += member.n_bytes;
  }
  return false;
}

size_t start_of_last_character(std::string_view text) {
  size_t at = text.size() - 1;
  while ((static_cast<unsigned char>(text[at]) & 0xC0) == 0x80) --at;
  return at;
}

}  // namespace

bool is_space(char32_t c) {
  return between(c, 9, 13) || between(c, 28, 32) || c == 0x85 || c == 0xA0 || c == 0x1680 ||
         between(c, 0x2000, 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F ||
         c == 0x3000;
}

bool is_printable(char32_t c) {
  static const CharacterSet kPrintable = [] {
    CharacterSet all = {{' ', ' '}};
    for (const char* category : {"L", "M", "N", "P", "S"}) {
      const CharacterSet some = *characters_with(category);
      all.insert(all.end(), some.begin(), some.end());
    }
    return normalised(std::move(all));
  }();
  return contains(kPrintable, c);
}

char32_t to_upper(char32_t c) {
  if (between(c, 'a', 'z')) return c - 32;
  if (c < 0x80) return c;
  if (c == 0xB5) return 0x39C;
  if (c == 0xFF) return 0x178;
  if (between(c, 0xE0, 0xFE) && c != 0xF7) return c - 32;
  if (c == 0x131) return 'I';
  if (has_odd_capitals(c)) return c % 2 == 0 ? c - 1 : c;
  if (is_latin_pair(c)) return c % 2 == 1 ? c - 1 : c;
  if (c == 0x3C2) return 0x3A3;
  if (between(c, 0x3B1, 0x3CB)) return c - 32;
  if (between(c, 0x430, 0x44F)) return c - 32;
  if (between(c, 0x450, 0x45F)) return c - 80;
  return c;
}

char32_t to_lower(char32_t c) {
  if (between(c, 'A', 'Z')) return c + 32;
  if (c < 0x80) return c;
  if (c == 0x178) return 0xFF;
  if (between(c, 0xC0, 0xDE) && c != 0xD7) return c + 32;
  if (has_odd_capitals(c)) return c % 2 == 1 ? c + 1 : c;
  if (is_latin_pair(c)) return c % 2 == 0 ? c + 1 : c;
  if (between(c, 0x391, 0x3AB) && c != 0x3A2) return c + 32;
  if (between(c, 0x410, 0x42F)) return c + 32;
  if (between(c, 0x400, 0x40F)) return c + 80;
  return c;
}

std::string to_upper(std::string_view text) {
  std::string out;
  for (size_t at = 0; at < text.size();) {
    const CodePoint c = decode_utf8(text, at);
    at += c.n_bytes;
    if (c.value == 0xDF)  // sharp s has no single capital letter
      out += "SS";
    else
      append_utf8(out, to_upper(c.value));
  }
  return out;
}

std::string to_lower(std::string_view text) {
  return map_characters(text, [](char32_t c) { return to_lower(c); });
}

std::string capitalize(std::string_view text) {
  if (text.empty()) return "";
  const size_t first = decode_utf8(text, 0).n_bytes;
  return to_upper(text.substr(0, first)) + to_lower(text.substr(first));
}

std::string_view strip(std::string_view text, Side side, const String* set) {
  while (side != Side::kRight && !text.empty()) {
    const CodePoint c = decode_utf8(text, 0);
    if (!is_stripped(c.value, set)) break;
    text.remove_prefix(c.n_bytes);
  }
  while (side != Side::kLeft && !text.empty()) {
    const size_t at = start_of_last_character(text);
    if (!is_stripped(decode_utf8(text, at).value, set)) break;
    text.remove_suffix(text.size() - at);
  }
  return text;
}

size_t byte_of_char(const String& text, size_t index) {
  if (text.is_ascii()) return index;
  size_t at = 0;
  for (; index > 0; --index) at += decode_utf8(text.text, at).n_bytes;
  return at;
}

size_t char_of_byte(const String& text, size_t at) {
  return text.is_ascii() ? at : count_code_points(std::string_view(text.text).substr(0, at));
}

}  // namespace tandem::jinja
