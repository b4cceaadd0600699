#include "text/tokenizer.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <random>

#include "core/check.h"
#include "io/json.h"
#include "tests/error_of.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using Ids = std::vector<int32_t>;

const fs::path kVectors = fs::path(TANDEM_SOURCE_DIR) / "tests/data/tokenizer";
const fs::path kOfficial = fs::path(TANDEM_SOURCE_DIR) / "../shared/vectors";

json read_json(const fs::path& path) {
  std::ifstream file(path);
  return json::parse(file);
}

class SmallTokenizer : public testing::TestWithParam<const char*> {
 protected:
  const Tokenizer tokenizer_ = Tokenizer::from_directory(kVectors / GetParam());
  const json vectors_ = read_json(kVectors / GetParam() / "vectors.json");
};

INSTANTIATE_TEST_SUITE_P(All, SmallTokenizer, testing::Values("v3", "v2", "pairs", "kimi"),
                         [](const auto& instance) { return instance.param; });

TEST_P(SmallTokenizer, GivesTheIdsOfTheIndependentLibrary) {
  ASSERT_GT(vectors_.size(), 250u);
  for (const json& v : vectors_) {
    const auto text = v["text"].get<std::string>();
    EXPECT_EQ(tokenizer_.encode(text), v["ids"].get<Ids>()) << v["text"];
    EXPECT_EQ(tokenizer_.encode(text, {.added_tokens = false}), v["literal_ids"].get<Ids>())
        << v["text"];
  }
}

TEST_P(SmallTokenizer, Decodes) {
  for (const json& v : vectors_) {
    const Ids ids = v["ids"];
    EXPECT_EQ(tokenizer_.decode(ids), v["decoded"].get<std::string>());
    EXPECT_EQ(tokenizer_.decode(ids, true), v["decoded_without_special"].get<std::string>());
    EXPECT_EQ(tokenizer_.decode(tokenizer_.encode(v["text"].get<std::string>())),
              v["text"].get<std::string>());
  }
}

TEST_P(SmallTokenizer, StreamsWholeCharacters) {
  for (const json& v : vectors_) {
    StreamDecoder decoder(tokenizer_);
    std::string text;
    for (const int32_t id : v["ids"]) {
      const std::string piece = decoder.push(id);
      EXPECT_EQ(find_invalid_utf8(piece), std::string::npos);
      text += piece;
    }
    EXPECT_EQ(text + decoder.flush(), v["text"].get<std::string>());
  }
}

// Text in literal ranges is encoded as if it had no added tokens; the splits still see the whole
// text.
TEST_P(SmallTokenizer, LiteralRanges) {
  const std::string text = "<｜User｜>x<｜User｜>[BOS]y[BOS]";
  const ByteRange all[] = {{0, text.size()}};
  EXPECT_EQ(tokenizer_.encode(text, {.literal = all}),
            tokenizer_.encode(text, {.added_tokens = false}));
  const ByteRange nothing[] = {{0, 0}, {3, 3}, {text.size(), text.size()}};
  EXPECT_EQ(tokenizer_.encode(text, {.literal = {nothing, 1}}), tokenizer_.encode(text));
  const std::string token = tokenizer_.added_id("[BOS]")        ? "[BOS]"
                            : tokenizer_.added_id("<｜User｜>") ? "<｜User｜>"
                                                                : "ü";
  const int32_t id = *tokenizer_.added_id(token);
  const std::string twice = token + "x" + token;
  const auto count = [&](ByteRange range) {
    const Ids ids = tokenizer_.encode(twice, {.literal = {&range, 1}});
    return std::count(ids.begin(), ids.end(), id);
  };
  EXPECT_EQ(count({0, 0}), 2);
  EXPECT_EQ(count({0, token.size()}), 1);
  EXPECT_EQ(count({1, 2}), 1);  // one byte of a token is enough
  EXPECT_EQ(count({token.size(), token.size() + 1}), 2);
  EXPECT_EQ(count({token.size() - 1, token.size() + 2}), 0);
}

TEST_P(SmallTokenizer, EncodesLongRunsInLinearTime) {
  for (const char* unit :
       {" ", "a", "的", "か", "1", "=", "\n", "😀", "\u0301", "<", "<｜", "A", "'"}) {
    std::string text;
    while (text.size() < 300000) text += unit;
    text += "x";
    EXPECT_EQ(tokenizer_.decode(tokenizer_.encode(text)), text);
  }
}

