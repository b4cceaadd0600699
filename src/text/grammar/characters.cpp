#include "text/grammar/characters.h"

#include <algorithm>
#include <map>

#include "io/json_escape.h"
#include "text/utf8.h"

namespace tandem {
namespace {

// Chains of nodes that read any continuation bytes and lead to one node.
class Continuations {
 public:
  Continuations(Grammar& grammar, Grammar::Node to) : g_(grammar), before_{to} {}

  Grammar::Node before(size_t n_bytes) {
    while (before_.size() <= n_bytes) {
      const Grammar::Node node = g_.add_node();
      g_.bytes(node, 0x80, 0xBF, before_.back());
      before_.push_back(node);
    }
    return before_[n_bytes];
  }

 private:
  Grammar& g_;
  std::vector<Grammar::Node> before_;  // [bytes left to read]
};

// Adds the characters first .. last. The range is divided until its UTF-8 sequences have one length
// and are a product of byte ranges: a common prefix, one byte in a range, then any continuation
// bytes.
void add_utf8_range(Grammar& g, Grammar::Node from, Continuations& to, char32_t first,
                    char32_t last) {
  constexpr char32_t kEnds[] = {0x7F, 0x7FF, 0xFFFF, kLastCharacter};
  int n = 0;  // continuation bytes
  while (first > kEnds[n]) ++n;
  if (last > kEnds[n]) {
    add_utf8_range(g, from, to, kEnds[n] + 1, last);
    last = kEnds[n];
  }
  for (int i = 1; i <= n; ++i) {
    const char32_t mask = (char32_t{1} << 6 * i) - 1;
    if ((first & ~mask) == (last & ~mask)) continue;
    if ((first & mask) != 0) {
      add_utf8_range(g, from, to, first, first | mask);
      return add_utf8_range(g, from, to, (first | mask) + 1, last);
    }
    if ((last & mask) != mask) {
      add_utf8_range(g, from, to, first, (last & ~mask) - 1);
      return add_utf8_range(g, from, to, last & ~mask, last);
    }
  }
  constexpr uint8_t kLead[] = {0, 0xC0, 0xE0, 0xF0};
  const auto any_from = [&](int i) {  // whether the last i bytes may be any continuation bytes
    const char32_t mask = (char32_t{1} << 6 * i) - 1;
    return (first & mask) == 0 && (last & mask) == mask;
  };
  for (int i = n; i >= 0; --i) {
    const auto byte = [&](char32_t c) {
      const uint8_t bits = i == n ? kLead[n] : 0x80;
      const char32_t kept = c >> 6 * i;
      return static_cast<uint8_t>(bits | (i == n ? kept : kept & 0x3F));
    };
    const Grammar::Node next = any_from(i) ? to.before(i) : g.add_node();
    g.bytes(from, byte(first), byte(last), next);
    if (any_from(i)) return;
    from = next;
  }
}

// Adds `texts`, none of which is a prefix of another; common prefixes share nodes.
void add_texts(Grammar& g, Grammar::Node from, Grammar::Node to,
               const std::vector<std::string>& texts) {
  std::map<std::string, Grammar::Node> begun = {{"", from}};
  for (const std::string& text : texts) {
    Grammar::Node node = from;
    for (size_t n = 1; n < text.size(); ++n) {
      const auto [it, is_new] = begun.try_emplace(text.substr(0, n));
      if (is_new) it->second = g.byte(node, text[n - 1]);
      node = it->second;
    }
    g.bytes(node, static_cast<uint8_t>(text.back()), static_cast<uint8_t>(text.back()), to);
  }
}

}  // namespace

std::u32string characters_of(std::string_view text) {
  std::u32string characters;
  for (size_t at = 0; at < text.size();) {
    const CodePoint c = decode_utf8(text, at);
    characters.push_back(c.value);
    at += c.n_bytes;
  }
  return characters;
}

void CharacterWriter::write(Grammar::Node from, Grammar::Node to, const CharacterSet& set) {
  static const CharacterSet kParts[] = {{{0, 0x1F}}, {{0x80, 0xD7FF}, {0xE000, kLastCharacter}}};
  CharacterSet rest = set;
  for (int i = 0; i < 2; ++i) {
    const CharacterSet& part = kParts[i];
    if (intersection(set, part) != part) continue;
    const auto [it, is_new] = whole_parts_.try_emplace({to, i}, -1);
    if (is_new) {
      it->second = g_.add_node();
      write_part(it->second, to, part);
    }
    g_.skip(from, it->second);
    rest = intersection(rest, inverted(part));
  }
  write_part(from, to, rest);
}

void CharacterWriter::write_part(Grammar::Node from, Grammar::Node to, const CharacterSet& set) {
  std::vector<std::string> escapes;
  Continuations end(g_, to);
  for (CharacterRange range : set) {
    if (writing_ == Writing::kJson) {
      for (char32_t c = range.first; c <= std::min<char32_t>(range.last, '\\'); ++c) {
        if (!needs_json_escape(c)) continue;
        escapes.push_back(json_escape(c));
        if (range.first < c) add_utf8_range(g_, from, end, range.first, c - 1);
        range.first = c + 1;
      }
    }
    if (range.first <= range.last) add_utf8_range(g_, from, end, range.first, range.last);
  }
  add_texts(g_, from, to, escapes);
}

}  // namespace tandem
