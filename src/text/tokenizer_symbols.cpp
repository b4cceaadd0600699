#include <algorithm>
#include <map>

#include "core/check.h"
#include "text/tokenizer_regex.h"
#include "text/utf8.h"

namespace tandem {
namespace {

constexpr size_t kMaxSymbols = 256;

// The distinct sets of `patterns`, preceded by the set of "\n".
std::vector<CharacterSet> sets_of(const std::vector<SplitPattern>& patterns) {
  std::vector<CharacterSet> sets;
  for (const SplitPattern& pattern : patterns)
    for (const SplitPattern::Part& part : pattern.parts)
      if (part.is_set) sets.push_back(part.set);
  std::sort(sets.begin(), sets.end());
  sets.erase(std::unique(sets.begin(), sets.end()), sets.end());
  sets.insert(sets.begin(), {{'\n', '\n'}});
  return sets;
}

// Ascending boundaries of ranges; all characters of a range are in the same sets.
std::vector<char32_t> bounds_of(const std::vector<CharacterSet>& sets) {
  std::vector<char32_t> bounds = {0, kLastCharacter + 1};
  for (const CharacterSet& set : sets)
    for (const CharacterRange& range : set) {
      bounds.push_back(range.first);
      bounds.push_back(range.last + 1);
    }
  std::sort(bounds.begin(), bounds.end());
  bounds.erase(std::unique(bounds.begin(), bounds.end()), bounds.end());
  return bounds;
}

}  // namespace

SymbolTable::SymbolTable(const std::vector<SplitPattern>& patterns)
    : symbols_(kLastCharacter + 1), representatives_('\n' + 1, U'\n') {
  const std::vector<CharacterSet> sets = sets_of(patterns);
  const std::vector<char32_t> bounds = bounds_of(sets);
  std::map<std::vector<bool>, uint8_t> symbol_of;  // key: [set] whether the set has the character
  size_t n_symbols = 0;
  for (size_t i = 0; i + 1 < bounds.size(); ++i) {
    std::vector<bool> memberships(sets.size());
    for (size_t s = 0; s < sets.size(); ++s) memberships[s] = contains(sets[s], bounds[i]);
    const bool is_newline = bounds[i] == '\n';
    const auto known = symbol_of.find(memberships);
    if (known == symbol_of.end()) {
      if (n_symbols == '\n') ++n_symbols;
      const size_t symbol = is_newline ? '\n' : n_symbols++;
      require(symbol < kMaxSymbols,
              "the split patterns distinguish more than {} classes of characters", kMaxSymbols);
      representatives_.resize(std::max(representatives_.size(), symbol + 1), U'\n');
      representatives_[symbol] = bounds[i];
      symbol_of[memberships] = static_cast<uint8_t>(symbol);
    }
    std::fill(symbols_.begin() + bounds[i], symbols_.begin() + bounds[i + 1],
              symbol_of[memberships]);
  }
}

std::string SymbolTable::symbols_of(std::string_view text) const {
  std::string symbols(text.size(), '\0');
  size_t n = 0;
  for (size_t at = 0; at < text.size();) {
    const auto byte = static_cast<unsigned char>(text[at]);
    if (byte < 0x80) {
      symbols[n++] = static_cast<char>(symbols_[byte]);
      ++at;
      continue;
    }
    const CodePoint c = decode_utf8(text, at);
    symbols[n++] = static_cast<char>(symbols_[c.value]);
    at += c.n_bytes;
  }
  symbols.resize(n);
  return symbols;
}

std::string SymbolTable::translate(const SplitPattern& pattern) const {
  std::string out;
  for (const SplitPattern::Part& part : pattern.parts)
    out += part.is_set ? write(part.set) : part.syntax;
  return out;
}

std::string SymbolTable::write(const CharacterSet& set) const {
  std::string items;
  for (size_t symbol = 0; symbol < representatives_.size(); ++symbol)
    if ((representatives_[symbol] != U'\n' || symbol == '\n') &&
        contains(set, representatives_[symbol]))
      items += fmt::format("\\x{:02x}", symbol);
  if (items.size() == 4) return items;
  return items.empty() ? R"([^\x00-\xff])" : "[" + items + "]";
}

}  // namespace tandem
