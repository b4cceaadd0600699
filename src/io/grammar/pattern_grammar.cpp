#include "io/grammar/pattern_grammar.h"

#include <algorithm>
#include <string>

#include "core/check.h"
#include "io/grammar/characters.h"
#include "io/json.h"
#include "io/utf8.h"

namespace tandem {
namespace {

constexpr int kMostRepeats = 10'000;
constexpr int kMostDepth = 64;

const CharacterSet kAny = {{0, 0xD7FF}, {0xE000, 0x10FFFF}};
const CharacterSet kDigits = {{'0', '9'}};
const CharacterSet kWord = {{'0', '9'}, {'A', 'Z'}, {'_', '_'}, {'a', 'z'}};
const CharacterSet kSpace = {{'\t', '\r'},     {' ', ' '},       {0xA0, 0xA0},     {0x1680, 0x1680},
                             {0x2000, 0x200A}, {0x2028, 0x2029}, {0x202F, 0x202F}, {0x205F, 0x205F},
                             {0x3000, 0x3000}, {0xFEFF, 0xFEFF}};
const CharacterSet kLineEnds = {{'\n', '\n'}, {'\r', '\r'}, {0x2028, 0x2029}};

// A part of an expression: alternatives of sequences, or a set of characters; repeated.
struct Part {
  CharacterSet set;
  std::vector<std::vector<Part>> alternatives;  // of a group
  int min = 1, max = 1;                         // kMostRepeats + 1: without end
};

class PatternParser {
 public:
  explicit PatternParser(std::string_view pattern) : text_(characters_of(pattern)) {}

  struct Alternative {
    std::vector<Part> parts;
    bool at_begin = false, at_end = false;  // "^" and "$"
  };
  std::vector<Alternative> parse() {
    std::vector<Alternative> all;
    do {
      Alternative a;
      while (take('^')) a.at_begin = true;
      a.parts = sequence(0);
      while (take('$')) a.at_end = true;
      all.push_back(std::move(a));
    } while (take('|'));
    require(done(), "{} is not supported here", shown_here());
    return all;
  }

 private:
  bool done() const { return at_ == text_.size(); }
  char32_t peek() const { return done() ? 0 : text_[at_]; }
  bool take(char32_t c) {
    if (done() || text_[at_] != c) return false;
    ++at_;
    return true;
  }
  char32_t next() {
    require(!done(), "it breaks off");
    return text_[at_++];
  }
  std::string shown_here() const {
    std::string rest;
    for (size_t i = at_; i < text_.size() && i < at_ + 8; ++i) append_utf8(rest, text_[i]);
    return shown(rest);
  }

  std::vector<Part> sequence(int depth) {
    require(depth < kMostDepth, "its groups are nested deeper than {} levels", kMostDepth);
    std::vector<Part> parts;
    while (!done() && peek() != '|' && peek() != ')' && peek() != '$') {
      Part part = atom(depth);
      quantify(part);
      parts.push_back(std::move(part));
    }
    return parts;
  }

  Part atom(int depth) {
    Part part;
    const size_t begin = at_;
    const char32_t c = next();
    switch (c) {
      case '(':
        if (take('?')) {
          require(take(':'), "groups of the form (?.. other than (?: are not supported");
        }
        do part.alternatives.push_back(sequence(depth + 1));
        while (take('|'));
        require(take(')'), "a group is not closed, or holds an anchor");
        return part;
      case '[':
        part.set = character_class();
        return part;
      case '.':
        part.set = inverted(kLineEnds);
        return part;
      case '\\':
        part.set = escape(false);
        return part;
      case '*':
      case '+':
      case '?':
      case '^':
        at_ = begin;
        fail("{} is not supported here", shown_here());
      default:
        part.set = {{c, c}};
        return part;
    }
  }

  void quantify(Part& part) {
    if (take('*')) {
      part.min = 0;
      part.max = kMostRepeats + 1;
    } else if (take('+')) {
      part.max = kMostRepeats + 1;
    } else if (take('?')) {
      part.min = 0;
    } else if (peek() == '{') {
      const size_t begin = at_++;
      const int min = number();
      part.min = part.max = min;
      if (take(',')) part.max = peek() == '}' ? kMostRepeats + 1 : number();
      const bool ok = min >= 0 && part.max >= part.min && take('}');
      if (!ok) at_ = begin;
      require(ok, "{} is not a count between 0 and {}", shown_here(), kMostRepeats);
    } else {
      return;
    }
    take('?');  // lazy: which texts match is the same
    require(peek() != '*' && peek() != '+' && peek() != '{' && peek() != '?',
            "{} is not supported here", shown_here());
  }

  int number() {
    int value = -1;
    while (!done() && peek() >= '0' && peek() <= '9') {
      value = std::max(value, 0) * 10 + static_cast<int>(next() - '0');
      if (value > kMostRepeats) return -1;
    }
    return value;
  }

