#include "text/grammar/json_rules.h"

#include <algorithm>

#include "io/json.h"
#include "text/utf8.h"

namespace tandem {

namespace {

using Node = Grammar::Node;
using Rule = Grammar::Rule;

void add_space(Grammar& g, Rule rule) {
  constexpr int kMaxIndent = 64;
  const Node end = g.end(rule);
  g.add_byte(g.start(rule), ' ', end);
  const Node line = g.add_byte(g.start(rule), '\n');
  Node indent = g.add_byte(line, '\n');
  g.add_epsilon(line, indent);
  for (int i = 0; i < kMaxIndent; ++i) {
    g.add_epsilon(indent, end);
    const Node next = g.add_node();
    g.add_byte(indent, ' ', next);
    g.add_byte(indent, '\t', next);
    indent = next;
  }
  g.add_epsilon(indent, end);
}

// A character beyond ASCII in well-formed UTF-8 (table 3-7 of the Unicode standard).
void add_utf8(Grammar& g, Node from, Node to) {
  const Node last = g.add_node(), last2 = g.add_node(), last3 = g.add_node();
  const auto between = [&](Node a, uint8_t first, uint8_t end, Node b) {
    g.add_bytes(a, first, end, b);
  };
  between(last, 0x80, 0xBF, to);
  between(last2, 0x80, 0xBF, last);
  between(last3, 0x80, 0xBF, last2);
  const Node e0 = g.add_node(), ed = g.add_node(), f0 = g.add_node(), f4 = g.add_node();
  between(from, 0xC2, 0xDF, last);
  between(from, 0xE0, 0xE0, e0);
  between(e0, 0xA0, 0xBF, last);
  between(from, 0xE1, 0xEC, last2);
  between(from, 0xED, 0xED, ed);
  between(ed, 0x80, 0x9F, last);
  between(from, 0xEE, 0xEF, last2);
  between(from, 0xF0, 0xF0, f0);
  between(f0, 0x90, 0xBF, last2);
  between(from, 0xF1, 0xF3, last3);
  between(from, 0xF4, 0xF4, f4);
  between(f4, 0x80, 0x8F, last2);
}

void hex(Grammar& g, Node from, char first, char last, Node to) {
  for (char c = first; c <= last; ++c) {
    const char digit = c < 10 ? static_cast<char>('0' + c) : static_cast<char>('A' + c - 10);
    g.add_byte(from, digit, to);
    if (c >= 10) g.add_byte(from, static_cast<char>(digit + ('a' - 'A')), to);
  }
}

// What follows "\u": four hexadecimal digits, or a surrogate pair.
void add_unicode_escape(Grammar& g, Node from, Node to) {
  const Node hex1 = g.add_node(), hex2 = g.add_node(), hex3 = g.add_node();
  hex(g, hex1, 0, 15, to);
  hex(g, hex2, 0, 15, hex1);
  hex(g, hex3, 0, 15, hex2);
  hex(g, from, 0, 12, hex3);
  hex(g, from, 14, 15, hex3);
  const Node d = g.add_node();
  hex(g, from, 13, 13, d);
  hex(g, d, 0, 7, hex2);
  const Node high2 = g.add_node(), high1 = g.add_node(), low = g.add_node();
  hex(g, d, 8, 11, high2);
  hex(g, high2, 0, 15, high1);
  hex(g, high1, 0, 15, low);
  const Node low_u = g.add_text(low, "\\u"), low_d = g.add_node();
  hex(g, low_u, 13, 13, low_d);
  hex(g, low_d, 12, 15, hex2);
}

}  // namespace

void add_string_character(Grammar& g, Node from, Node to) {
  g.add_bytes(from, 0x20, '"' - 1, to);
  g.add_bytes(from, '"' + 1, '\\' - 1, to);
  g.add_bytes(from, '\\' + 1, 0x7F, to);
  add_utf8(g, from, to);
  const Node escape = g.add_byte(from, '\\');
  for (const char c : {'"', '\\', '/', 'b', 'f', 'n', 'r', 't'}) g.add_byte(escape, c, to);
  add_unicode_escape(g, g.add_byte(escape, 'u'), to);
}

namespace {

void add_integer(Grammar& g, Node from, Node to) {
  const Node sign = g.add_byte(from, '-'), more = g.add_node();
  g.add_epsilon(from, sign);
  g.add_byte(sign, '0', to);
  g.add_bytes(sign, '1', '9', more);
  add_digits(g, more, to, JsonRules::kIntegerDigits - 1);
  g.add_epsilon(more, to);
}

void add_number(Grammar& g, Rule rule) {
  const Node integer_end = g.add_node(), fraction = g.add_node();
  add_integer(g, g.start(rule), integer_end);
  g.add_epsilon(integer_end, fraction);
  add_digits(g, g.add_byte(integer_end, '.'), fraction, JsonRules::kFractionDigits);
  g.add_epsilon(fraction, g.end(rule));
  const Node exponent = g.add_node(), sign = g.add_node();
  for (const char c : {'e', 'E'}) g.add_byte(fraction, c, exponent);
  for (const char c : {'+', '-'}) g.add_byte(exponent, c, sign);
  g.add_epsilon(exponent, sign);
  add_digits(g, sign, g.end(rule), JsonRules::kExponentDigits);
}

// A list of any number of items, separated by commas, between `open` and `close`. item(from, to)
// adds one item between two nodes.
template <class Item>
void add_list(Grammar& g, const JsonRules& json, Rule rule, char open, char close, Item item) {
  const Node first = add_optional_space(g, json, g.add_byte(g.start(rule), open));
  const Node item_end = g.add_node(), last = g.add_node();
  item(first, item_end);
  item(add_optional_space(g, json, g.add_byte(item_end, ',')), item_end);
  g.add_epsilon(first, last);
  g.add_epsilon(add_optional_space(g, json, item_end), last);
  g.add_byte(last, close, g.end(rule));
}

}  // namespace

JsonRules::JsonRules(Grammar& g)
    : space(g.add_rule()),
      string(g.add_rule()),
      integer(g.add_rule()),
      number(g.add_rule()),
      boolean(g.add_rule()),
      null(g.add_rule()),
      value(g.add_rule()),
      object(g.add_rule()),
      array(g.add_rule()),
      characters(
          g, [&](Node from, Node to) { add_string_character(g, from, to); },
          [&](Node from, Node to) { g.add_byte(from, '"', to); }) {
  add_space(g, space);
  const Node inside = g.add_byte(g.start(string), '"');
  add_string_character(g, inside, inside);
  g.add_byte(inside, '"', g.end(string));
  add_integer(g, g.start(integer), g.end(integer));
  add_number(g, number);
  g.add_text(g.start(boolean), "true", g.end(boolean));
  g.add_text(g.start(boolean), "false", g.end(boolean));
  g.add_text(g.start(null), "null", g.end(null));
  for (const Rule rule : {string, number, boolean, null, object, array})
    g.add_call(g.start(value), rule, g.end(value));
  add_list(g, *this, object, '{', '}', [&](Node from, Node to) {
    const Node colon = g.add_byte(g.add_call(from, string), ':');
    g.add_call(add_optional_space(g, *this, colon), value, to);
  });
  add_list(g, *this, array, '[', ']', [&](Node from, Node to) { g.add_call(from, value, to); });
}

void add_digits(Grammar& g, Node from, Node to, int max_digits) {
  for (; max_digits > 0; --max_digits) {
    const Node digit = g.add_node();
    g.add_bytes(from, '0', '9', digit);
    g.add_epsilon(digit, to);
    from = digit;
  }
}

Grammar::Node add_optional_space(Grammar& g, const JsonRules& json, Node from) {
  const Node to = g.add_call(from, json.space);
  g.add_epsilon(from, to);
  return to;
}

namespace {

// Chains of nodes that read any continuation bytes and lead to one node.
class Continuations {
 public:
  Continuations(Grammar& grammar, Grammar::Node to) : g_(grammar), before_{to} {}

  Grammar::Node before(size_t n_bytes) {
    while (before_.size() <= n_bytes) {
      const Grammar::Node node = g_.add_node();
      g_.add_bytes(node, 0x80, 0xBF, before_.back());
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
    g.add_bytes(from, byte(first), byte(last), next);
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
      if (is_new) it->second = g.add_byte(node, text[n - 1]);
      node = it->second;
    }
    g.add_bytes(node, static_cast<uint8_t>(text.back()), static_cast<uint8_t>(text.back()), to);
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
    const auto [it, is_new] = shared_parts_.try_emplace({to, i}, -1);
    if (is_new) {
      it->second = g_.add_node();
      write_part(it->second, to, part);
    }
    g_.add_epsilon(from, it->second);
    rest = intersection(rest, inverted(part));
  }
  write_part(from, to, rest);
}

void CharacterWriter::write_part(Grammar::Node from, Grammar::Node to, const CharacterSet& set) {
  std::vector<std::string> escapes;
  Continuations end(g_, to);
  for (CharacterRange range : set) {
    if (escaping_ == Escaping::kJson) {
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
