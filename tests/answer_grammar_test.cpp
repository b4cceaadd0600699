// Grammars of whole answers: the form that a client requires, and what may precede it.
#include "server/answer_grammar.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "io/json.h"
#include "server/tool_calls.h"
#include "tests/grammar_texts.h"
#include "tests/temp_directory.h"

namespace tandem::test {
namespace {

// tiny-r1's tokenizer without the tokens of tool calls, whose markers are then text.
Tokenizer tokenizer_without_markers() {
  const std::string from = TANDEM_SOURCE_DIR "/models/tiny-r1";
  auto json = nlohmann::ordered_json::parse(read_text_file(from + "/tokenizer.json", 1 << 24));
  auto others = nlohmann::ordered_json::array();
  for (const auto& token : json["added_tokens"])
    if (token["content"].get<std::string>().find("tool") == std::string::npos)
      others.push_back(token);
  json["added_tokens"] = others;
  const TempDirectory dir;
  dir.write("tokenizer.json", json.dump());
  for (const char* name : {"tokenizer_config.json", "config.json"})
    dir.write(name, read_text_file(from + "/" + name, 1 << 24));
  return Tokenizer::from_directory(dir.path());
}

// Without a chat template that writes code blocks, calls have V3.1's form.
TEST(AnswerGrammar, CallsWithoutCodeBlocks) {
  const Tokenizer t = tokenizer_without_markers();
  AnswerGrammars grammars(t, nullptr);
  GenerationRequest request;
  request.requires_tool_call = true;
  request.tools = nlohmann::ordered_json::parse(R"([
      {"type": "function", "function": {"name": "add", "parameters": {"type": "integer"}}},
      {"type": "function", "function": {"name": "now"}}])");
  const ToolCallMarkers& m = kDeepSeekMarkers;
  const auto call = [&](const std::string& name, const std::string& arguments) {
    return fmt::format("{}{}{}{}{}", m.call_begin, name, m.separator, arguments, m.call_end);
  };
  const auto section = [&](const std::string& calls) {
    return fmt::format("{}{}{}", m.section_begin, calls, m.section_end);
  };
  const std::string add = call("add", "17"), now = call("now", "{}");
  const auto takes = [&](const std::string& text) {
    return accepts(grammars.get(request, false)->grammar(), text);
  };
  EXPECT_TRUE(takes(section(add)));
  EXPECT_TRUE(takes(section(now)));
  EXPECT_TRUE(takes(section(add + now + add)));
  EXPECT_FALSE(takes(section("")));
  EXPECT_FALSE(takes(add));
  EXPECT_FALSE(takes(section(call("add", "{}"))));
  EXPECT_FALSE(takes(section(call("now", "17"))));
  EXPECT_FALSE(takes(section(call("sub", "17"))));
  EXPECT_FALSE(takes(section(add + "\n" + now)));
  request.allows_parallel_calls = false;
  EXPECT_TRUE(takes(section(add)));
  EXPECT_FALSE(takes(section(add + now)));
  request.allows_parallel_calls = true;
  request.required_tool = "add";
  EXPECT_TRUE(takes(section(add)));
  EXPECT_FALSE(takes(section(now)));
  EXPECT_FALSE(takes(section(add + add)));
}

TEST(AnswerGrammar, UpToTwoLineBreaksFollowThinking) {
  AnswerGrammars grammars(tokenizer(), nullptr);
  GenerationRequest request;
  request.response_format.kind = ResponseFormat::Kind::kSchema;
  request.response_format.schema = {{"type", "integer"}};
  const auto alone = grammars.get(request, false), after = grammars.get(request, true);
  const std::string line = "\n";
  for (int n = 0; n < 4; ++n) {
    std::string text;
    for (int i = 0; i < n; ++i) text += line;
    text += "17";
    EXPECT_EQ(accepts(alone->grammar(), text), n == 0) << n;
    EXPECT_EQ(accepts(after->grammar(), text), n <= 2) << n;
  }
  EXPECT_FALSE(accepts(after->grammar(), line + line));
}

TEST(AnswerGrammar, AFreeAnswerHasNone) {
  AnswerGrammars grammars(tokenizer(), nullptr);
  EXPECT_EQ(grammars.get({}, false), nullptr);
  EXPECT_EQ(grammars.get({}, true), nullptr);
}

// Requests with the same form and the same position of it share one grammar object; all others have
// different ones.
TEST(AnswerGrammar, IsKeptForTheNextRequest) {
  AnswerGrammars grammars(tokenizer(), nullptr);
  GenerationRequest one, two;
  one.response_format.kind = two.response_format.kind = ResponseFormat::Kind::kPattern;
  one.response_format.pattern = "[ab]+";
  two.response_format.pattern = "[ac]+";
  const auto first = grammars.get(one, false);
  EXPECT_EQ(grammars.get(one, false), first);
  EXPECT_NE(grammars.get(one, true), first);
  EXPECT_TRUE(accepts(grammars.get(two, false)->grammar(), "caac"));
  EXPECT_FALSE(accepts(first->grammar(), "caac"));
  EXPECT_EQ(grammars.get(one, false), first);
}

// The 32 last used ones, fewer if they have more than 500,000 nodes together.
TEST(AnswerGrammar, TheLastUsedAreKept) {
  AnswerGrammars grammars(tokenizer(), nullptr);
  const auto get = [&](const std::string& pattern) {
    GenerationRequest request;
    request.response_format.kind = ResponseFormat::Kind::kPattern;
    request.response_format.pattern = pattern;
    return grammars.get(request, false);
  };
  const auto small = [&](int i) { return get(fmt::format("[ab]{{{}}}", i + 1)); };
  std::vector<std::weak_ptr<const GrammarTokens>> kept;
  for (int i = 0; i < 32; ++i) kept.emplace_back(small(i));
  EXPECT_TRUE(std::none_of(kept.begin(), kept.end(), [](const auto& k) { return k.expired(); }));
  EXPECT_EQ(small(0), kept[0].lock()) << "now the last used one";
  kept.emplace_back(small(32));
  for (int i = 0; i < 33; ++i) EXPECT_EQ(kept[i].expired(), i == 1) << i;

  const auto large = [&](char c) {
    GenerationRequest request;
    request.response_format.kind = ResponseFormat::Kind::kChoice;
    request.response_format.choices = {std::string(80'000, c)};
    return grammars.get(request, false);
  };
  const int n_nodes = large('a')->grammar().n_nodes();
  ASSERT_GT(n_nodes, 80'000);
  const int room = 500'000 / n_nodes;
  kept.clear();
  for (int i = 0; i <= room; ++i) kept.emplace_back(large(static_cast<char>('b' + i)));
  for (int i = 0; i <= room; ++i) EXPECT_EQ(kept[i].expired(), i == 0) << i;
}

}  // namespace
}  // namespace tandem::test
