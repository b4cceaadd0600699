#include "text/jinja/text_functions.h"

#include <algorithm>

#include "text/jinja/characters.h"
#include "text/utf8.h"

namespace tandem::jinja {
namespace {

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
    size_t at = end - 1;
    while ((static_cast<unsigned char>(text[at]) & 0xC0) == 0x80) --at;
    if (is_space(decode_utf8(text, at).value)) break;
    end = at;
  }
  return end;
}

Items split_at_spaces(Heap& heap, const String& whole, int64_t most) {
  Items parts;
  std::string_view text = strip(whole.text, Side::kLeft);
  while (!text.empty()) {
    const bool is_rest = most >= 0 && static_cast<int64_t>(parts.size()) == most;
    const size_t end = is_rest ? text.size() : find_space(text, 0);
    parts.push_back(heap.part(whole, text.substr(0, end)));
    text = strip(text.substr(end), Side::kLeft);
  }
  return parts;
}

Items split_right_at_spaces(Heap& heap, const String& whole, int64_t most) {
  Items parts;
  std::string_view text = strip(whole.text, Side::kRight);
  while (!text.empty()) {
    const bool is_rest = most >= 0 && static_cast<int64_t>(parts.size()) == most;
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
  std::string out;
  bool first = true;
  for (size_t at = 0; at < text.size();) {
    const CodePoint c = decode_utf8(text, at);
    at += c.n_bytes;
    append_utf8(out, first ? to_upper(c.value) : to_lower(c.value));
    first = ends_word(c.value);
  }
  return out;
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

Items split(Heap& heap, const String& whole, const String* separator, int64_t most) {
  heap.spend_steps(whole.text.size() / 16);
  if (!separator) return split_at_spaces(heap, whole, most);
  require(!separator->text.empty(), "split: the separator is empty");
  const std::string_view text = whole.text;
  Items parts;
  size_t begin = 0;
  while (most < 0 || static_cast<int64_t>(parts.size()) < most) {
    const size_t at = text.find(separator->text, begin);
    if (at == std::string_view::npos) break;
    parts.push_back(heap.part(whole, text.substr(begin, at - begin)));
    begin = at + separator->text.size();
  }
  parts.push_back(heap.part(whole, text.substr(begin)));
  return parts;
}

Items split_right(Heap& heap, const String& whole, const String* separator, int64_t most) {
  heap.spend_steps(whole.text.size() / 16);
  if (!separator) return split_right_at_spaces(heap, whole, most);
  require(!separator->text.empty(), "rsplit: the separator is empty");
  std::string_view text = whole.text;
  Items parts;
  while (most < 0 || static_cast<int64_t>(parts.size()) < most) {
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
              int64_t most) {
  const std::string_view text = whole.text;
  TextBuilder out(heap);
  size_t begin = 0;
  for (int64_t n = 0; most < 0 || n < most; ++n) {
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

std::string title_of_str(std::string_view text) {
  return title(text, [](char32_t c) { return !is_letter(c); });
}

std::string title_of_filter(std::string_view text) { return title(text, starts_word); }

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

Value changed(Heap& heap, const String& text, std::string (*change)(std::string_view)) {
  heap.spend_bytes(text.text.size());
  TextBuilder out(heap);
  out.add(change(text.text), !text.given.empty());
  return out.value();
}

Items entry_tuples(Heap& heap, const Value& dict) {
  Items items;
  for (const auto& [key, value] : *dict.entries) items.push_back(heap.tuple({key, value}));
  return items;
}

}  // namespace tandem::jinja
