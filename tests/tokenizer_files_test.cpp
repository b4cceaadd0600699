// Invalid and unusual tokenizer files: one clear error each, or the right result.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <functional>

#include "cli/conversation.h"
#include "core/check.h"
#include "io/json.h"
#include "text/tokenizer.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using Ids = std::vector<int32_t>;

const fs::path kTokenizers = fs::path(TANDEM_SOURCE_DIR) / "tests/data/tokenizer";

json small(const char* name) {
  std::ifstream file(kTokenizers / name / "tokenizer.json");
  return json::parse(file);
}

// A directory that is removed with the object.
class Directory {
 public:
  Directory()
      : path_(fs::path(testing::TempDir()) /
              ("tokenizer_files_test_" + std::to_string(::getpid()))) {
    fs::remove_all(path_);
    fs::create_directories(path_);
  }
  ~Directory() { fs::remove_all(path_); }
  Directory(const Directory&) = delete;
  Directory& operator=(const Directory&) = delete;

  void write(const char* name, const std::string& text) const {
    std::ofstream(path_ / name, std::ios::binary) << text;
  }
  const fs::path& path() const { return path_; }

 private:
  fs::path path_;
};

// The message of the Error that `act` throws, which must be one line.
std::string error_of(const std::function<void()>& act) {
  try {
    act();
  } catch (const Error& error) {
    EXPECT_EQ(std::string_view(error.what()).find('\n'), std::string_view::npos) << error.what();
    return error.what();
  }
  return "no error";
}

struct BadFile {
  std::function<void(json&)> spoil;
  const char* message;  // a part of the message
};