  CharacterSet character_class() {
    const bool inverts = take('^');
    CharacterSet set;
    while (!take(']')) {
      CharacterSet one = class_item();
      const bool is_range = peek() == '-' && at_ + 1 < text_.size() && text_[at_ + 1] != ']';
      if (is_range) {
        ++at_;
        const CharacterSet end = class_item();
        require(one.size() == 1 && end.size() == 1 && one[0].first == one[0].last &&
                    end[0].first == end[0].last && one[0].first <= end[0].first,
                "a range of characters is broken before {}", shown_here());
        one[0].last = end[0].last;
      }
      set.insert(set.end(), one.begin(), one.end());
    }
    return inverts ? inverted(set) : normalised(std::move(set));
  }

  CharacterSet class_item() {
    const char32_t c = next();
    return c == '\\' ? escape(true) : CharacterSet{{c, c}};
  }

  CharacterSet escape(bool in_class) {
    const size_t begin = at_ - 1;
    const char32_t c = next();
    const auto one = [](char32_t character) { return CharacterSet{{character, character}}; };
    switch (c) {
      case 'd':
        return kDigits;
      case 'D':
        return inverted(kDigits);
      case 'w':
        return kWord;
      case 'W':
        return inverted(kWord);
      case 's':
        return kSpace;
      case 'S':
        return inverted(kSpace);
      case 't':
        return one('\t');
      case 'n':
        return one('\n');
      case 'r':
        return one('\r');
      case 'f':
        return one('\f');
      case 'v':
        return one('\v');
      case 'x':
        return one(hex(2));
      case 'u':
        return one(hex(4));
      case 'b':
        if (in_class) return one('\b');
        break;
      default:
        break;
    }
    const bool is_letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
    if (!is_letter && !(c >= '0' && c <= '9')) return one(c);
    at_ = begin;
    fail("{} is not supported", shown_here());
  }

  char32_t hex(int n) {
    char32_t value = 0;
    for (int i = 0; i < n; ++i) {
      const char32_t c = next();
      const bool digit = c >= '0' && c <= '9';
      const char32_t letter = c | 0x20;
      require(digit || (letter >= 'a' && letter <= 'f'), "an escape needs {} hexadecimal digits",
              n);
      value = value * 16 + (digit ? c - '0' : letter - 'a' + 10);
    }
    require(value < 0xD800 || value > 0xDFFF, "surrogates are not supported: write the character");
    return value;
  }

  const std::u32string text_;
  size_t at_ = 0;
};

class PatternWriter {
 public:
  PatternWriter(Grammar& grammar, Writing writing) : g_(grammar), writing_(writing) {}

  Grammar::Node any(Grammar::Node from) {
    const Grammar::Node loop = g_.add_node();
    g_.skip(from, loop);
    add_characters(g_, loop, loop, kAny, writing_);
    return loop;
  }

  Grammar::Node sequence(Grammar::Node from, const std::vector<Part>& parts) {
    for (const Part& part : parts) from = repeated(from, part);
    return from;
  }

 private:
  Grammar::Node repeated(Grammar::Node from, const Part& part) {
    for (int i = 0; i < part.min; ++i) from = once(from, part);
    const Grammar::Node end = g_.add_node();
    if (part.max > kMostRepeats) {
      const Grammar::Node loop = g_.add_node();
      g_.skip(from, loop);
      g_.skip(once(loop, part), loop);
      g_.skip(loop, end);
      return end;
    }
    for (int i = part.min; i < part.max; ++i) {
      g_.skip(from, end);
      from = once(from, part);
    }
    g_.skip(from, end);
    return end;
  }

  Grammar::Node once(Grammar::Node from, const Part& part) {
    const Grammar::Node to = g_.add_node();
    if (part.alternatives.empty()) add_characters(g_, from, to, part.set, writing_);
    for (const auto& alternative : part.alternatives) {
      const Grammar::Node begin = g_.add_node();
      g_.skip(from, begin);
      g_.skip(sequence(begin, alternative), to);
    }
    return to;
  }

  Grammar& g_;
  const Writing writing_;
};

}  // namespace

void add_pattern(Grammar& g, Grammar::Node from, Grammar::Node to, std::string_view pattern,
                 Writing writing, bool whole) {
  PatternWriter writer(g, writing);
  for (const auto& alternative : PatternParser(pattern).parse()) {
    Grammar::Node node = g.add_node();
    g.skip(from, node);
    if (!whole && !alternative.at_begin) node = writer.any(node);
    node = writer.sequence(node, alternative.parts);
    if (!whole && !alternative.at_end) node = writer.any(node);
    g.skip(node, to);
  }
}

}  // namespace tandem