class OfficialTokenizer : public testing::Test {
 protected:
  void SetUp() override {
    if (!fs::exists(directory_)) GTEST_SKIP() << directory_ << " is not there";
  }
  const fs::path directory_ = kOfficial / "deepseek_v3_tokenizer";
};

TEST_F(OfficialTokenizer, DeepSeekV3) {
  const Tokenizer tokenizer = Tokenizer::from_directory(directory_);
  EXPECT_EQ(tokenizer.vocab_size(), 128815);
  EXPECT_EQ(tokenizer.bos(), 0);
  EXPECT_EQ(tokenizer.stop_ids(), Ids{1});
  EXPECT_TRUE(tokenizer.add_bos());
  EXPECT_TRUE(tokenizer.is_special(128805));
  EXPECT_FALSE(tokenizer.is_special(128803));
  StreamDecoder decoder(tokenizer);
  EXPECT_EQ(decoder.push(73369), " ");
  EXPECT_EQ(decoder.push(238), "🌍");
}

// R1's file is V3's with names for two placeholder tokens.
TEST_F(OfficialTokenizer, DeepSeekR1) {
  json file = read_json(directory_ / "tokenizer.json");
  for (json& token : file["added_tokens"]) {
    if (token["id"] == 128798) token["content"] = "<think>";
    if (token["id"] == 128799) token["content"] = "</think>";
  }
  const Tokenizer tokenizer(parse_tokenizer_json(file), {});
  const json vectors = read_json(kOfficial / "tok_vectors_v3.json");
  ASSERT_EQ(vectors.size(), 48u);
  for (const json& v : vectors) {
    EXPECT_EQ(tokenizer.encode(v["text"].get<std::string>()), v["ids"].get<Ids>()) << v["text"];
    EXPECT_EQ(tokenizer.decode(v["ids"].get<Ids>()), v["text"].get<std::string>());
  }
}

// The definition of merging: find the best pair, merge it, start again.
Ids merge_slowly(const BpeVocabulary& vocabulary, std::string_view piece) {
  std::map<std::pair<int32_t, int32_t>, BpeMerge> merges;
  for (const BpeMerge& merge : vocabulary.merges) merges[{merge.left, merge.right}] = merge;
  Ids ids;
  for (const char c : piece)
    for (size_t id = 0; id < vocabulary.tokens.size(); ++id)
      if (vocabulary.tokens[id] == std::string(1, c)) ids.push_back(static_cast<int32_t>(id));
  while (true) {
    size_t best = ids.size();
    uint32_t rank = UINT32_MAX;
    for (size_t i = 0; i + 1 < ids.size(); ++i)
      if (const auto at = merges.find({ids[i], ids[i + 1]});
          at != merges.end() && at->second.rank < rank) {
        best = i;
        rank = at->second.rank;
      }
    if (best == ids.size()) return ids;
    ids[best] = merges[{ids[best], ids[best + 1]}].result;
    ids.erase(ids.begin() + static_cast<std::ptrdiff_t>(best) + 1);
  }
}

// Random vocabularies whose merges are in no trained order and may split characters.
TEST(Bpe, MergesAsTheDefinitionDoes) {
  std::mt19937 random(11);
  const std::vector<std::string> characters = {"a", "b", " ", "é", "的", "是", "一", "😀"};
  for (int trial = 0; trial < 60; ++trial) {
    BpeVocabulary vocabulary;
    for (int byte = 0; byte < 256; ++byte)
      vocabulary.tokens.emplace_back(1, static_cast<char>(byte));
    std::map<std::string, int32_t> ids;
    std::string corpus;
    for (int i = 0; i < 400; ++i) corpus += characters[random() % characters.size()];
    for (int i = 0; i < 256; ++i) ids[vocabulary.tokens[static_cast<size_t>(i)]] = i;
    for (uint32_t n_tries = 0; n_tries < 400; ++n_tries) {
      const std::string both = corpus.substr(random() % corpus.size(), 2 + random() % 5);
      const size_t cut = 1 + random() % std::max<size_t>(both.size() - 1, 1);
      if (both.size() < 2 || !ids.contains(both.substr(0, cut)) || !ids.contains(both.substr(cut)))
        continue;
      const auto [at, is_new] = ids.emplace(both, static_cast<int32_t>(vocabulary.tokens.size()));
      if (is_new) vocabulary.tokens.push_back(both);
      vocabulary.merges.push_back(
          {ids[both.substr(0, cut)], ids[both.substr(cut)], at->second, n_tries});
    }
    if (trial % 3 == 0) {  // ranked by id, as in tiktoken
      vocabulary.merges = merges_by_rank(vocabulary.tokens);
    } else {
      for (size_t i = vocabulary.merges.size(); i > 1; --i)
        std::swap(vocabulary.merges[i - 1].rank, vocabulary.merges[random() % i].rank);
    }
    const Bpe bpe(vocabulary);
    for (int i = 0; i < 60; ++i) {
      std::string piece;
      for (size_t n = 1 + random() % (i % 10 == 0 ? 200 : 12); n > 0; --n)
        piece += characters[random() % characters.size()];
      Ids fast;
      bpe.encode(piece, fast);
      ASSERT_EQ(fast, merge_slowly(vocabulary, piece)) << piece;
    }
  }
}

