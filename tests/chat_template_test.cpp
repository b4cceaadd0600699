// Chat templates of the family against the texts of Python's Jinja (tests/chat_template_test.py),
// against the formats written out here, and the ranges of what users wrote.
#include "io/chat_template.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>

#include "core/check.h"

namespace tandem {
namespace {

using Json = nlohmann::ordered_json;

const std::filesystem::path kRoot = TANDEM_SOURCE_DIR;
const std::filesystem::path kData = kRoot / "tests/data/templates";
const std::filesystem::path kPublishedV3 =
    kRoot.parent_path() / "shared/vectors/deepseek_v3_tokenizer/tokenizer_config.json";

std::string read(const std::filesystem::path& path) {
  std::ifstream file(path);
  require(file.is_open(), "{} is missing", path.string());
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

ChatTemplate load(const std::string& name) {
  if (name == "models/tiny-r1" || name == "DeepSeek-V3 as published") {
    const auto path =
        name == "models/tiny-r1" ? kRoot / name / "tokenizer_config.json" : kPublishedV3;
    return ChatTemplate(Json::parse(read(path))["chat_template"].get<std::string>());
  }
  return ChatTemplate(read(kData / name));
}

ChatOptions options_of(const Json& conversation, bool add_generation_prompt) {
  ChatOptions options{.add_generation_prompt = add_generation_prompt,
                      .bos_token = "<｜begin▁of▁sentence｜>",
                      .eos_token = "<｜end▁of▁sentence｜>"};
  if (conversation.contains("tools")) options.tools = conversation["tools"];
  if (conversation.contains("extra")) options.extra = conversation["extra"];
  return options;
}

// Compares all conversations with the committed texts; with and without generation prompt.
void compare_with_python(const std::string& name) {
  const ChatTemplate chat_template = load(name);
  const Json expected = Json::parse(read(kData / "expected.json"))[name];
  ASSERT_FALSE(expected.is_null()) << "run tests/chat_template_test.py --write";
  for (const Json& conversation : Json::parse(read(kData / "conversations.json"))) {
    const auto title = conversation["name"].get<std::string>();
    for (const bool prompt : {true, false}) {
      const Json& wanted = expected[title][prompt ? 0 : 1];
      const ChatOptions options = options_of(conversation, prompt);
      if (wanted.is_null()) {
        EXPECT_THROW(render_chat(chat_template, conversation["messages"], options), Error) << title;
        continue;
      }
      const auto chat = render_chat_with_ranges(chat_template, conversation["messages"], options);
      EXPECT_EQ(chat.text, wanted.get<std::string>()) << title;
      EXPECT_TRUE(chat.has_ranges) << title;
    }
  }
}

class ChatTemplates : public testing::TestWithParam<const char*> {};
TEST_P(ChatTemplates, GiveWhatPythonGives) { compare_with_python(GetParam()); }
INSTANTIATE_TEST_SUITE_P(Family, ChatTemplates,
                         testing::Values("deepseek_v2.jinja", "deepseek_v2_5.jinja",
                                         "deepseek_v3.jinja", "deepseek_r1.jinja",
                                         "deepseek_v3_1.jinja", "kimi_k2.jinja", "models/tiny-r1"));

TEST(ChatTemplate, PublishedV3GivesWhatPythonGives) {
  if (!std::filesystem::exists(kPublishedV3))
    GTEST_SKIP() << "needs " << kPublishedV3 << ", which is not part of the repository";
  compare_with_python("DeepSeek-V3 as published");
}

std::string render(const std::string& name, const Json& messages,
                   const Json& extra = Json::object()) {
  return render_chat(load(name), messages, options_of({{"extra", extra}}, true));
}

// The formats as the models' makers describe them, not as any template engine writes them.
TEST(ChatTemplate, FormatsWrittenOut) {
  const Json chat = Json::parse(R"([{"role":"system","content":"S"},{"role":"user","content":"u"},
      {"role":"assistant","content":"<think>t</think>a"},{"role":"user","content":"v"}])");
  EXPECT_EQ(render("deepseek_v2.jinja", chat),
            "<｜begin▁of▁sentence｜>S\n\nUser: u\n\nAssistant: "
            "<think>t</think>a<｜end▁of▁sentence｜>User: v\n\nAssistant:");
  EXPECT_EQ(render("deepseek_v3.jinja", chat),
            "<｜begin▁of▁sentence｜>S<｜User｜>u<｜Assistant｜><think>t</think>a"
            "<｜end▁of▁sentence｜><｜User｜>v<｜Assistant｜>");
  const std::string r1 =
      "<｜begin▁of▁sentence｜>S<｜User｜>u<｜Assistant｜>a<｜end▁of▁sentence｜><｜User｜>v"
      "<｜Assistant｜><think>\n";
  EXPECT_EQ(render("deepseek_r1.jinja", chat), r1);
  EXPECT_EQ(render("models/tiny-r1", chat), r1);
  EXPECT_EQ(render("deepseek_v3_1.jinja", chat),
            "<｜begin▁of▁sentence｜>S<｜User｜>u<｜Assistant｜></think>a<｜end▁of▁sentence｜>"
            "<｜User｜>v<｜Assistant｜></think>");
  EXPECT_EQ(render("kimi_k2.jinja", chat),
            "<|im_system|>system<|im_middle|>S<|im_end|><|im_user|>user<|im_middle|>u<|im_end|>"
            "<|im_assistant|>assistant<|im_middle|><think>t</think>a<|im_end|>"
            "<|im_user|>user<|im_middle|>v<|im_end|><|im_assistant|>assistant<|im_middle|>");
}

std::vector<std::string> range_texts(const RenderedChat& chat) {
  std::vector<std::string> texts;
  for (const ByteRange& range : chat.content_ranges)
    texts.push_back(chat.text.substr(range.begin, range.end - range.begin));
  return texts;
}

RenderedChat with_ranges(const ChatTemplate& chat_template, const Json& messages) {
  return render_chat_with_ranges(chat_template, messages, {});
}

TEST(ChatTemplate, RangesHoldWhatUsersWrote) {
  const Json chat = Json::parse(R"([{"role":"system","content":" S\n"},
      {"role":"user","content":"é<｜end▁of▁sentence｜> x "},{"role":"assistant","content":"a</think>b"},
      {"role":"tool","content":"<think>"},{"role":"user","content":"  "}])");
  const std::vector<std::string> wanted = {"S", "é<｜end▁of▁sentence｜> x", "<think>"};
  for (const char* name : {"deepseek_v2_5.jinja", "deepseek_v3.jinja", "deepseek_r1.jinja",
                           "deepseek_v3_1.jinja", "kimi_k2.jinja", "models/tiny-r1"})
    EXPECT_EQ(range_texts(with_ranges(load(name), chat)), wanted) << name;
  const ChatTemplate trims("{% for m in messages %}[{{ m.content|trim }}]{% endfor %}");
  EXPECT_EQ(with_ranges(trims, chat).text, "[S][é<｜end▁of▁sentence｜> x][a</think>b][<think>][]");
  EXPECT_EQ(range_texts(with_ranges(trims, chat)), wanted);
}

TEST(ChatTemplate, MarksCannotBeTypedByAUser) {
  const Json chat = Json::parse("[{\"role\":\"user\",\"content\":\"a\U00100000b\U00100002c\"}]");
  const auto rendered = with_ranges(ChatTemplate("<{{ messages[0].content }}>"), chat);
  EXPECT_EQ(range_texts(rendered), std::vector<std::string>{"a\U00100000b\U00100002c"});
}

TEST(ChatTemplate, NoRangesWhenTheTemplateHidesThem) {
  const Json chat = Json::parse(R"([{"role":"user","content":"a,b"}])");
  for (const char* source :
       {"{{ messages[0].content|length }}", "{{ messages[0].content.split(',')[0] }}",
        "{{ messages[0].content[::-1] }}",
        "{{ raise_exception('x') if messages[0].content|length > 3 }}",
        "{{ 'y' if messages[0].content == 'a,b' else 'n' }}"}) {
    const ChatTemplate chat_template(source);
    const RenderedChat rendered = with_ranges(chat_template, chat);
    EXPECT_FALSE(rendered.has_ranges) << source;
    EXPECT_TRUE(rendered.content_ranges.empty()) << source;
    EXPECT_EQ(rendered.text, render_chat(chat_template, chat, {})) << source;
  }
}

TEST(ChatTemplate, RefusesMessagesThatAreNone) {
  const ChatTemplate any("{{ messages|length }}");
  for (const char* messages :
       {"{}", "null", "\"text\"", "[1]", "[{}]", R"([{"role":1}])", R"([{"content":"x"}])",
        R"([{"role":"user","content":1}])", R"([{"role":"user","content":{}}])",
        R"([{"role":"user","content":["x"]}])",
        R"([{"role":"user","content":[{"type":"image_url"}]}])",
        R"([{"role":"user","content":[{"type":"text","text":null}]}])"})
    EXPECT_THROW(render_chat(any, Json::parse(messages), {}), Error) << messages;
  ChatOptions options;
  options.tools = Json::object();
  EXPECT_THROW(render_chat(any, Json::array(), options), Error);
  options = {};
  options.extra = Json::array();
  EXPECT_THROW(render_chat(any, Json::array(), options), Error);
  EXPECT_EQ(render_chat(any, Json::parse(R"([{"role":"user"}])"), {}), "1");
}

}  // namespace
}  // namespace tandem
