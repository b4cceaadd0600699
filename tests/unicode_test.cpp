// The classification of every character against Oniguruma in the Python library
// (tests/data/tokenizer/make_unicode.py).
#include "text/unicode.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>

#include "core/check.h"
#include "io/json.h"
#include "text/tokenizer.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

const fs::path kSplits = fs::path(TANDEM_SOURCE_DIR) / "tests/data/tokenizer";
constexpr char32_t kBlock = 4096;

std::string contents(const fs::path& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

const json& expected() {
  static const json kExpected = json::parse(contents(kSplits / "unicode.json"));
  return kExpected;
}

std::string utf8(char32_t c) {
  std::string out;
  append_utf8(out, c);
  return out;
}

std::vector<char32_t> scalars(char32_t first, char32_t last) {
  std::vector<char32_t> all;
  for (char32_t c = first; c <= last; ++c)
    if (c < 0xD800 || c > 0xDFFF) all.push_back(c);
  return all;
}

std::string fnv(std::string_view text) {
  uint64_t value = 0xCBF29CE484222325;
  for (const char c : text) value = (value ^ static_cast<unsigned char>(c)) * 0x100000001B3;
  return fmt::format("{:016x}", value);
}

TEST(Unicode, EveryCharacterIsClassifiedAsInTheIndependentLibrary) {
  EXPECT_EQ(expected()["version"], kUnicodeVersion);
  std::string every;
  for (const char32_t c : scalars(0, kLastCharacter)) append_utf8(every, c);
  ASSERT_GT(expected()["properties"].size(), 200u);
  for (const auto& [name, hash] : expected()["properties"].items()) {
    const std::string pattern = name.starts_with('\\') ? name : "\\p{" + name + "}";
    std::string outside;
    PreTokenizer({{pattern + "+", true}}).split(every, [&](std::string_view piece) {
      size_t last = piece.size() - 1;
      while ((static_cast<unsigned char>(piece[last]) & 0xC0) == 0x80) --last;
      outside += fmt::format("{:X}-{:X} ", uint32_t{decode_utf8(piece, 0).value},
                             uint32_t{decode_utf8(piece, last).value});
    });
    EXPECT_EQ(fnv(outside), hash) << pattern;
  }
}

std::string text_around(const std::string& c) {
  return "a" + c + "b " + c + c + "1" + c + "'s" + c + "\n" + c + "\u0301" + c + "一" + c + "A" +
         c + "!" + c + " " + c + "\r\n";
}

// The beginnings of the pieces of `text`, in characters.
std::vector<size_t> starts_of_pieces(const PreTokenizer& pre_tokenizer, const std::string& text) {
  std::vector<size_t> starts;
  size_t n = 0;
  pre_tokenizer.split(text, [&](std::string_view piece) {
    starts.push_back(n);
    n += count_code_points(piece);
  });
  return starts;
}

std::vector<SplitRule> rules_of(const std::string& tokenizer) {
  if (tokenizer == "kimi")
    return parse_tiktoken(contents(kSplits / "kimi/tiktoken.model"), {}).splits;
  return parse_tokenizer_json(json::parse(contents(kSplits / tokenizer / "tokenizer.json"))).splits;
}

TEST(Unicode, TextsAroundEveryCharacterAreSplitAsTheIndependentLibraryDoes) {
  const std::vector<char32_t> planes = {0, 1, 2, 3, 14};
  for (const auto& [name, hashes] : expected()["splits"].items()) {
    const PreTokenizer pre_tokenizer(rules_of(name));
    ASSERT_EQ(hashes.size(), planes.size() * 16);
    for (size_t i = 0; i < hashes.size(); ++i) {
      const char32_t first = planes[i / 16] << 16 | static_cast<char32_t>(i % 16) * kBlock;
      const std::vector<char32_t> block = scalars(first, first + kBlock - 1);
      std::string starts;
      for (size_t at = 0; at < block.size(); at += 64) {
        std::string text;
        for (size_t k = at; k < at + 64; ++k) text += text_around(utf8(block[k]));
        for (const size_t start : starts_of_pieces(pre_tokenizer, text))
          starts += (starts.empty() ? "" : " ") + std::to_string(start);
      }
      EXPECT_EQ(fnv(starts), hashes[i])
          << name << " from " << fmt::format("U+{:X}", uint32_t{first});
    }
  }
}

// The project's own table then decides which characters are letters, whatever the version of PCRE2.
TEST(Unicode, PatternsReachPcre2WithoutCharactersAndProperties) {
  for (const char* tokenizer : {"v3", "v2", "pairs", "kimi"}) {
    std::vector<SplitPattern> patterns;
    for (const SplitRule& rule : rules_of(tokenizer))
      patterns.push_back(parse_oniguruma(rule.pattern));
    const SymbolTable symbols(patterns);
    for (const SplitPattern& pattern : patterns) {
      std::string rest = symbols.translate(pattern);
      for (size_t at = rest.find("\\x"); at != rest.npos; at = rest.find("\\x")) rest.erase(at, 4);
      EXPECT_EQ(rest.find_first_not_of("()[]{}|?*+,0123:=!<$-^"), rest.npos) << rest;
    }
  }
}

TEST(Unicode, CharactersThatUnicode15And16AssignedJoinTheSpaceBeforeThem) {
  for (const char* tokenizer : {"v3", "kimi"}) {
    const PreTokenizer pre_tokenizer(rules_of(tokenizer));
    for (const char32_t c : {0x1FA77, 0x1FAE8, 0x1FADC, 0x11F10, 0x113D0}) {
      std::string pieces;
      pre_tokenizer.split("I " + utf8(c) + " you", [&](std::string_view piece) {
        pieces.append(pieces.empty() ? "" : "|").append(piece);
      });
      EXPECT_EQ(pieces, "I| " + utf8(c) + "| you") << tokenizer;
    }
  }
}

TEST(Unicode, IdsOfTheOfficialTokenizer) {
  const fs::path official = fs::path(TANDEM_SOURCE_DIR) / "../shared/vectors/deepseek_v3_tokenizer";
  if (!fs::exists(official)) GTEST_SKIP() << official << " is not there";
  const Tokenizer tokenizer = Tokenizer::from_directory(official);
  const auto ids = [&](char32_t c) { return tokenizer.encode("I " + utf8(c) + " you"); };
  EXPECT_EQ(ids(0x1FA77), (std::vector<int32_t>{43, 7351, 105, 118, 440}));
  EXPECT_EQ(ids(0x1FAE8), (std::vector<int32_t>{43, 7351, 107, 104, 440}));
  EXPECT_EQ(ids(0x1FADC), (std::vector<int32_t>{43, 7351, 107, 253, 440}));
  EXPECT_EQ(ids(0x11F10), (std::vector<int32_t>{43, 86387, 242, 123, 241, 440}));
  EXPECT_EQ(ids(0x113D0), (std::vector<int32_t>{43, 86387, 242, 240, 241, 440}));
}

TEST(Unicode, NamesOfProperties) {
  EXPECT_EQ(characters_with("Han"), characters_with("hani"));
  EXPECT_EQ(characters_with("Old_Italic"), characters_with("old italic"));
  EXPECT_EQ(characters_with("lu"), characters_with("Lu"));
  EXPECT_TRUE(characters_with("Cs")->empty());
  EXPECT_EQ(characters_with("Zl"), (CharacterSet{{0x2028, 0x2028}}));
  for (const char* name : {"", "Foo", "X", "L&", "Lx", "Hanx", "_"})
    EXPECT_FALSE(characters_with(name)) << name;
}

TEST(Unicode, SetsOfCharacters) {
  const CharacterSet set = normalised({{'x', 'z'}, {'a', 'c'}, {'c', 'e'}, {0xD7FF, 0xE000}});
  EXPECT_EQ(set, (CharacterSet{{'a', 'e'}, {'x', 'z'}, {0xD7FF, 0xD7FF}, {0xE000, 0xE000}}));
  EXPECT_EQ(inverted(inverted(set)), set);
  EXPECT_EQ(inverted({{0, kLastCharacter}}), CharacterSet{});
  EXPECT_EQ(intersection(set, {{'c', 'x'}}), (CharacterSet{{'c', 'e'}, {'x', 'x'}}));
  for (const char32_t c : {U'a', U'e', U'x', char32_t{0xE000}}) EXPECT_TRUE(contains(set, c));
  for (const char32_t c : {U'`', U'f', U'w', char32_t{0xE001}}) EXPECT_FALSE(contains(set, c));
  EXPECT_FALSE(contains({}, 'a'));
}

TEST(Unicode, AtMost256KindsOfCharacters) {
  std::string pattern;
  const auto add = [&](int n) {
    for (int i = 0; i < n; ++i) pattern += utf8(U'一' + static_cast<char32_t>(pattern.size() / 3));
  };
  add(254);  // with "\n" and all others: 256
  int n = 0;
  PreTokenizer({{pattern}}).split(pattern + "x\n", [&](std::string_view) { ++n; });
  EXPECT_EQ(n, 2);
  add(1);
  EXPECT_THROW(PreTokenizer({{pattern}}), Error);
}

}  // namespace
}  // namespace tandem