// If two tokens have the same bytes, a piece becomes the one that its merges result in.
TEST(Bpe, APieceIsTheTokenOfItsMerges) {
  BpeVocabulary vocabulary;
  for (int byte = 0; byte < 256; ++byte) vocabulary.tokens.emplace_back(1, static_cast<char>(byte));
  vocabulary.tokens.insert(vocabulary.tokens.end(), {"ab", "ab"});
  for (const int32_t result : {256, 257}) {
    vocabulary.merges = {{'a', 'b', result, 0}};
    Ids ids;
    Bpe(vocabulary).encode("ab", ids);
    EXPECT_EQ(ids, Ids{result});
  }
}

// Cuts between other characters are allowed even when these begin with the same byte.
TEST(BpeBoundaryFilter, KnowsWholeCharacters) {
  BpeBoundaryFilter filter(1000);
  for (const char* token : {"的é", "é一"}) filter.add(token);
  const auto may_merge = [&](char32_t left, char32_t right, unsigned char lead) {
    return filter.may_merge(left, right, lead);
  };
  EXPECT_TRUE(may_merge(U'的', U'é', 0xC3));
  EXPECT_TRUE(may_merge(U'é', U'一', 0xE4));
  EXPECT_FALSE(may_merge(U'的', U'ê', 0xC3));
  EXPECT_FALSE(may_merge(U'ê', U'一', 0xE4));
}

TEST(Bpe, IgnoreMergesTakesAWholePieceAsItIs) {
  BpeVocabulary vocabulary;
  for (int byte = 0; byte < 256; ++byte) vocabulary.tokens.emplace_back(1, static_cast<char>(byte));
  vocabulary.tokens.insert(vocabulary.tokens.end(), {"ab", "的是"});
  const auto encode = [&](bool ignore_merges, std::string_view piece) {
    vocabulary.ignore_merges = ignore_merges;
    Ids ids;
    Bpe(vocabulary).encode(piece, ids);
    return ids;
  };
  EXPECT_EQ(encode(true, "ab"), Ids{256});
  EXPECT_EQ(encode(true, "abc"), (Ids{'a', 'b', 'c'}));
  EXPECT_EQ(encode(true, "的是"), Ids{257});
  EXPECT_EQ(encode(true, "一的是").size(), 9u);
  EXPECT_EQ(encode(false, "ab"), (Ids{'a', 'b'}));
}

// The pieces of `text`, joined by "|".
std::string split(const std::string& pattern, std::string_view text, bool remove = false) {
  std::string out;
  PreTokenizer({{pattern, remove}}).split(text, [&](std::string_view piece) {
    out.append(out.empty() ? "" : "|").append(piece);
  });
  return out;
}

TEST(SplitPattern, MeansWhatOnigurumaMeans) {
  EXPECT_EQ(split(R"(\s+)", "a\u180Eb c\u3000\x0B"),
            "a\u180Eb| |c|\u3000\x0B");  // U+180E is no space
  EXPECT_EQ(split(R"([^\S\n]+)", "a \n b"), "a| |\n| |b");
  EXPECT_EQ(split(R"(\p{Han}+)", "一、二"), "一|、|二");  // U+3001 is common to several scripts
  EXPECT_EQ(split(R"([\p{Lu}\p{Lo}&&[^\p{Han}]]+)", "xAB一か"), "x|AB|一|か");
  EXPECT_EQ(split(R"([가-\uD7FF]+)", "a각\uD7A3b"), "a|각\uD7A3|b");
  EXPECT_EQ(split(R"((?i:'s))", "a'S'ſb"), "a|'S|'ſ|b");
  EXPECT_EQ(split(R"(\v)", "a\x0B\nb"), "a|\x0B|\nb");
  EXPECT_EQ(split(R"([x^])", "a^b"), "a|^|b");
  EXPECT_EQ(split(R"(\s+(?!\S))", "a  b "), "a| | b| ");
  EXPECT_EQ(split(R"(x*)", "axb"), "a|x|b");  // an empty match splits and consumes nothing
  EXPECT_EQ(split(R"( )", "a b  c", true), "a|b|c");
  EXPECT_EQ(split(R"(\p{^L}+)", "a1b"), "a|1|b");
  EXPECT_EQ(split(R"(.+)", "a\r\nb"), "a\r|\n|b");
  EXPECT_EQ(split(R"(^a|x$)", "a\nax\nxa"), "a|\n|a|x|\nxa");
  EXPECT_EQ(split(R"([--/]+)", ",-./0"), ",|-./|0");
  EXPECT_EQ(split(R"([a-c-e]+)", "db-ef"), "d|b-e|f");
  EXPECT_EQ(split(R"([ab-]+)", "a-bc"), "a-b|c");
  EXPECT_EQ(split(R"([\x{61}-\x{63}\u0064]+)", "xabcde"), "x|abcd|e");
}

