#include "text/jinja/text_functions.h"

#include <algorithm>
#include <utility>

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

size_t find_space(std::string_view text, size_t at) {
  while (at < text.size()) {
    const CodePoint c = decode_utf8(text, at);
    if (is_space(c.value)) break;
    at += c.n_bytes;
  }
  return at;
}

size_t rfind_space(std::string_view text) {  // offset behind the last space, or 0
  size_t end = text.size();
  while (end > 0) {
    const size_t at = start_of_last_character(text.substr(0, end));
    if (is_space(decode_utf8(text, at).value)) break;
    end = at;
  }
  return end;
}

Items split_at_spaces(Heap& heap, const String& whole, int64_t max_count) {
  Items parts;
  std::string_view text = strip(whole.text, Side::kLeft);
  while (!text.empty()) {
    const bool is_rest = max_count >= 0 && static_cast<int64_t>(parts.size()) == max_count;
    const size_t end = is_rest ? text.size() : find_space(text, 0);
    parts.push_back(heap.part(whole, text.substr(0, end)));
    text = strip(text.substr(end), Side::kLeft);
  }
  return parts;
}

Items split_right_at_spaces(Heap& heap, const String& whole, int64_t max_count) {
  Items parts;
  std::string_view text = strip(whole.text, Side::kRight);
  while (!text.empty()) {
    const bool is_rest = max_count >= 0 && static_cast<int64_t>(parts.size()) == max_count;
    const size_t begin = is_rest ? 0 : rfind_space(text);
    parts.push_back(heap.part(whole, text.substr(begin)));
    text = strip(text.substr(0, begin), Side::kRight);
  }
  std::reverse(parts.begin(), parts.end());
  return parts;
}

bool is_letter(char32_t c) {
  return to_upper(c) != c || to_lower(c) != c || c == 0xDF || (c > 0x2E7F && !is_space(c));
}

bool starts_word(char32_t c) {
  return is_space(c) || c == '-' || c == '(' || c == '{' || c == '[' || c == '<';
}

template <class Ends>
std::string title(std::string_view text, Ends ends_word) {
  bool first = true;
  return map_characters(text, [&](char32_t c) {
    return std::exchange(first, ends_word(c)) ? to_upper(c) : to_lower(c);
  });
}

// Length of the line break at `at`, as in Python's str.splitlines(); 0 when there is none.
size_t line_break(std::string_view text, size_t at) {
  if (text.substr(at).starts_with("\r\n")) return 2;
  const CodePoint c = decode_utf8(text, at);
  const char32_t v = c.value;
  const bool breaks =
      (v >= 10 && v <= 13) || (v >= 28 && v <= 30) || v == 0x85 || v == 0x2028 || v == 0x2029;
  return breaks ? c.n_bytes : 0;
}

}  // namespace

Items split(Heap& heap, const String& whole, const String* separator, int64_t max_count) {
  heap.spend_steps(whole.text.size() / 16);
  if (!separator) return split_at_spaces(heap, whole, max_count);
  require(!separator->text.empty(), "split: the separator is empty");
  const std::string_view text = whole.text;
  Items parts;
  size_t begin = 0;
  while (max_count < 0 || static_cast<int64_t>(parts.size()) < max_count) {
    const size_t at = text.find(separator->text, begin);
    if (at == std::string_view::npos) break;
    parts.push_back(heap.part(whole, text.substr(begin, at - begin)));
    begin = at + separator->text.size();
  }
  parts.push_back(heap.part(whole, text.substr(begin)));
  return parts;
}

Items split_right(Heap& heap, const String& whole, const String* separator, int64_t max_count) {
  heap.spend_steps(whole.text.size() / 16);
  if (!separator) return split_right_at_spaces(heap, whole, max_count);
  require(!separator->text.empty(), "rsplit: the separator is empty");
  std::string_view text = whole.text;
  Items parts;
  while (max_count < 0 || static_cast<int64_t>(parts.size()) < max_count) {
    const size_t at = text.rfind(separator->text);
    if (at == std::string_view::npos) break;
    parts.push_back(heap.part(whole, text.substr(at + separator->text.size())));
    text = text.substr(0, at);
  }
  parts.push_back(heap.part(whole, text));
  std::reverse(parts.begin(), parts.end());
  return parts;
}

Items lines_of(Heap& heap, const String& whole, bool keep_ends) {
  const std::string_view text = whole.text;
  heap.spend_steps(text.size() / 16);
  Items lines;
  size_t begin = 0;
  for (size_t at = 0; at < text.size();) {
    const size_t n_break = line_break(text, at);
    if (n_break == 0) {
      at += decode_utf8(text, at).n_bytes;
      continue;
    }
    const size_t end = keep_ends ? at + n_break : at;
    lines.push_back(heap.part(whole, text.substr(begin, end - begin)));
    at += n_break;
    begin = at;
  }
  if (begin < text.size()) lines.push_back(heap.part(whole, text.substr(begin)));
  return lines;
}

Value replace(Heap& heap, const String& whole, std::string_view from, const String& to,
              int64_t max_count) {
  const std::string_view text = whole.text;
  TextBuilder out(heap);
  size_t begin = 0;
  for (int64_t n = 0; max_count < 0 || n < max_count; ++n) {
    size_t at = begin;
    if (!from.empty()) {
      at = text.find(from, begin);
      if (at == std::string_view::npos) break;
      out.add(whole, text.substr(begin, at - begin));
    } else if (n > 0) {  // an empty text matches between all characters and at both ends
      if (begin == text.size()) break;
      at = begin + decode_utf8(text, begin).n_bytes;
      out.add(whole, text.substr(begin, at - begin));
    }
    out.add(to);
    begin = at + from.size();
  }
  out.add(whole, text.substr(begin));
  return out.value();
}

size_t occurrences(std::string_view text, std::string_view wanted) {
  size_t n = 0;
  for (size_t at = text.find(wanted); at != text.npos; at = text.find(wanted, at + wanted.size()))
    ++n;
  return n;
}

std::string title_str(std::string_view text) {
  return title(text, [](char32_t c) { return !is_letter(c); });
}

std::string title_filter(std::string_view text) { return title(text, starts_word); }

Value indent_lines(Heap& heap, const String& text, const String& indent, bool first, bool blank) {
  TextBuilder out(heap), ended(heap);
  if (first) out.add(indent);
  ended.add(text);
  ended.add("\n");
  const Items lines = lines_of(heap, *ended.value().string, false);
  for (size_t i = 0; i < lines.size(); ++i) {
    if (i > 0) out.add("\n");
    if (i > 0 && (blank || !lines[i].text().empty())) out.add(indent);
    out.add(*lines[i].string);
  }
  return out.value();
}

Value map_text(Heap& heap, const String& text, std::string (*convert)(std::string_view)) {
  heap.spend_bytes(text.text.size());
  TextBuilder out(heap);
  out.add(convert(text.text), !text.given.empty());
  return out.value();
}

Items entry_tuples(Heap& heap, const Value& dict) {
  Items items;
  for (const auto& [key, value] : *dict.entries) items.push_back(heap.tuple({key, value}));
  return items;
}

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