TEST(TokenizerJson, NamesWhatIsMissingOrNotSupported) {
  const std::vector<BadFile> cases = {
      {[](json& f) { f = json::array(); }, "an object with \"model\""},
      {[](json& f) { f.erase("model"); }, "\"model\" must be an object"},
      {[](json& f) { f["model"]["type"] = "Unigram"; }, "the model type \"Unigram\""},
      {[](json& f) { f["model"].erase("vocab"); }, "\"vocab\" must be an object"},
      {[](json& f) { f["model"].erase("merges"); }, "\"merges\" must be an array"},
      {[](json& f) { f["model"]["dropout"] = 0.1; }, "\"dropout\" 0.1"},
      {[](json& f) { f["model"]["byte_fallback"] = true; }, "\"byte_fallback\""},
      {[](json& f) { f["model"]["continuing_subword_prefix"] = "##"; },
       "\"continuing_subword_prefix\" \"##\""},
      {[](json& f) { f["model"]["end_of_word_suffix"] = "</w>"; }, "\"end_of_word_suffix\""},
      {[](json& f) { f["model"]["ignore_merges"] = 1; }, "\"ignore_merges\" must be true or false"},
      {[](json& f) { f["model"]["vocab"].erase("a"); }, "\"a\", which is not in the vocabulary"},
      {[](json& f) { f["model"]["merges"] = json::array(), f["model"]["vocab"].erase("a"); },
       "no token for the single byte 0x61"},
      {[](json& f) { f["model"]["vocab"]["a"] = 5; }, "two tokens have the id 5"},
      {[](json& f) { f["model"]["vocab"]["a"] = -1; },
       "the id of the token \"a\" must be a number from 0 to 1048575, not -1"},
      {[](json& f) { f["model"]["vocab"]["a"] = 1e18; }, "the id of the token \"a\""},
      {[](json& f) { f["model"]["vocab"]["a"] = 18446744073709551615u; },
       "not 18446744073709551615"},
      {[](json& f) { f["model"]["vocab"]["a"] = "7"; }, "not \"7\""},
      {[](json& f) { f["model"]["vocab"]["日"] = 7000; },
       "\"日\" is not in the byte-level alphabet"},
      {[](json& f) { f["model"]["merges"][3] = "ab"; }, "merge 3 \"ab\" must be two tokens"},
      {[](json& f) { f["model"]["merges"][3] = "a b c"; }, "merge 3"},
      {[](json& f) { f["model"]["merges"][3] = "a  b"; }, "merge 3 \"a  b\" must be two tokens"},
      {[](json& f) { f["model"]["merges"][3] = {"a"}; }, "merge 3 must be"},
      {[](json& f) { f["model"]["merges"][3] = 5; }, "merge 3 must be a string or two strings"},
      {[](json& f) {
         f["model"]["merges"][3] = {"a", "b", "c"};
       },
       "merge 3 must be"},
      {[](json& f) {
         f["model"]["merges"][3] = {"a", 1};
       },
       "merge 3 must be"},
      {[](json& f) {
         f["model"]["merges"][3] = {1, "a"};
       },
       "merge 3 must be"},
      {[](json& f) {
         f["model"]["merges"][3] = {"a", "\n\n"};
       },
       "\"\\n\\n\", which is not in the vocabulary"},
      {[](json& f) {
         f["normalizer"] = {{"type", "NFC"}};
       },
       "the normalizer {\"type\":\"NFC\"}"},
      {[](json& f) { f["decoder"] = nullptr; }, "\"decoder\" must be an object"},
      {[](json& f) { f["decoder"]["type"] = "Metaspace"; }, "the decoder \"Metaspace\""},
      {[](json& f) { f["pre_tokenizer"] = nullptr; }, "\"pre_tokenizer\" must be an object"},
      {[](json& f) { f["pre_tokenizer"]["pretokenizers"] = json::array(); }, "empty sequence"},
      {[](json& f) { f["pre_tokenizer"]["pretokenizers"].erase(3); },
       "must be ByteLevel; this one is \"Split\""},
      {[](json& f) { f["pre_tokenizer"]["pretokenizers"][3]["add_prefix_space"] = true; },
       "\"add_prefix_space\""},
      {[](json& f) { f["pre_tokenizer"]["pretokenizers"][3].erase("use_regex"); }, "\"use_regex\""},
      {[](json& f) {
         f["pre_tokenizer"]["pretokenizers"][0] = {{"type", "Whitespace"}};
       },
       "the pre-tokenizer \"Whitespace\""},
      {[](json& f) { f["pre_tokenizer"]["pretokenizers"][0]["behavior"] = "MergedWithNext"; },
       "\"MergedWithNext\""},
      {[](json& f) { f["pre_tokenizer"]["pretokenizers"][0]["invert"] = true; }, "\"invert\""},
      {[](json& f) {
         f["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {{"String", "a"}};
       },
       "\"Regex\" must be a string"},
      {[](json& f) { f["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = "(a\n"; },
       "\"(a\\n\" is invalid"},
      {[](json& f) { f["added_tokens"] = 3; }, "\"added_tokens\" must be an array"},
      {[](json& f) { f["added_tokens"][0].erase("id"); },
       "the id of the token \"<｜begin▁of▁sentence｜>\""},
      {[](json& f) { f["added_tokens"][0]["content"] = ""; }, "the added token 0 is empty"},
      {[](json& f) { f["added_tokens"][0]["content"] = "other"; },
       "the id 0 is \"<｜begin▁of▁sentence｜>\" in the vocabulary but \"other\""},
      {[](json& f) { f["added_tokens"][1]["id"] = 0; }, "have the same id 0"},
      {[](json& f) { f["added_tokens"][1]["lstrip"] = true; },
       "\"lstrip\", which is not supported"},
      {[](json& f) { f["added_tokens"][1]["single_word"] = true; },
       "\"single_word\", which is not supported"},
  };
  for (const BadFile& bad : cases) {
    json file = small("v3");
    bad.spoil(file);
    const std::string message = error_of([&] { Tokenizer(parse_tokenizer_json(file), {}); });
    EXPECT_NE(message.find(bad.message), std::string::npos)
        << "expected " << bad.message << "\n     got " << message;
  }
}

TEST(TokenizerJson, DigitsAreASplit) {
  json file = small("v2");
  EXPECT_EQ(parse_tokenizer_json(file).splits.back().pattern,
            R"([\p{N}\x{11DE0}-\x{11DE9}\x{16FF4}-\x{16FF6}])");
  file["pre_tokenizer"]["pretokenizers"][5]["individual_digits"] = false;
  EXPECT_EQ(parse_tokenizer_json(file).splits.back().pattern,
            R"([\p{N}\x{11DE0}-\x{11DE9}\x{16FF4}-\x{16FF6}]+)");
}

TEST(TokenizerJson, IdsMayHaveHoles) {
  json file = small("v3");
  file["added_tokens"].push_back({{"id", 900}, {"content", "<late>"}, {"special", false}});
  const Tokenizer without(parse_tokenizer_json(small("v3")), {});
  const Tokenizer tokenizer(parse_tokenizer_json(file), {});
  EXPECT_TRUE(without.holes().empty());
  EXPECT_EQ(tokenizer.vocab_size(), 901);
  EXPECT_EQ(tokenizer.encode("a<late>").back(), 900);
  EXPECT_TRUE(tokenizer.has_token(900));
  ASSERT_FALSE(tokenizer.holes().empty());
  EXPECT_EQ(tokenizer.holes().front(), without.vocab_size());
  EXPECT_EQ(tokenizer.holes().back(), 899);
  EXPECT_EQ(tokenizer.holes().size(), 900u - without.vocab_size());
  EXPECT_EQ(vocabulary_of(tokenizer, 1000).size, 901);
  EXPECT_EQ(vocabulary_of(tokenizer, 1000).holes, tokenizer.holes());
  EXPECT_EQ(vocabulary_of(tokenizer, 890).size, 890);
  EXPECT_EQ(vocabulary_of(tokenizer, 890).holes.back(), 889);
  for (const int32_t id : {-1, 899, 901, INT32_MAX}) {
    EXPECT_FALSE(tokenizer.has_token(id));
    EXPECT_EQ(StreamDecoder(tokenizer).push(id), "");
    EXPECT_NE(error_of([&] { tokenizer.decode(Ids{id}); }).find("is not a token"),
              std::string::npos);
  }
}

// A token that no merge makes is found only where a whole piece is looked up first.
TEST(TokenizerJson, MergesAreIgnoredOnlyOnRequest) {
  json file = small("v3");
  file["model"].erase("ignore_merges");
  json& vocabulary = file["model"]["vocab"];
  const int id = static_cast<int>(vocabulary.size() + file["added_tokens"].size()) + 100;
  vocabulary["qzqzq"] = id;
  const auto ids = [&] { return Tokenizer(parse_tokenizer_json(file), {}).encode("qzqzq"); };
  const Ids merged = ids();
  EXPECT_EQ(std::count(merged.begin(), merged.end(), id), 0);
  file["model"]["ignore_merges"] = true;
  EXPECT_EQ(ids(), Ids{id});
  file["model"]["ignore_merges"] = false;
  EXPECT_EQ(ids(), merged);
}

TEST(TokenizerJson, TextMayHoldTheZeroCharacter) {
  for (const char* name : {"v2", "v3"}) {
    const Tokenizer tokenizer(parse_tokenizer_json(small(name)), {});
    for (const std::string& text : {std::string(1, '\0'), std::string("a\0b 1\0 c", 8)})
      EXPECT_EQ(tokenizer.decode(tokenizer.encode(text)), text) << name;
  }
}

// Tokens of every length are found by their bytes, and only by all of them.
TEST(TokenizerJson, TokensThatDifferInOneByteAreDistinct) {
  const std::string letters = "abcdefghijklmnopqrstuvwx";
  json file = small("v3");
  file["model"]["ignore_merges"] = true;
  json& vocabulary = file["model"]["vocab"];
  const int first_id = static_cast<int>(vocabulary.size() + file["added_tokens"].size());
  for (int length = 4; length <= 24; ++length)
    vocabulary["q" + letters.substr(0, length - 1)] = first_id + length;
  const Tokenizer tokenizer(parse_tokenizer_json(file), {});
  for (int length = 4; length <= 24; ++length) {
    const std::string word = "q" + letters.substr(0, length - 1);
    EXPECT_EQ(tokenizer.encode(word), Ids{first_id + length});
    for (int at = 0; at < length; ++at) {
      std::string other = word;
      other[at] = 'z';
      EXPECT_EQ(tokenizer.decode(tokenizer.encode(other)), other);
    }
  }
}

TEST(TokenizerJson, InvalidUtf8NamesItsByte) {
  const Tokenizer tokenizer = Tokenizer::from_directory(kTokenizers / "v3");
  const std::string message = error_of([&] { tokenizer.encode("abc\xFFz"); });
  EXPECT_EQ(message, "the text is not valid UTF-8 at byte 3 of 5: convert it to UTF-8");
  EXPECT_EQ(tokenizer.encode(""), Ids{});
}

TEST(TokenizerDirectory, ReadsTheTokensOfTheConfigurations) {
  Directory directory;
  directory.write("tokenizer.json", small("v3").dump());
  EXPECT_EQ(Tokenizer::from_directory(directory.path()).bos(), std::nullopt);
  EXPECT_FALSE(Tokenizer::from_directory(directory.path()).add_bos());
  directory.write(
      "tokenizer_config.json",
      R"({"add_bos_token":true,"bos_token":{"content":"<｜begin▁of▁sentence｜>"},"eos_token":"<|EOT|>","pad_token":null})");
  directory.write("generation_config.json", R"({"eos_token_id":[1,7]})");
  directory.write("config.json", R"({"eos_token_id":1,"x":[{"y":1}]})");
  const Tokenizer tokenizer = Tokenizer::from_directory(directory.path());
  EXPECT_EQ(tokenizer.bos(), 0);
  EXPECT_EQ(tokenizer.eos(), tokenizer.added_id("<|EOT|>"));
  EXPECT_EQ(tokenizer.stop_ids(), (Ids{1, 7, *tokenizer.eos()}));
  EXPECT_EQ(tokenizer.config().pad_token, std::nullopt);
  const Tokenizer kimi = Tokenizer::from_directory(kTokenizers / "kimi");
  EXPECT_EQ(kimi.stop_ids(), (Ids{*kimi.added_id("[EOS]"), *kimi.added_id("<|im_end|>")}));
}

TEST(TokenizerDirectory, ErrorsNameTheFile) {
  Directory directory;
  const auto message = [&] {
    return error_of([&] { Tokenizer::from_directory(directory.path()); });
  };
  EXPECT_NE(message().find("is empty: name the folder of a checkpoint"), std::string::npos);
  directory.write("config.json", "{}");
  EXPECT_NE(message().find("has no tokenizer.json and no tiktoken.model"), std::string::npos);
  directory.write("tokenizer.json", "{\"model\": ");
  EXPECT_NE(message().find("tokenizer.json: "), std::string::npos) << message();
  directory.write("tokenizer.json", std::string(100000, '['));
  EXPECT_NE(message().find("tokenizer.json: "), std::string::npos) << message();
  directory.write("tokenizer.json", small("v3").dump());
  for (const auto& [config, part] : std::vector<std::pair<const char*, const char*>>{
           {"[]", "tokenizer_config.json: an object with"},
           {R"({"add_bos_token":"yes"})", "\"add_bos_token\" must be true or false"},
           {R"({"bos_token":5})", "\"bos_token\" must be a string"},
           {R"({"bos_token":{"text":"a"}})", "\"content\" must be a string"},
           {R"({"eos_token":"</s>"})", "names the token \"</s>\""},
           {R"({"added_tokens_decoder":{"x":{"content":"a"}}})", "the key \"x\""}}) {
    directory.write("tokenizer_config.json", config);
    EXPECT_NE(message().find(part), std::string::npos) << message();
  }
  directory.write("tokenizer_config.json", "{}");
  directory.write("generation_config.json", R"({"eos_token_id":[-3]})");
  EXPECT_NE(message().find("generation_config.json: the id"), std::string::npos) << message();
}

TEST(Tiktoken, TakesAWholePieceThatNothingMergesInto) {
  TokenizerParts parts = parse_tiktoken("YQ== 0\nYg== 1\nYWJh 2\n", {});  // a, b, aba
  EXPECT_TRUE(parts.vocabulary.merges.empty());
  for (int byte = 0; byte < 256; ++byte)
    if (byte != 'a' && byte != 'b')
      parts.vocabulary.tokens.emplace_back(1, static_cast<char>(byte));
  const Tokenizer tokenizer(parts, {});
  EXPECT_EQ(tokenizer.encode("aba"), Ids{2});
  EXPECT_EQ(tokenizer.encode("abab"), (Ids{0, 1, 0, 1}));
}

TEST(Tiktoken, NamesTheLineThatIsBroken) {
  for (const auto& [file, part] : std::vector<std::pair<std::string, const char*>>{
           {"", "it has no tokens"},
           {"YQ==\n", "line 1 is not"},
           {"YQ== 0\nYg== x\n", "line 2: the rank"},
           {"YQ== 0\nYg== -1\n", "line 2: the rank"},
           {"YQ== 0\nYg== 4000000000\n", "line 2: the rank"},
           {"YQ== 0\nY!== 1\n", "line 2 is not base64"},
           {"YQ== 0\n= 1\n", "line 2: a token must have from 1"},
           {"YQ== 0\nYg== 0\n", "line 2: the rank 0 occurs twice"},
           {"YQ== 0\nYQ== 1\n", "the token of rank 1 occurs twice"},
           {"YQ== 0\nYg== 2\n", "the rank 1 is missing"},
           {"YQ== 0\nYg== 1\n", "no token for the single byte"}}) {
    const std::string message =
        error_of([&, text = file] { Tokenizer(parse_tiktoken(text, {}), {}); });
    EXPECT_NE(message.find(part), std::string::npos) << message;
  }
  EXPECT_NE(error_of([&] {
              parse_tiktoken("YQ== 0\n", {{0, "<x>"}});
            }).find("has the id of a rank"),
            std::string::npos);
}

}  // namespace
}  // namespace tandem