TEST(SplitPattern, HasOnigurumasSetsOfSets) {
  EXPECT_EQ(split(R"([[ab]c]+)", "abcd"), "abc|d");
  EXPECT_EQ(split(R"([^a[b]]+)", "abcd"), "ab|cd");
  EXPECT_EQ(split(R"([a-d&&[^b]]+)", "abcde"), "a|b|cd|e");
  EXPECT_EQ(split(R"([ab&&bc]+)", "abc"), "a|b|c");
  EXPECT_EQ(split(R"([^a-y&&[^b]]+)", "abz"), "a|bz");
  EXPECT_EQ(split(R"([\p{L}&&\p{Lu}&&[^A]]+)", "aABC"), "aA|BC");
}

TEST(SplitPattern, IgnoresCase) {
  EXPECT_EQ(split(R"((?i:[k-s]x)y)", "kXy\u212AxysxY\u017Fxy"), "kXy|\u212Axy|sxY|\u017Fxy");
  EXPECT_EQ(split(R"((?i:a(b)\x{63})d)", "aBCdabcD"), "aBCd|abcD");
}

TEST(SplitPattern, TheLinearFormOfSpacesAtTheEndIsTheSame) {
  std::mt19937 random(3);
  for (int trial = 0; trial < 5000; ++trial) {
    std::string text;
    for (size_t n = random() % 9; n > 0; --n) text += " \n\ta\r"[random() % 5];
    EXPECT_EQ(split(R"(\s+$)", text), split(R"((?:\s+)$)", text)) << shown(std::string_view(text));
  }
}

TEST(SplitPattern, TakesMoreMemoryForALongText) {
  const std::string text(1000000, 'a');
  EXPECT_EQ(split(R"((?:\p{L}|\p{N}x)+)", text), text);
}

TEST(SplitPattern, AFailedMatchNamesThePatternAndTheCause) {
  const std::vector<SplitPattern> patterns = {parse_oniguruma("a+")};
  const SymbolTable symbols(patterns);
  const Regex regex(patterns[0], symbols);
  const auto find = [&](size_t start) {
    return error_of([&] { RegexMatcher(regex).find(symbols.symbols_of("ba"), start); });
  };
  EXPECT_EQ(find(2), "no error");
  EXPECT_EQ(find(3), "the split pattern \"a+\" cannot split this text: bad offset value");
}

TEST(SplitPattern, RefusesWhatCouldMeanSomethingElse) {
  for (const char* pattern :
       {"\\w",         "\\b",         "\\h",     "\\R",       "\\X",        "\\K",     "\\1",
        "(?<a>b)",     "(?m)a",       "(*UTF)",  "a{,3}",     "a{1}+",      "a{2}?",   "{",
        "[[a]",        "[[:alpha:]]", "[]",      "[a",        "\\p{Foo}",   "\\p{L&}", "\\pL",
        "\\x41",       "\\u12",       "(",       "a)",        "[a&&]",      "[&&a]",   "[a-\\d]",
        "\\",          "+",           "[z-a]",   "\xFF",      "[\\d-a]",    "[a[]]",   "\\uD800",
        "\\x{110000}", "(?i:é)",      "(?i:ss)", "(?i:[^a])", "(?i:\\p{L})"}) {
    try {
      PreTokenizer pre_tokenizer({{pattern}});
      ADD_FAILURE() << pattern << " was taken";
    } catch (const Error& error) {
      EXPECT_EQ(std::string_view(error.what()).find('\n'), std::string_view::npos) << error.what();
    }
  }
}

}  // namespace
}  // namespace tandem
