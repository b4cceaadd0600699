#include "io/grammar/characters.h"

#include <algorithm>

#include "io/json_escape.h"
#include "io/utf8.h"

namespace tandem {
namespace {

constexpr char32_t kLast = 0x10FFFF;
constexpr char32_t kSurrogates[] = {0xD800, 0xDFFF};

// Characters of one length in UTF-8 whose bytes are a product of ranges: all but the first bytes
// that differ are any continuation.
void add_utf8_range(Grammar& g, Grammar::Node from, Grammar::Node to, char32_t first,
                    char32_t last) {
  constexpr char32_t kEnds[] = {0x7F, 0x7FF, 0xFFFF, kLast};
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
  for (int i = n; i >= 0; --i) {
    const auto byte = [&](char32_t c) {
      const uint8_t bits = i == n ? kLead[n] : 0x80;
      const char32_t kept = c >> 6 * i;
      return static_cast<uint8_t>(bits | (i == n ? kept : kept & 0x3F));
    };
    const Grammar::Node next = i == 0 ? to : g.add_node();
    g.bytes(from, byte(first), byte(last), next);
    from = next;
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

CharacterSet normalised(CharacterSet set) {
  std::sort(set.begin(), set.end(), [](auto& a, auto& b) { return a.first < b.first; });
  CharacterSet out;
  const auto push = [&](char32_t first, char32_t last) {
    if (first > last) return;
    if (!out.empty() && first <= out.back().last + 1) {
      out.back().last = std::max(out.back().last, last);
    } else {
      out.push_back({first, last});
    }
  };
  for (const CharacterRange& range : set) {
    push(range.first, std::min<char32_t>(range.last, kSurrogates[0] - 1));
    push(std::max<char32_t>(range.first, kSurrogates[1] + 1), std::min(range.last, kLast));
  }
  return out;
}

CharacterSet inverted(const CharacterSet& set) {
  CharacterSet out;
  char32_t next = 0;
  for (const CharacterRange& range : normalised(set)) {
    if (range.first > next) out.push_back({next, range.first - 1});
    next = range.last + 1;
  }
  if (next <= kLast) out.push_back({next, kLast});
  return normalised(std::move(out));
}

void add_characters(Grammar& g, Grammar::Node from, Grammar::Node to, const CharacterSet& set,
                    Writing writing) {
  for (CharacterRange range : set) {
    if (writing == Writing::kJson) {
      for (char32_t c = range.first; c <= std::min<char32_t>(range.last, '\\'); ++c) {
        if (!needs_json_escape(c)) continue;
        g.text(from, json_escape(c), to);
        if (range.first < c) add_utf8_range(g, from, to, range.first, c - 1);
        range.first = c + 1;
      }
    }
    if (range.first <= range.last) add_utf8_range(g, from, to, range.first, range.last);
  }
}

}  // namespace tandem
