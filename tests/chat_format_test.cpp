// Where a chat template comes from, and whether a prompt ends within thinking.
#include "text/chat_format.h"

#include <gtest/gtest.h>

#include "tests/error_of.h"
#include "tests/repository.h"
#include "tests/temp_directory.h"

namespace tandem {
namespace {

using test::kTinyR1;

using Json = nlohmann::ordered_json;

class ChatFormatTest : public testing::Test {
 protected:
  // The prompt of one message, in text.
  std::string prompt() const {
    const Json messages = Json::array({{{"role", "user"}, {"content", "hi"}}});
    return tokenizer_.decode(ChatFormat(dir_.path(), tokenizer_).prompt(messages, {}));
  }
  std::string refusal() const {
    const std::string error = error_of([&] { prompt(); });
    return error.substr(std::min(error.size(), error.find(dir_.path()) + dir_.path().size()));
  }
  void write_config(const Json& chat_template) const {
    dir_.write("tokenizer_config.json", Json{{"chat_template", chat_template}}.dump());
  }

  const TempDirectory dir_;
  const Tokenizer tokenizer_ = Tokenizer::from_directory(kTinyR1);
};

TEST_F(ChatFormatTest, TheTemplateIsAFileOrPartOfTheConfiguration) {
  EXPECT_EQ(refusal(),
            " has no tokenizer_config.json with a chat template: use --raw for plain text");
  dir_.write("tokenizer_config.json", "{}");
  EXPECT_EQ(refusal(), "/tokenizer_config.json has no chat template: use --raw for plain text");
  dir_.write("tokenizer_config.json", "{");
  EXPECT_TRUE(says(error_of([&] { prompt(); }), dir_.file("tokenizer_config.json")));
  write_config("one {{ messages[0].content }}");
  EXPECT_EQ(prompt(), "one hi");
  write_config(Json::array({{{"name", "tools"}, {"template", "two"}},
                            {{"name", "default"}, {"template", "three"}},
                            {{"name", "rag"}, {"template", "four"}}}));
  EXPECT_EQ(prompt(), "three");
  write_config(Json::array({{{"name", "tools"}, {"template", "two"}}}));
  EXPECT_EQ(refusal(), "/tokenizer_config.json has no chat template: use --raw for plain text");
  dir_.write("chat_template.jinja", "five");
  EXPECT_EQ(prompt(), "five");
}

TEST_F(ChatFormatTest, ThinkingIsOpenAfterItsLastMark) {
  const int32_t open = *tokenizer_.added_id("<think>"), close = *tokenizer_.added_id("</think>");
  const auto opens = [&](std::vector<int32_t> prompt) {
    return opens_thinking(tokenizer_, prompt);
  };
  EXPECT_TRUE(opens({open}));
  EXPECT_TRUE(opens({open, 5, 6}));
  EXPECT_TRUE(opens({open, close, open}));
  EXPECT_FALSE(opens({open, close}));
  EXPECT_FALSE(opens({close, 5}));
  EXPECT_FALSE(opens({5, 6}));
  EXPECT_FALSE(opens({}));
}

TEST_F(ChatFormatTest, APlainPromptBeginsWithBos) {
  const std::vector<int32_t> ids = tokenizer_.encode("Let me");
  const std::vector<int32_t> prompt = raw_prompt(tokenizer_, "Let me");
  ASSERT_EQ(prompt.size(), ids.size() + 1);
  EXPECT_EQ(prompt[0], tokenizer_.bos());
  EXPECT_TRUE(std::equal(ids.begin(), ids.end(), prompt.begin() + 1));
}

}  // namespace
}  // namespace tandem
